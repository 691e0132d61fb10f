"""A job on a part of the cluster that its topology describes."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist

from mycel.runtime import tensor_group


def labels(rank: int, size: int) -> tuple[list[str], list[str], float]:
    """Ranks of the fabric that the whole group and one of its last two are on; sums are right."""
    whole = tensor_group().communicator.topology
    last = dist.new_group([size - 2, size - 1])
    array = torch.full((70_000,), float(rank))
    dist.all_reduce(array)
    part = [] if rank < size - 2 else _labels_of(tensor_group(last).communicator.topology)
    return _labels_of(whole), part, array[-1].item()


def by_itself(rank: int, size: int, store: str) -> list[str]:
    """What is warned of where no host is a node of the file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.init_process_group("mycel", store=dist.FileStore(store, size), rank=rank, world_size=size)
        labels(rank, size)
    return [str(warning.message) for warning in caught if "MYCEL_RANKS" in str(warning.message)]


def _labels_of(topology: object) -> list[str]:
    return [topology.label(vertex) for vertex in topology.ranks]  # type: ignore[attr-defined]
