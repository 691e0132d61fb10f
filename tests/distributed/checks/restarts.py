"""After a failure a group is destroyed and another one made, in the same processes."""

from __future__ import annotations

import gc
import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.settled import settled

from mycel.errors import MismatchError


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def again_and_again(rank: int, size: int, rounds: int) -> list[tuple[int, int]]:
    """A failure a round; descriptors and threads after each."""
    counts = []
    for number in range(rounds):
        store = dist.FileStore(f"{os.environ['STORE_FILE']}{number}", size)
        dist.init_process_group("mycel", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=20))
        data = torch.ones(1 << 16)
        dist.all_reduce(data, async_op=number % 2 == 1)
        with pytest.raises(MismatchError, match="rank 1 called"):
            dist.all_reduce(torch.ones(1000 if rank == 1 else 2000))
        with pytest.raises(MismatchError, match="failed earlier"):
            dist.all_reduce(data)
        dist.destroy_process_group()
        del store
        gc.collect()  # an error knows the frames it came through, and they know the group
        counts.append(settled(lambda: (descriptors(), threading.active_count())))
    store = dist.FileStore(f"{os.environ['STORE_FILE']}.last", size)
    dist.init_process_group("mycel", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=20))
    data = torch.full((1000,), float(rank))
    dist.all_reduce(data)
    assert data.eq(size * (size - 1) / 2).all()
    return counts
