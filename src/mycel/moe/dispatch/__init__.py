"""Dispatchers: one way to bring tokens to experts a file, made by name over a ``DeviceMesh``."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mycel.errors import UsageError
from mycel.moe.codec import IdentityCodec, WireCodec
from mycel.moe.dispatch.all_gather import AllGatherDispatcher
from mycel.moe.dispatch.all_reduce import AllReduceDispatcher
from mycel.moe.dispatch.all_to_all import AllToAllDispatcher
from mycel.moe.dispatch.base import Dispatched, ExpertRanges, TokenDispatcher
from mycel.moe.dispatch.hierarchical import HierarchicalDispatcher
from mycel.moe.dispatch.local import LocalDispatcher

__all__ = [
    "DISPATCHERS",
    "AllGatherDispatcher",
    "AllReduceDispatcher",
    "AllToAllDispatcher",
    "Dispatched",
    "ExpertRanges",
    "HierarchicalDispatcher",
    "LocalDispatcher",
    "TokenDispatcher",
    "make_dispatcher",
]

Groups = tuple[dist.ProcessGroup, ...]


def _plain(name: str, codec: WireCodec) -> None:
    if not isinstance(codec, IdentityCodec):
        raise UsageError(f"dispatcher {name!r} sends tokens as they are; codecs are for the all-to-all ones")


def _all_gather(num_experts: int, groups: Groups, codec: WireCodec) -> TokenDispatcher:
    _plain("all_gather", codec)
    return AllGatherDispatcher(num_experts, *groups)


def _all_reduce(num_experts: int, groups: Groups, codec: WireCodec) -> TokenDispatcher:
    _plain("all_reduce", codec)
    return AllReduceDispatcher(num_experts, *groups)


#: Name of a dispatcher, the mesh dimensions it needs, and how it is made.
DISPATCHERS: dict[str, tuple[int, Callable[[int, Groups, WireCodec], TokenDispatcher]]] = {
    "local": (0, lambda num_experts, groups, codec: LocalDispatcher(num_experts)),
    "all_to_all": (1, lambda num_experts, groups, codec: AllToAllDispatcher(num_experts, *groups, codec=codec)),
    "hierarchical": (2, lambda num_experts, groups, codec: HierarchicalDispatcher(num_experts, *groups, codec=codec)),
    "all_gather": (1, _all_gather),
    "all_reduce": (1, _all_reduce),
}


def make_dispatcher(
    name: str | None, num_experts: int, mesh: DeviceMesh | None, *, codec: WireCodec | None = None
) -> TokenDispatcher:
    """A dispatcher for a layer.

    Args:
        name: a key of ``DISPATCHERS``; ``None``: ``all_to_all`` on a mesh of one dimension, ``hierarchical`` on one
            of two (nodes, ranks of a node), ``local`` without one.
        num_experts: of the layer.
        mesh: the ranks that experts are divided over; a two-dimensional one is flattened where one is needed.
        codec: of rows on the wire.

    Raises:
        UsageError: an unknown name, or a mesh or codec that the dispatcher cannot use.
    """
    dims = 0 if mesh is None else mesh.ndim
    if name is None:
        name = next((known for known, (needed, _) in DISPATCHERS.items() if needed == dims), "all_to_all")
    if name not in DISPATCHERS:
        raise UsageError(f"no dispatcher is called {name!r}; known: {', '.join(sorted(DISPATCHERS))}")
    needed, make = DISPATCHERS[name]
    if mesh is not None and needed == 1 and dims == 2:
        mesh, dims = mesh._flatten(), 1
    if needed != dims:
        raise UsageError(f"dispatcher {name!r} wants a mesh of {needed} dimensions, got {dims or 'none'}")
    groups = () if mesh is None else tuple(mesh.get_all_groups())
    return make(num_experts, groups, codec or IdentityCodec())
