"""How the ranks of a job find each other, again and again, and with a secret."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist


def again_on_one_port(rank: int, size: int, port: int, rounds: int) -> int:
    """Init, a sub-group, destroy, on the same port; rank 0's store comes and goes each time."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    for number in range(rounds):
        dist.init_process_group("mycel", init_method="env://", timeout=timedelta(seconds=60))
        part = dist.new_group([0, size - 1])
        data = torch.full((100,), float(number))
        dist.all_reduce(data)
        assert data.eq(number * size).all()
        if rank in (0, size - 1):
            dist.all_reduce(data, group=part)
            assert data.eq(2 * number * size).all()
        if number % 2 == 0:
            dist.destroy_process_group(part)
        dist.destroy_process_group()
    return rounds


def over_one_store(rank: int, size: int, rounds: int) -> int:
    """The store outlives the groups, and what the last one said still stands in it."""
    store = dist.FileStore(os.environ["STORE_FILE"], size)
    for number in range(rounds):
        dist.init_process_group("mycel", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        data = torch.full((100,), float(number))
        dist.all_reduce(data)
        assert data.eq(number * size).all()
        dist.destroy_process_group()
    return rounds


def with_a_secret(rank: int, size: int) -> list[float]:
    """Collectives over all sizes and a sub-group; all connections are proved."""
    sums = []
    part = dist.new_group(list(range(1, size)))
    for length in (1, 1000, 300_000):
        data = torch.full((length,), float(rank))
        dist.all_reduce(data)
        sums.append(data.mean().item())
        outputs = [torch.empty(length) for _ in range(size)]
        dist.all_gather(outputs, torch.full((length,), float(rank)))
        assert all(output.eq(number).all() for number, output in enumerate(outputs))
        if rank:
            data = torch.full((length,), 1.0)
            dist.all_reduce(data, group=part)
            assert data.eq(size - 1).all()
    return sums
