"""What every rank runs for ``test_speed.py``."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mycel.cost import Costs
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


def sockets(rank: int, world_size: int) -> dict[str, list[str]]:
    """Both kinds of sockets side by side: right results, from a word to what needs many pieces."""
    found = {}
    for kind in ("tcp", "unix"):
        os.environ["MYCEL_LOCAL"] = kind
        group = dist.new_group(backend="mycel")
        for length in (1, 1000, 1_000_003):
            array = torch.arange(length, dtype=torch.int64) * (rank + 1)
            dist.all_reduce(array, group=group)
            assert torch.equal(array, torch.arange(length) * (world_size * (world_size + 1) // 2))
            given = torch.full((world_size * length,), rank, dtype=torch.int32)
            taken = torch.empty_like(given)
            dist.all_to_all_single(taken, given, group=group)
            assert torch.equal(taken, torch.arange(world_size, dtype=torch.int32).repeat_interleave(length))
        found[kind] = _sockets(group)
    return found


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
