"""One block from each rank to one other, over what the fabric has; and a ring of attention that goes this way."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.distributed.checks.sequence_models import apart
from torch import Tensor

from mycel.errors import PeerLostError
from mycel.planning.sequence import contiguous
from mycel.runtime import tensor_group
from mycel.sequence import SequenceContext, Way, attention


def block(rank: int, length: int, round_: int) -> Tensor:
    return torch.arange(length, dtype=torch.float64) + 1000 * rank + round_


def moved(rank: int, size: int) -> list[str]:
    """What arrived otherwise than it was sent, by pattern, length and round; and by which method blocks went."""
    group = tensor_group()
    communicator = group.communicator
    assert communicator is not None
    rotation: list[int | None] = [(r + 1) % size for r in range(size)]
    back: list[int | None] = [(r - 1) % size for r in range(size)]
    some: list[int | None] = [size - 1, *[None] * (size - 2), 0]
    wrong = []
    for number, targets in enumerate((rotation, back, some, rotation)):
        for length in (0, 1, 7, 4096, 100_003):
            lengths = [length + 3 * r if length else 0 for r in range(size)]
            source = targets.index(rank) if rank in targets else None
            for round_ in range(2):
                sent = block(rank, lengths[rank] if targets[rank] is not None else 0, round_)
                got = torch.full((0 if source is None else lengths[source],), -1.0, dtype=torch.float64)
                group.permute(got, sent, targets, lengths).wait()
                if source is not None and not got.equal(block(source, lengths[source], round_)):
                    wrong.append(f"pattern {number}, {length}, round {round_}")
    weights = tuple(int(targets_ == b) for targets_ in rotation for b in range(size))
    choice = communicator.planner.weighted_choice("all_to_all", weights, 1 << 22)
    for lengths, output in ([[3] * size, torch.empty(2)], [[3] * size, torch.empty(3, dtype=torch.int64)]):
        try:
            group.permute(output, torch.empty(3), rotation, lengths)
            wrong.append("taken")
        except ValueError:
            pass
    return [choice.method.partition("@")[0], *wrong]


def ring(rank: int, size: int) -> dict[str, float]:
    """Output and gradients of attention by a ring, and by all_gather, over ranks with unequal tokens."""
    found = {}
    layout = contiguous([19, 1, 7], size)
    made = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, heads, 27, 8, dtype=torch.float64, generator=made) for heads in (4, 2, 2))
    results = {}
    for name in ("gathered", "ring"):
        context = SequenceContext(layout)
        mine = [context.shard(x, 2).clone().requires_grad_() for x in (q, k, v)]
        out = attention(*mine, context, way=Way(between=name))  # type: ignore[arg-type]
        (out * torch.arange(out.numel()).view_as(out)).sum().backward()
        results[name] = {"out": out.detach(), **{str(i): x.grad for i, x in enumerate(mine) if x.grad is not None}}
        found[name] = float(context.meter.total())
    found["apart"] = apart(results["ring"], results["gathered"])
    return found


def killed(rank: int, size: int) -> None:
    """A rank that others relay for is gone: all others name it."""
    if rank == (victim := 1) and (child := os.fork()):
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        return
    store = dist.FileStore(os.environ["STORE_FILE"], size)
    dist.init_process_group("mycel", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    targets: list[int | None] = [(r + 1) % size for r in range(size)]
    sent, got = torch.ones(50_000), torch.empty(50_000)

    def once() -> None:
        tensor_group().permute(got, sent, targets, [len(sent)] * size).wait()

    once()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError, match=f"rank {victim}"):
        for _ in range(3):
            once()
