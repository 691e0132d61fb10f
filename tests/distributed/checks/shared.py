"""What every rank runs for ``test_shared.py``: arrays in memory that all ranks of the node read."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import mycel
from mycel.runtime.arena import arena

LENGTH = 60_000  # elements a rank: many pieces


def placed(tensor: Tensor, *, shares: bool) -> Tensor:
    return mycel.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor) if shares else tensor.clone()


def given(rank: int, length: int = LENGTH) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank))


def collected(rank: int, size: int, sharing: list[int]) -> list[Tensor]:
    """Results of all collectives of this rank, whose arrays are shared or not."""
    shares = rank in sharing
    everything = [given(r, size * LENGTH) for r in range(size)]
    mine = everything[rank]

    def fresh(length: int) -> Tensor:
        return placed(torch.zeros(length), shares=shares)

    summed, averaged, sent = (placed(mine, shares=shares) for _ in range(3))
    gathered, scattered, exchanged = fresh(size * LENGTH), fresh(LENGTH), fresh(size * LENGTH)
    uneven = fresh(sum(15_000 * (r + 1) for r in range(size)))
    dist.all_reduce(summed)
    work = dist.all_reduce(averaged, op=dist.ReduceOp.AVG, async_op=True)
    dist.broadcast(sent, src=size - 1)
    dist.all_gather_into_tensor(gathered, placed(mine[:LENGTH], shares=shares))
    dist.reduce_scatter_tensor(scattered, placed(mine, shares=shares))
    dist.all_to_all_single(exchanged, placed(mine, shares=shares))
    dist.all_to_all_single(
        uneven,
        placed(mine[: size * 15_000 * (rank + 1)], shares=shares),
        [15_000 * (r + 1) for r in range(size)],
        [15_000 * (rank + 1)] * size,
    )
    work.wait()
    assert torch.equal(sent, everything[-1])
    assert torch.equal(gathered, torch.cat([each[:LENGTH] for each in everything]))
    assert torch.equal(exchanged, torch.cat([each.view(size, -1)[rank] for each in everything]))
    rows = [each[: size * 15_000 * (r + 1)].view(size, -1)[rank] for r, each in enumerate(everything)]
    assert torch.equal(uneven, torch.cat(rows))
    torch.testing.assert_close(summed, sum(everything))
    torch.testing.assert_close(scattered, sum(each.view(size, -1)[rank] for each in everything))
    return [summed, averaged, sent, gathered, scattered, exchanged, uneven]


def any_placement(rank: int, size: int) -> bool:
    """Whichever ranks share their arrays, the bits are the same."""
    expected = collected(rank, size, [])
    for sharing in (list(range(size)), [0], list(range(1, size))):
        assert all(map(torch.equal, collected(rank, size, sharing), expected)), sharing
    return True


def written_at_once(rank: int, size: int) -> bool:
    """What a call returns to may be overwritten: nobody reads it any more."""
    array = mycel.empty(size * LENGTH)
    parts = mycel.empty(LENGTH)
    for number in range(40):
        array.fill_(rank + number)
        dist.all_reduce(array)
        expected = sum(range(size)) + size * number
        assert bool((array == expected).all()), number
        parts.fill_(rank + number)
        work = dist.all_gather_into_tensor(array, parts, async_op=True)
        work.wait()
        parts.fill_(-1)
        assert array.view(size, -1)[:, ::4999].tolist() == [[r + number] * 13 for r in range(size)], number
        array.fill_(number if rank == number % size else -1)
        dist.broadcast(array, src=number % size)
        assert bool((array == number).all())
        array.fill_(-2)
    return True


def memory_comes_back(rank: int, size: int) -> int:
    """Bytes that the kernel has given after many arrays have come and gone."""
    for number in range(60):
        array = mycel.empty(1 << 20, dtype=torch.uint8 if number % 2 else torch.int32).fill_(1)
        dist.all_reduce(array)
        assert int(array[-1]) == size
    made = arena()
    assert made is not None
    return os.fstat(made.descriptor).st_blocks * 512


def failing_alone(rank: int, size: int) -> str:
    """Rank 0 gives up in the middle and writes to its array; rank 1, which comes late, must not take that."""
    warm_up, array = mycel.empty(1 << 20).fill_(1.0), mycel.empty(1 << 20).fill_(1.0 + rank)
    dist.broadcast(warm_up, src=0)
    try:
        if rank == 0:
            signal.signal(signal.SIGALRM, _give_up)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            try:
                dist.broadcast(array, src=0)
            finally:
                array.fill_(99.0)
        else:
            time.sleep(1.0)
            dist.broadcast(array, src=0)
    except KeyboardInterrupt:
        return "interrupted"
    except mycel.CommunicationError as error:
        return str(error)
    return f"no error, and {array[0]:g}"


def _give_up(*_: object) -> None:
    raise KeyboardInterrupt


def fsdp(rank: int, size: int) -> tuple[bool, int]:
    """FSDP2 with buffers from the group: the same losses, and how often it has asked."""
    asked: list[int] = []
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    real = backend.allocate_tensor

    def allocate(length: int, **kind: Any) -> Tensor:
        asked.append(length)
        made: Tensor = real(length, **kind)
        return made

    backend.allocate_tensor = allocate
    losses = []
    for asks in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
        mesh = dist.init_device_mesh("cpu", (size,))
        for layer in (*model, model):
            sharded: Any = fully_shard(layer, mesh=mesh)
            sharded.set_allocate_memory_from_process_group_for_comm(asks)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        for step in range(4):
            loss = model(given(10 * step + rank, 64 * 4).view(4, 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(float(loss))
        losses.append(seen)
    return losses[0] == losses[1], len(asked)
