"""Groups whose control connections are a graph: ranks of one machine that take each other for several machines."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from tests.faults.__main__ import EARLIER

from mycel.errors import CommunicationError
from mycel.runtime import tensor_group
from mycel.runtime.transport import address, rendezvous

#: Twelve ranks plan and connect inside it, on machines that may be busy with other things.
LIMIT_S = 180.0


def pretend_machines(rank: int, per_machine: int) -> None:
    """So many ranks on each machine, as far as this process and the others know; loopback connects them all."""
    address._host = lambda: f"machine{rank // per_machine}/net"
    rendezvous.is_loopback = lambda ip: False


def join(rank: int, size: int) -> None:
    store = dist.FileStore(os.environ["STORE_FILE"], size)
    dist.init_process_group("mycel", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT_S))


def check_sum(size: int) -> None:
    data = torch.full((1000,), float(dist.get_rank()))
    dist.all_reduce(data)
    assert data.eq(size * (size - 1) / 2).all()


def works(rank: int, size: int, per_machine: int, has_many: bool) -> tuple[int, bool]:
    """A sum, messages, and a goodbye; how many neighbours a rank has, and whether they relay.

    ``has_many``: other collectives and a sub-group, too, which take long to plan.
    """
    pretend_machines(rank, per_machine)
    join(rank, size)
    communicator = tensor_group().communicator
    assert communicator is not None
    found = len(communicator.control.neighbours), communicator.control.relays
    check_sum(size)
    if has_many:
        out = torch.empty(size, dtype=torch.int64)
        dist.all_gather_into_tensor(out, torch.tensor([rank]))
        assert out.tolist() == list(range(size))
        part = dist.new_group(list(range(1, size)))
        if rank:
            data = torch.ones(10)
            dist.all_reduce(data, group=part)
            assert data.eq(size - 1).all()
    got = torch.empty(1)
    request = dist.irecv(got, (rank - 1) % size)
    dist.send(torch.tensor([float(rank)]), (rank + 1) % size)
    assert request is not None
    request.wait()
    assert got.item() == (rank - 1) % size
    dist.destroy_process_group()
    return found


def lose(
    rank: int, size: int, per_machine: int, how: str, victims: Sequence[int], timeout_s: float
) -> tuple[str, str, float] | None:
    """Ranks are killed, or stopped, while the others wait for them in a call; the error of the others, and when."""
    pretend_machines(rank, per_machine)
    told = dist.FileStore(os.environ["STORE_FILE"] + "-told", -1)
    if rank in victims and (pid := os.fork()):  # what is lost is a child, so that the test's own rank lives
        until = time.monotonic() + LIMIT_S
        while told.add("told", 0) < size - len(victims) and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return None
    join(rank, size)
    check_sum(size)
    tensor_group().set_timeout(timedelta(seconds=timeout_s))  # planning and opening may take longer
    told.add("summed", 1)
    while told.add("summed", 0) < size:  # others may be in that sum yet
        time.sleep(0.05)
    if rank in victims:
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    began = time.monotonic()
    found = ("none", "", 0.0)
    try:
        for _ in range(2):  # one is over for whom the victim had sent its part
            dist.all_reduce(torch.ones(1000))
    except CommunicationError as error:
        # A rank whose first sum is over learns of it when it begins the second.
        found = type(error).__name__, str(error).removeprefix(EARLIER), time.monotonic() - began
    told.add("told", 1)
    while told.add("told", 0) < size - len(victims):  # who ends now is another loss
        time.sleep(0.05)
    return found


def differ(rank: int, size: int, per_machine: int, odd: int) -> tuple[str, str]:
    """The first calls differ, and use other channels: who waits says to whom it waits for what it is in."""
    pretend_machines(rank, per_machine)
    join(rank, size)
    found = ("none", "")
    try:
        if rank == odd:
            dist.broadcast(torch.ones(1000), 0)
        else:
            dist.all_reduce(torch.ones(1000))
        dist.barrier()
    except CommunicationError as error:
        found = type(error).__name__, str(error)
    return found
