"""Builders of the usual fabrics: functions with keyword arguments that return a Topology.

Bandwidths are texts such as ``"25 GB/s"``, or plain integers for relative capacities. A new builder is one function
and one line in ``BUILDERS``, which gives it a name on the command line.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from mycel.errors import TopologyError
from mycel.names import nearest
from mycel.topology.builders.datacentre import dragonfly, fat_tree
from mycel.topology.builders.direct import full_mesh, hypercube, mesh, ring, torus
from mycel.topology.builders.switched import hosts, loopback, star, two_boxes
from mycel.topology.builders.vendor import dgx1_v100, dgx_a100, dgx_h100, mi250
from mycel.topology.model import Topology

__all__ = [
    "BUILDERS",
    "build",
    "dgx1_v100",
    "dgx_a100",
    "dgx_h100",
    "dragonfly",
    "fat_tree",
    "full_mesh",
    "hosts",
    "hypercube",
    "loopback",
    "mesh",
    "mi250",
    "ring",
    "star",
    "torus",
    "two_boxes",
]

#: Builders by the name they have on the command line.
BUILDERS: dict[str, Callable[..., Topology]] = {
    "star": star,
    "two_boxes": two_boxes,
    "loopback": loopback,
    "ring": ring,
    "torus": torus,
    "mesh": mesh,
    "full_mesh": full_mesh,
    "hypercube": hypercube,
    "fat_tree": fat_tree,
    "dragonfly": dragonfly,
    "dgx_a100": dgx_a100,
    "dgx_h100": dgx_h100,
    "dgx1_v100": dgx1_v100,
    "mi250": mi250,
}

#: Arguments that are true or false.
_FLAGS = ("shared_uplink", "computes", "nvls", "sharp")
#: Keys of specs that were saved before machines were called nodes; a spec is a format, and is still read.
_EARLIER_KEYS = {"boxes": "nodes"}
_TRUTH = {"true": True, "yes": True, "false": False, "no": False}


def build(spec: str) -> Topology:
    """The topology that a builder makes from a text ``name`` or ``name:key=value,key=value``.

    Keys are the builder's arguments; ``num_`` may be left out.

    Args:
        spec: for example ``two_boxes:ranks=8,between=50 Mbit/s`` or ``torus:dims=2x4``.

    Raises:
        TopologyError: no such builder or argument, or a value that makes no sense.

    Examples:
        >>> build("torus:dims=2x4,bandwidth=200 Mbit/s").name
        'torus_2x4'
    """
    name, _, rest = spec.partition(":")
    if name not in BUILDERS:
        known = ", ".join(BUILDERS)
        raise TopologyError(f"no builder is called {name!r}{nearest(name, BUILDERS)}; there are {known}")
    parameters = inspect.signature(BUILDERS[name]).parameters
    arguments: dict[str, Any] = {}
    for part in filter(None, (item.strip() for item in rest.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise TopologyError(f"{name}: cannot read {part!r}; write key=value")
        key = _EARLIER_KEYS.get(key, key)
        argument = key if key in parameters else f"num_{key}"
        if argument not in parameters:
            short = [parameter.removeprefix("num_") for parameter in parameters]
            raise TopologyError(
                f"{name}: no argument is called {key!r}{nearest(key, short)}; there are {', '.join(short)}"
            )
        if argument in arguments:
            raise TopologyError(f"{name}: {key!r} is given twice")
        arguments[argument] = _value(name, argument, value)
    for parameter in parameters.values():
        if parameter.default is parameter.empty and parameter.name not in arguments:
            short_name = parameter.name.removeprefix("num_")
            raise TopologyError(f"{name}: {short_name!r} is missing; write for example '{name}:{short_name}=4'")
    return BUILDERS[name](**arguments)


def _value(name: str, argument: str, text: str) -> object:
    """An argument's value; what kind it is follows from its name, as everywhere in the builders."""
    if argument == "dims":
        if not re.fullmatch(r"\d{1,9}(x\d{1,9})*", text):
            raise TopologyError(f"{name}: cannot read dims={text!r}; write for example 2x4")
        return tuple(map(int, text.split("x")))
    if argument.startswith("num_") or argument in ("k", "dim"):
        if not re.fullmatch(r"-?\d{1,9}", text):
            raise TopologyError(f"{name}: {argument.removeprefix('num_')}={text!r} is not a whole number")
        return int(text)
    if argument in _FLAGS:
        if text.lower() not in _TRUTH:
            raise TopologyError(f"{name}: {argument}={text!r} is neither true nor false")
        return _TRUTH[text.lower()]
    return text
