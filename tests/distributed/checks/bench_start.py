"""What every rank runs for ``test_bench.py`` of the common start of rounds."""

from __future__ import annotations

import time

import torch.distributed as dist

from mycel.bench import start


def starts(rank: int, size: int, foreign: bool) -> tuple[bool, list[tuple[float, float]]]:
    """Whether ranks share a clock, and when this one came to the start of each round and when it went on."""
    if foreign and rank == size - 1:
        start._clock = lambda: "another machine's"
    begin = start.Start(dist.group.WORLD)
    times = []
    for turn in range(size):
        if turn == rank:  # another one is late in every round
            sum(range(500_000))
        came = time.monotonic()
        begin()
        times.append((came, time.monotonic()))
    return begin.shares_clock, times
