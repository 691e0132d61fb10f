"""Dispatchers: one way to bring tokens to experts a file, made by name over a ``DeviceMesh``."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from mycel.comm.groups import flat_group
from mycel.comm.meter import ByteMeter
from mycel.errors import UsageError
from mycel.moe.dispatch.all_gather import AllGatherDispatcher
from mycel.moe.dispatch.all_reduce import AllReduceDispatcher
from mycel.moe.dispatch.all_to_all import AllToAllDispatcher
from mycel.moe.dispatch.base import Dispatched, SteppedDispatcher, TokenDispatcher
from mycel.moe.dispatch.hierarchical import HierarchicalDispatcher
from mycel.moe.dispatch.local import LocalDispatcher
from mycel.names import spelled
from mycel.wire import IdentityCodec, WireCodec, make_codec

__all__ = [
    "DISPATCHERS",
    "AllGatherDispatcher",
    "AllReduceDispatcher",
    "AllToAllDispatcher",
    "Dispatched",
    "HierarchicalDispatcher",
    "LocalDispatcher",
    "SteppedDispatcher",
    "TokenDispatcher",
    "make_dispatcher",
]

#: Name of a dispatcher, the mesh dimensions it needs, and its class. ``Any``: it takes the number of experts and a
#: group for each dimension, so that signatures differ.
DISPATCHERS: dict[str, tuple[int, type[Any]]] = {
    "local": (0, LocalDispatcher),
    "all_to_all": (1, AllToAllDispatcher),
    "hierarchical": (2, HierarchicalDispatcher),
    "all_gather": (1, AllGatherDispatcher),
    "all_reduce": (1, AllReduceDispatcher),
}


def make_dispatcher(
    name: str | None,
    num_experts: int,
    mesh: DeviceMesh | None,
    *,
    codec: WireCodec | str | None = None,
    meter: ByteMeter | None = None,
) -> TokenDispatcher:
    """A dispatcher for a layer.

    Args:
        name: a key of ``DISPATCHERS``; ``None``: ``all_to_all`` on a mesh of one dimension, ``hierarchical`` on one
            of two (nodes, ranks of a node), ``local`` without one.
        num_experts: of the layer.
        mesh: the ranks that experts are divided over; a two-dimensional one is flattened where one is needed.
        codec: of rows on the wire, or its name.
        meter: counts what is sent; ``None``: one of its own.

    Returns:
        One for layers of ``num_experts``; its ``experts`` are those of this rank.

    Raises:
        UsageError: an unknown name, or a mesh or codec that the dispatcher cannot use.

    Examples:
        >>> dispatcher = make_dispatcher(None, num_experts=4, mesh=None)
        >>> type(dispatcher).__name__, list(dispatcher.experts)
        ('LocalDispatcher', [0, 1, 2, 3])
    """
    if isinstance(codec, str):
        codec = make_codec(codec)
    dims = 0 if mesh is None else mesh.ndim
    if name is None:
        name = next((known for known, (needed, _) in DISPATCHERS.items() if needed == dims), "all_to_all")
    name = spelled(name, sorted(DISPATCHERS), "dispatcher")
    needed, kind = DISPATCHERS[name]
    options: dict[str, Any] = {"meter": meter or ByteMeter()}
    if needed == 1 and dims == 2:
        dims = 1
    if needed != dims:
        raise UsageError(f"dispatcher {name!r} wants a mesh of {needed} dimensions, got {dims or 'none'}")
    if kind.takes_codec:
        options["codec"] = codec
    elif not isinstance(codec or IdentityCodec(), IdentityCodec):
        raise UsageError(f"dispatcher {name!r} sends tokens as they are; codecs are for the all-to-all ones")
    groups = [] if mesh is None else mesh.get_all_groups() if needed == mesh.ndim else [flat_group(mesh)]
    made: TokenDispatcher = kind(num_experts, *groups, **options)
    if codec is not None and mesh is not None and mesh.device_type == "cpu":
        _rehearse(codec)
    return made


def _rehearse(codec: WireCodec) -> None:
    """Have compiled, before ranks wait for each other, what a codec compiles at its first call."""
    rows = torch.zeros(1, 8)
    for gradient in (False, True):
        codec.decode(codec.encode(rows, gradient=gradient), rows.shape[1], rows.dtype, gradient=gradient)
