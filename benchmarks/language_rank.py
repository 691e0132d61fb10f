"""A rank of ``claims/language.py``: all_reduces over groups with and without a registered schedule, in turns.

    python benchmarks/language_rank.py FILE.py BYTES ROUNDS NAME...

A NAME is a written collective of the file; ``usual`` is what the cost model takes by itself, and ``again`` the very
same schedule, registered. Rank 0 prints a line a name: times of the slowest rank, the name of what ran, and whether
all sums were right.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from mycel.bench.start import Start
from mycel.collectives.language import load_written
from mycel.runtime import register, tensor_group
from mycel.settings import read_launched


def main() -> None:
    """Measure."""
    file, num_bytes, rounds, names = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    launched, timeout = read_launched(), timedelta(seconds=300)
    torch.set_num_threads(1)
    where = f"tcp://{launched.master_address}:{launched.master_port}"
    dist.init_process_group(
        "gloo", init_method=where, rank=launched.rank, world_size=launched.world_size, timeout=timeout
    )
    size = launched.world_size
    groups = {name: dist.new_group(backend="mycel", timeout=timeout) for name in names}
    start = Start(dist.new_group(backend="gloo", timeout=timeout))
    methods = {}
    for name, group in groups.items():
        communicator = tensor_group(group).communicator
        assert communicator is not None
        if name == "again":
            usual = communicator.planner.choice("all_reduce", None, num_bytes).method
            register(communicator.planner.schedules("all_reduce")[usual], group=group)
        elif name != "usual":
            register(load_written(f"{file}:{name}"), group=group)
        choice = communicator.planner.choice("all_reduce", None, num_bytes)
        methods[name] = (choice.method, choice.piece_bytes)
    times: dict[str, list[float]] = {name: [] for name in names}
    wrong = dict.fromkeys(names, 0)
    count = num_bytes // 4
    expected = torch.arange(count, dtype=torch.float32) % 7 * size + size * (size - 1) / 2
    for turn in range(rounds + 1):  # the first opens connections
        for name, group in groups.items():
            tensor = torch.arange(count, dtype=torch.float32) % 7 + launched.rank
            start()
            began = time.perf_counter()
            dist.all_reduce(tensor, group=group)
            seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
            wrong[name] += int((tensor != expected).sum())
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=start.control)
            if turn:
                times[name].append(seconds.item())
    if launched.rank == 0:
        for name in names:
            method, piece = methods[name]
            said = {
                "name": name,
                "method": method,
                "piece_bytes": piece,
                "times_s": times[name],
                "wrong": wrong[name],
            }
            print(json.dumps(said), flush=True)
    dist.barrier(group=start.control)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
