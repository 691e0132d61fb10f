"""First calls of a group, on every rank, for ``test_first_calls.py``: channels are opened then, not before."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.settled import settled

from mycel.errors import CommunicationError, MismatchError, PeerLostError
from mycel.runtime import planner, tensor_group


def _num_sockets() -> int:
    """Connected sockets of this process."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it has gone meanwhile, or is not connected
            if stat.S_ISSOCK(os.fstat(int(entry.name)).st_mode):
                with socket.socket(fileno=os.dup(int(entry.name))) as sock:
                    sock.getpeername()
                    found += 1
    return found


def nothing_is_opened_before(rank: int, size: int) -> None:
    """A group has one connection a pair until something is called."""
    dist.barrier()
    before = settled(_num_sockets)
    dist.barrier()
    group = dist.new_group(list(range(size)))
    assert settled(_num_sockets) - before == size - 1
    dist.barrier()
    x = torch.ones(5)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [float(size)] * 5
    assert settled(_num_sockets) - before > size - 1
    dist.barrier()  # who leaves closes its end, and a reset connection has no peer to count


def who_starts_need_not_wait(rank: int, size: int) -> None:
    """Ranks come to a call by way of a message from one that has started it, and has not been waited for."""
    group = dist.new_group(list(range(size)))
    x = torch.full((3,), 1.0 + rank)
    if rank == 0:
        work = dist.all_reduce(x, group=group, async_op=True)
        for peer in range(1, size):
            dist.send(torch.ones(1), peer)
    else:
        dist.recv(torch.zeros(1), 0)
        work = dist.all_reduce(x, group=group, async_op=True)
    work.wait()
    assert x.tolist() == [size * (size + 1) / 2] * 3


def groups_in_other_orders(rank: int, size: int) -> None:
    """Two groups whose first calls come in different orders on the ranks; and who only sends waits for nobody."""
    groups = [dist.new_group(list(range(size))) for _ in range(3)]
    arrays = [torch.full((3,), 1.0 + rank) for _ in groups]
    order = (0, 1) if rank % 2 else (1, 0)
    works = [dist.all_reduce(arrays[number], group=groups[number], async_op=True) for number in order]
    for work in works:
        work.wait()
    told = torch.full((3,), 7.0 if rank == 0 else 0.0)
    if rank == 0:
        dist.broadcast(told, 0, group=groups[2])
    dist.barrier()
    if rank != 0:
        dist.broadcast(told, 0, group=groups[2])
    assert [array.tolist() for array in arrays[:2]] == [[size * (size + 1) / 2] * 3] * 2
    assert told.tolist() == [7.0] * 3


def many_first_calls_at_once(rank: int, size: int) -> None:
    """Calls that need other channels each, started one behind the other, come out right and in order."""
    group = dist.new_group(list(range(size)))
    x, y = torch.full((4,), 1.0 + rank), torch.full((2,), float(rank))
    out = [torch.zeros(2) for _ in range(size)]
    given = [torch.full((2,), float(10 * rank + peer)) for peer in range(size)]
    got = [torch.zeros(2) for _ in range(size)]
    works = [
        dist.all_reduce(x, group=group, async_op=True),
        dist.all_gather(out, y, group=group, async_op=True),
        dist.all_to_all(got, given, group=group, async_op=True),
        dist.broadcast(y, size - 1, group=group, async_op=True),
    ]
    for work in works:
        work.wait()
    assert x.tolist() == [size * (size + 1) / 2] * 4
    assert [each.tolist() for each in out] == [[float(peer)] * 2 for peer in range(size)]
    assert [each.tolist() for each in got] == [[float(10 * peer + rank)] * 2 for peer in range(size)]
    assert y.tolist() == [size - 1.0] * 2


def who_died_is_named(rank: int, size: int) -> None:
    """A rank that dies before its first call, while others wait for its channels, is named at once, by all."""
    group = dist.new_group(list(range(size)), timeout=timedelta(seconds=120))
    dist.barrier()
    began = time.monotonic()
    if rank == 1:
        communicator = tensor_group(group).communicator
        assert communicator is not None
        communicator.control.after_fork_in_child()  # connections end without a goodbye, as when a process is killed
        return
    with pytest.raises(PeerLostError, match="rank 1 was lost during all_reduce"):
        dist.all_reduce(torch.ones(3), group=group)
    assert time.monotonic() - began < 60.0  # half of the time-out


def who_plans_is_named(rank: int, size: int, timeout_s: float) -> tuple[str, str]:
    """A rank whose planning takes longer than the others' time-out: what each rank is told."""
    group = dist.new_group(list(range(size)), timeout=timedelta(seconds=timeout_s))
    communicator = tensor_group(group).communicator
    assert communicator is not None
    synthesize, until = planner.synthesize, time.monotonic() + 60.0

    def slowly(*args: Any, **options: Any) -> Any:
        while communicator.cause is None and time.monotonic() < until:
            time.sleep(0.02)
        return synthesize(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(planner, "synthesize", slowly)
        with pytest.raises(CommunicationError) as raised:
            dist.all_gather_into_tensor(torch.empty(3 * size), torch.ones(3), group=group)
    return type(raised.value).__name__, str(raised.value)


def who_left_is_named(rank: int, size: int) -> None:
    """So is one that destroyed its group instead of calling."""
    group = dist.new_group(list(range(size)), timeout=timedelta(seconds=120))
    dist.barrier()
    if rank == 1:
        dist.destroy_process_group(group)
        return
    with pytest.raises(PeerLostError, match="rank 1 left"):
        dist.all_reduce(torch.ones(3), group=group)


def other_first_calls_are_told(rank: int, size: int, warm: bool) -> None:
    """Ranks whose first calls need other channels do not wait for each other until the deadline."""
    group = dist.new_group(list(range(size)), timeout=timedelta(seconds=200))
    if warm:
        dist.all_reduce(torch.ones(3), group=group)
    calls: dict[bool, Callable[[], object]] = {
        False: lambda: dist.all_reduce(torch.ones(3), group=group),
        True: lambda: dist.all_to_all_single(torch.zeros(size), torch.ones(size), group=group),
    }
    began = time.monotonic()
    with pytest.raises(MismatchError, match=rf"rank {size - 1} called all_to_all.*rank 0"):
        calls[rank == size - 1]()
    assert time.monotonic() - began < 100.0  # half of the time-out
