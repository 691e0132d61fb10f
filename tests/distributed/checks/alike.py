"""Ranks of ``test_alike``: schedules of large groups, between few ranks."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from mycel.collectives import routes
from mycel.collectives.synth import flow, forest, nodes, tree
from mycel.runtime import proof, tensor_group


def collectives(rank: int, size: int) -> list[str]:
    """Every collective over what large groups run, each right; how the schedules of three of them are stated."""
    for module in (flow, forest, nodes, tree):
        module.NODES_FROM = 2
    routes._SEARCHED = proof._TOGETHER = 1
    store = dist.FileStore(os.environ["STORE_FILE"], size)
    dist.init_process_group("mycel", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=100))
    everyone = torch.arange(size, dtype=torch.float64)
    for length in (3, 5000):
        summed = everyone.repeat(length) * (rank + 1)
        dist.all_reduce(summed)
        assert torch.equal(summed, everyone.repeat(length) * (size * (size + 1) // 2))
        gathered = torch.empty(size * length, dtype=torch.float64)
        dist.all_gather_into_tensor(gathered, torch.full((length,), float(rank), dtype=torch.float64))
        assert torch.equal(gathered, everyone.repeat_interleave(length))
        own = torch.empty(length, dtype=torch.float64)
        dist.reduce_scatter_tensor(own, everyone.repeat_interleave(length))
        assert torch.equal(own, torch.full_like(own, float(rank * size)))
        got = torch.empty(size * length, dtype=torch.float64)
        dist.all_to_all_single(got, (everyone * 100 + rank).repeat_interleave(length))
        assert torch.equal(got, (everyone + 100 * rank).repeat_interleave(length))
        for root in (0, size - 1):
            spread = everyone.repeat(length) * (rank == root)
            dist.broadcast(spread, root)
            assert torch.equal(spread, everyone.repeat(length))
            dist.reduce(spread, root)
            assert rank != root or torch.equal(spread, everyone.repeat(length) * size)
    planner = tensor_group(dist.group.WORLD).communicator.planner
    names = ("all_reduce", "all_gather", "all_to_all")
    stated = [name for name in names if any(s.orbit is not None for s in planner.schedules(name).values())]
    dist.destroy_process_group()
    return stated
