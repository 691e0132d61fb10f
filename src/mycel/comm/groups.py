"""Process groups that a mesh has no dimension for, made once."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["flat_group", "is_in_order", "subgroup"]

_SUBGROUPS: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()


def flat_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """All ranks of a mesh, in ascending order. All of them call this."""
    if mesh.ndim == 1:
        return mesh.get_group()
    world: dist.ProcessGroup = dist.distributed_c10d._get_default_group()
    return subgroup(world, tuple(sorted(mesh.mesh.flatten().tolist())))


def is_in_order(mesh: DeviceMesh) -> bool:
    """Whether ranks ascend row by row, so that places in the mesh are those in its ``flat_group``."""
    ranks = mesh.mesh.flatten().tolist()
    return bool(ranks == sorted(ranks))


def subgroup(group: dist.ProcessGroup, members: tuple[int, ...]) -> dist.ProcessGroup:
    """Some ranks of a group, by their number in it, ascending. All of them call this, and only they need to."""
    if len(members) == dist.get_world_size(group):
        return group
    known = _SUBGROUPS.setdefault(group, {})
    if members not in known:
        ranks = dist.get_process_group_ranks(group)
        made = dist.new_group([ranks[member] for member in members], use_local_synchronization=True)
        known[members] = made
    return known[members]
