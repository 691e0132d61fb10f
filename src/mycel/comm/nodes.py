"""Which ranks share a machine: from a topology, as a mesh for the hierarchical dispatcher."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mycel.errors import UsageError
from mycel.topology.model import Topology

__all__ = ["boxes_of", "node_mesh"]


def boxes_of(topology: Topology) -> tuple[tuple[int, ...], ...]:
    """Ranks of each box, boxes in the order of their first rank; one box where the topology names none.

    Examples:
        >>> from mycel.topology.builders import two_boxes
        >>> boxes_of(two_boxes(num_ranks=4))
        ((0, 1), (2, 3))
    """
    return tuple(topology.ranks_by_box.values())


def node_mesh(topology: Topology, *, device_type: str = "cpu") -> DeviceMesh:
    """A mesh of dimensions ``node`` and ``local`` over all ranks, by the topology's boxes. Every rank calls it.

    Raises:
        UsageError: the topology has not as many ranks as the world, or boxes differ in size.
    """
    boxes = boxes_of(topology)
    if topology.num_ranks != dist.get_world_size():
        raise UsageError(
            f"topology {topology.name!r} has {topology.num_ranks} ranks, the world {dist.get_world_size()}"
        )
    if len({len(box) for box in boxes}) != 1:
        sizes = ", ".join(str(len(box)) for box in boxes)
        raise UsageError(f"topology {topology.name!r} has boxes of {sizes} ranks; a mesh wants equal ones")
    return DeviceMesh(device_type, [list(box) for box in boxes], mesh_dim_names=("node", "local"))
