"""Which ranks share a node, from a topology: as ranks, and as a mesh."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mycel.errors import UsageError
from mycel.runtime.communicator import Communicator
from mycel.runtime.tensor_group import TensorGroup, tensor_group
from mycel.topology.model import Topology

__all__ = ["equal_nodes", "node_mesh", "nodes_of", "planned_group", "with_bandwidths"]


#: Ranks of each node.
Nodes = tuple[tuple[int, ...], ...]


def nodes_of(topology: Topology) -> Nodes:
    """Ranks of each node, nodes in the order of their first rank; a single node where the topology names none.

    Args:
        topology: the fabric.

    Returns:
        For each node its ranks, ascending.

    Examples:
        >>> from mycel.topology.builders import two_boxes
        >>> nodes_of(two_boxes(num_ranks=4))
        ((0, 1), (2, 3))
    """
    return tuple(topology.ranks_by_node.values())


def equal_nodes(topology: Topology, wanted_by: str) -> Nodes:
    """Ranks of each node, of which there are equally many on all.

    Args:
        topology: the fabric.
        wanted_by: what needs them, for the message.

    Raises:
        UsageError: nodes differ in size.
    """
    nodes = nodes_of(topology)
    if len({len(node) for node in nodes}) != 1:
        sizes = ", ".join(str(len(node)) for node in nodes)
        raise UsageError(f"topology {topology.name!r} has nodes of {sizes} ranks; {wanted_by} wants equal ones")
    return nodes


def node_mesh(topology: Topology, *, device_type: str = "cpu") -> DeviceMesh:
    """A mesh of dimensions ``node`` and ``local`` over all ranks, by the topology's nodes. Every rank calls it.

    Args:
        topology: the fabric, with one rank a process; nodes have equally many.
        device_type: of the mesh, as ``DeviceMesh`` takes it: ``"cpu"``, ``"cuda"``.

    Returns:
        Shape ``(nodes, ranks of a node)``; the mesh that hierarchical exchanges take.

    Raises:
        UsageError: the topology has not as many ranks as the world, or nodes differ in size.

    Examples:
        On each of the 8 processes of a group, over two nodes::

            mesh = node_mesh(mycel.load_topology("two_boxes:ranks=8"))
            mesh.shape  # (2, 4)
            layer = mycel.moe.MoE(dim=512, hidden=1024, num_experts=16, parallel=mesh)
    """
    if topology.num_ranks != dist.get_world_size():
        raise UsageError(
            f"topology {topology.name!r} has {topology.num_ranks} ranks, the world {dist.get_world_size()}"
        )
    nodes = equal_nodes(topology, "a mesh")
    return DeviceMesh(device_type, [list(node) for node in nodes], mesh_dim_names=("node", "local"))


def planned_group(group: dist.ProcessGroup) -> TensorGroup | None:
    """What is behind a group, where it is mycel's and its topology says how fast links are.

    Args:
        group: of any backend.
    """
    return None if with_bandwidths(group) is None else tensor_group(group)


def with_bandwidths(group: dist.ProcessGroup) -> Communicator | None:
    """What carries a group's calls, where it is mycel's and its topology says how fast links are.

    Args:
        group: of any backend.
    """
    try:
        communicator = tensor_group(group).communicator
    except ValueError:  # another backend's, or one that torch does not know
        return None
    if communicator is None or communicator.topology.bytes_per_second_per_unit is None:
        return None
    return communicator
