"""What every rank runs for ``test_speed.py``."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import socket
import tempfile
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mycel.cost import Costs
from mycel.errors import CollectiveTimeoutError
from mycel.runtime import tensor_group
from mycel.runtime.calibration import calibration_file, costs_to_text

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
SIZES = tuple(1 << power for power in range(6, 27, 2))
#: Of one rank: a machine that would make other choices than any of the others.
MACHINES = (
    Costs(message_s=1e-6, wake_s=1e-6, copy_s_per_gb=0.01, add_s_per_gb=0.01, cores=64),
    Costs(message_s=1e-3, wake_s=1e-6, copy_s_per_gb=0.01, add_s_per_gb=0.01, cores=1),
    Costs(message_s=1e-6, wake_s=1e-2, copy_s_per_gb=10.0, add_s_per_gb=0.01, cores=2),
    Costs(message_s=1e-7, wake_s=0.0, copy_s_per_gb=0.0, add_s_per_gb=50.0, cores=8),
)


def _choices(group: Any) -> dict[str, tuple[str, int, float]]:
    found = {}
    for name in COLLECTIVES:
        for size in SIZES:
            choice = tensor_group(group).communicator.planner.choice(name, 0 if name == "broadcast" else None, size)
            found[f"{name} {size}"] = (choice.method, choice.piece_bytes, choice.seconds)
    return found


def _group_of(costs: Costs) -> Any:
    """A group made on a machine that is remembered as this."""
    with tempfile.TemporaryDirectory() as folder:
        calibration_file(Path(folder)).write_text(costs_to_text(costs))
        os.environ["MYCEL_CACHE"] = folder
        return dist.new_group(backend="mycel")


def choices(rank: int, world_size: int) -> list[dict[str, tuple[str, int, float]]]:
    """What is chosen where every rank measured something else, first as rank 0 did and then as rank 1 did."""
    ours = _choices(_group_of(MACHINES[rank % len(MACHINES)]))
    return [ours, _choices(_group_of(MACHINES[(rank + 1) % len(MACHINES)]))]


def _sockets(group: Any) -> list[str]:
    """Families of the descriptors that carry the group's bytes."""
    families = []
    for descriptor in tensor_group(group).communicator._channels.descriptors.values():
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            families.append(sock.family.name)
    return sorted(set(families))


def transports(rank: int, world_size: int) -> dict[str, tuple[list[str], bool, list[bytes]]]:
    """Memory and both kinds of sockets side by side: right results, from a word to what needs many pieces.

    By kind the families of the sockets, whether all channels are rings, and the bits of sums of floats.
    """
    found = {}
    for kind in ("tcp", "unix", "memory"):
        os.environ["MYCEL_LOCAL"] = kind
        group = dist.new_group(backend="mycel")
        bits = []
        for length in (1, 1000, 1_000_003):
            array = torch.arange(length, dtype=torch.int64) * (rank + 1)
            dist.all_reduce(array, group=group)
            assert torch.equal(array, torch.arange(length) * (world_size * (world_size + 1) // 2))
            given = torch.full((world_size * length,), rank, dtype=torch.int32)
            taken = torch.empty_like(given)
            dist.all_to_all_single(taken, given, group=group)
            assert torch.equal(taken, torch.arange(world_size, dtype=torch.int32).repeat_interleave(length))
            for _ in range(3):
                floats = torch.randn(length, generator=torch.Generator().manual_seed(rank))
                dist.all_reduce(floats, group=group)
                bits.append(hashlib.sha256(floats.numpy().tobytes()).digest())
        channels = tensor_group(group).communicator._channels
        found[kind] = (_sockets(group), channels.rings.keys() == channels.descriptors.keys(), bits)
    return found


def _noted(communicator: Any) -> list[bool]:
    """Of each call that may be run again, whether it was, from now on."""
    taken: list[bool] = []
    run_again = communicator.run_again

    def noting(*arguments: Any) -> bool:
        taken.append(run_again(*arguments))
        return taken[-1]

    communicator.run_again = noting
    return taken


def small_calls_again(rank: int, world_size: int) -> None:
    """Small blocking sums, run again and again: every kind of tensor, among calls of other kinds."""
    communicator = tensor_group().communicator
    taken = _noted(communicator)
    total = sum(range(1, world_size + 1))
    for turn in range(1, 5):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
            whole = torch.full((40,), rank + 1).to(dtype)
            dist.all_reduce(whole)
            assert torch.equal(whole, torch.full((40,), total).to(dtype)), (turn, dtype)
        column = torch.full((6, 7), rank + 1.0)[:, 2]
        dist.all_reduce(column)
        assert (column == total).all()
        mean = torch.full((40,), rank + 1.0)
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        assert (mean == total / world_size).all()
        most = torch.full((40,), float(rank * turn))
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        assert (most == (world_size - 1) * turn).all()
        turned = torch._neg_view(torch.full((40,), float(rank)))
        dist.all_reduce(turned)
        assert (turned == -sum(range(world_size))).all()
        under_way = dist.all_reduce(torch.ones(40), async_op=True)
        among = torch.ones(40)
        dist.all_reduce(among)
        assert (among == world_size).all()
        assert under_way is not None
        under_way.wait()
        options = dist.AllreduceOptions()
        options.asyncOp = False
        tensor = torch.ones(40)
        work = dist.group.WORLD.allreduce([tensor], options)
        assert work.is_completed() and work.is_success() and work.wait() and work.exception() is None
        (result,) = work.get_future().wait()
        assert result is tensor and work.result() == [tensor] and (tensor == world_size).all()
        dist.all_reduce(torch.empty(0))
    assert sum(taken) >= 3 * 8, f"{sum(taken)} of {len(taken)} calls were run again"
    assert dist.group.WORLD._get_sequence_number_for_group() == communicator.number


def calls_again_hold_nothing(rank: int, world_size: int) -> None:
    """Arrays of one machine's ranks take the short way up to 4 MB, and are their callers' alone afterwards."""
    communicator = tensor_group().communicator
    taken = _noted(communicator)
    held = []
    for turn in range(4):
        memory = np.full(1 << 20, float(rank + turn), dtype=np.float32)
        whole = torch.from_numpy(memory)
        dist.all_reduce(whole)
        assert (whole == sum(r + turn for r in range(world_size))).all()
        held.append(weakref.ref(memory))
        del memory, whole
    gc.collect()
    assert any(taken) == communicator.is_local
    assert held[-1]() is None


def other_small_calls_again(rank: int, world_size: int) -> None:
    """Small blocking calls of the other kinds, run again: other arrays, roots, types and shapes each time."""
    communicator = tensor_group().communicator
    taken = _noted(communicator)
    n = world_size
    for turn in range(4):
        for dtype in (torch.float32, torch.int64, torch.complex64):
            mine = (torch.arange(n * 6) + 100 * rank + turn).to(dtype)
            everything = [(torch.arange(n * 6) + 100 * r + turn).to(dtype) for r in range(n)]
            gathered = torch.zeros(n * n * 6, dtype=dtype)
            dist.all_gather_into_tensor(gathered, mine)
            assert torch.equal(gathered, torch.cat(everything))
            for root in range(n):
                sent = mine.clone()
                dist.broadcast(sent, src=root)
                assert torch.equal(sent, everything[root])
            exchanged = torch.zeros(n * 6, dtype=dtype)
            dist.all_to_all_single(exchanged, mine)
            assert torch.equal(exchanged, torch.cat([each.view(n, -1)[rank] for each in everything]))
            dist.all_to_all_single(mine.clone(), mine)  # of the same shapes, elsewhere
            scattered = torch.zeros(6, dtype=dtype)
            dist.reduce_scatter_tensor(scattered, mine)
            assert torch.equal(scattered, sum(everything).view(n, -1)[rank])
        own = torch.zeros(n, 3)
        own[rank] = rank + turn
        dist.all_gather_into_tensor(own.view(-1), own[rank])  # the input lies in the output
        assert torch.equal(own, (torch.arange(n) + turn).float()[:, None].expand(n, 3))
        least = torch.zeros(2)
        dist.reduce_scatter_tensor(least, torch.full((2 * n,), float(rank + turn)), op=dist.ReduceOp.MIN)
        assert (least == turn).all()
        same = torch.arange(n * 4.0) + 10 * rank
        dist.all_to_all_single(same, same)  # what is read is written
        assert torch.equal(same, torch.cat([torch.arange(4.0) + 4 * rank + 10 * r for r in range(n)]))
        with pytest.raises(ValueError, match="rows that divide by"):
            dist.all_to_all_single(torch.zeros(1, n * 6), torch.zeros(1, n * 6))
        turned = torch._neg_view(torch.full((n * 2,), float(rank)))
        back = torch.zeros(n * 2)
        dist.all_to_all_single(back, turned)
        assert back.tolist() == [-float(r) for r in range(n) for _ in range(2)]
    assert sum(taken) >= 3 * 3 * (4 + n), f"{sum(taken)} of {len(taken)} calls were run again"
    assert dist.group.WORLD._get_sequence_number_for_group() == communicator.number


def small_calls_among_signals(rank: int, world_size: int, count: int) -> None:
    """Signals come at any moment of small sums."""
    came = []

    def handle(*_: object) -> None:
        came.append(1)

    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        for turn in range(count):
            tensor = torch.full((8,), float(turn + rank))
            dist.all_reduce(tensor)
            assert (tensor == world_size * turn + sum(range(world_size))).all()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert came


def small_calls_that_fail(rank: int, world_size: int) -> None:
    """A rank that does not come, after calls that went well: everybody says who it was, and of which call."""
    group = dist.new_group(backend="mycel", timeout=timedelta(seconds=1))
    for _ in range(3):
        dist.all_reduce(torch.ones(4), group=group)
    number = tensor_group(group).number
    if rank == 1:
        time.sleep(2.5)
    else:
        with pytest.raises(CollectiveTimeoutError, match=rf"all_reduce #{number + 1}\b.*rank 1"):
            dist.all_reduce(torch.ones(4), group=group)


def methods(rank: int, world_size: int) -> str:
    """A classic that was asked for carries an all_reduce, and other collectives go their usual way."""
    os.environ["MYCEL_METHODS"] = "ring"
    group: Any = dist.new_group(backend="mycel")
    array = torch.full((5000,), float(rank))
    dist.all_reduce(array, group=group)
    assert torch.equal(array, torch.full((5000,), float(sum(range(world_size)))))
    taken = torch.empty(world_size)
    dist.all_to_all_single(taken, torch.full((world_size,), float(rank)), group=group)
    assert torch.equal(taken, torch.arange(float(world_size)))
    return str(tensor_group(group).communicator.planner.choice("all_reduce", None, 20000).method)
