"""JSON form of a topology: what programs write, and what the published suites of fabrics use.

::

    {"name": "star", "unit": "Gb/s",
     "nodes": [{"id": 0, "type": "gpu", "label": "a"}, {"id": 1, "type": "gpu", "label": "b"},
               {"id": 2, "type": "switch", "label": "sw"}],
     "links": [{"src": 0, "dst": 2, "capacity": 10, "latency": 5e-05}, ...]}

Ids are ``0 .. V-1`` in any order; ``gpu`` and ``rank`` mean the same. ``label``, ``box`` and ``latency`` (seconds)
may be left out, as may a link's ``class`` and what ``link_classes`` at the top says about classes, in seconds and
bytes: ``{"rdma": {"latency": 3e-06, "work": 0, "wake": 0, "pieces": [65536]}}``. ``"computes": true`` marks a switch
that can copy and add (SHARP). ``device`` of a rank is a known name or an object with the fields of ``Device``; at the
top it is that of all ranks that say nothing. Links are directed. Anything else at the top level (``note``,
``family``) is for people and ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from mycel.errors import TopologyError, UsageError
from mycel.names import nearest
from mycel.topology.device import Device, device_from_json, device_to_json
from mycel.topology.formats.file_format import FileFormat
from mycel.topology.link_class import stated_from_json, stated_to_json
from mycel.topology.model import Link, Topology, Vertex, VertexKind

__all__ = ["JSON", "from_json", "parse_json", "to_json"]

_KINDS: dict[str, VertexKind] = {"gpu": "rank", "rank": "rank", "switch": "switch"}
_NODE_KEYS = ("id", "type", "label", "box", "computes", "device")
_LINK_KEYS = ("src", "dst", "capacity", "latency", "class")


def parse_json(text: str, *, source: str) -> Topology:
    """The topology that a JSON text describes.

    Args:
        text: contents of a file.
        source: name of that file, for messages and as the name of a fabric that has none.

    Raises:
        TopologyError: not JSON (with line and column), not a topology (with node or link), or one that cannot work.
    """
    try:
        data = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        message = f"{source}:{error.lineno}:{error.colno}: not JSON: {error.msg}"
        raise TopologyError(message) from None
    except (TopologyError, ValueError) as error:
        raise TopologyError(f"{source}: not JSON: {error}") from None
    except RecursionError:
        raise TopologyError(f"{source}: not a topology: nested too deeply") from None
    return from_json(data, source=source)


def from_json(data: object, *, source: str = "topology") -> Topology:
    """The topology that a decoded JSON object describes.

    Raises:
        TopologyError: a key is missing, unknown or of the wrong type, or the fabric cannot work.

    Examples:
        >>> ends = [{"src": 0, "dst": 1, "capacity": 3}, {"src": 1, "dst": 0, "capacity": 3}]
        >>> from_json({"nodes": [{"id": 0, "type": "gpu"}, {"id": 1, "type": "gpu"}], "links": ends}).capacity
        {(0, 1): 3, (1, 0): 3}
    """
    if not isinstance(data, Mapping):
        raise TopologyError(f"{source}: expected a JSON object with 'nodes' and 'links', got {_kind_of(data)}")
    for key in ("nodes", "links"):
        if key not in data:
            raise TopologyError(
                f"{source}: the key {key!r} is missing{nearest(key, data, 'is it what you wrote as')}"
            )
        if not isinstance(data[key], list):
            raise TopologyError(f"{source}: {key!r} must be a list, got {_kind_of(data[key])}")
    if "unit" not in data and (hint := nearest("unit", data, "is it what you wrote as")):
        raise TopologyError(f"{source}: the key 'unit' is missing{hint}")
    name = _text(data.get("name", source.rpartition("/")[2].removesuffix(".json")), f"{source}: name")
    unit = _text(data.get("unit", "link"), f"{source}: unit")
    usual = _device(data["device"], f"{source}: device") if "device" in data else None
    vertices = _vertices(data["nodes"], source, usual)
    links = tuple(_link(position, item, vertices, source) for position, item in enumerate(data["links"]))
    stated = stated_from_json(data.get("link_classes", {}), source)
    try:
        return Topology(name=name, unit=unit, vertices=vertices, links=links, link_classes=stated)
    except TopologyError as error:
        raise TopologyError(f"{source}: {error}") from None


def to_json(topology: Topology) -> dict[str, Any]:
    """A JSON object that ``from_json`` reads back to an equal topology."""
    nodes: list[dict[str, Any]] = []
    for number, vertex in enumerate(topology.vertices):
        node: dict[str, Any] = {"id": number, "type": "gpu" if vertex.kind == "rank" else "switch"}
        node["label"] = vertex.label
        if vertex.node is not None:
            node["box"] = vertex.node
        if vertex.computes:
            node["computes"] = True
        if vertex.device is not None:
            node["device"] = device_to_json(vertex.device)
        nodes.append(node)
    links: list[dict[str, Any]] = []
    for link in topology.links:
        item: dict[str, Any] = {"src": link.src, "dst": link.dst, "capacity": link.capacity}
        if link.latency_s:
            item["latency"] = link.latency_s
        if link.link_class:
            item["class"] = link.link_class
        links.append(item)
    stated = {"link_classes": stated_to_json(topology.link_classes)} if topology.link_classes else {}
    return {"name": topology.name, "unit": topology.unit, **stated, "nodes": nodes, "links": links}


# -- parts ------------------------------------------------------------------------------------------------------


def _vertices(nodes: list[Any], source: str, usual: Device | None) -> tuple[Vertex, ...]:
    found: dict[int, Vertex] = {}
    for position, node in enumerate(nodes):
        where = f"{source}: node {position}"
        if not isinstance(node, Mapping):
            raise TopologyError(f"{where}: expected an object with 'id' and 'type', got {_kind_of(node)}")
        _check_keys(node, _NODE_KEYS, ("id", "type"), where)
        number = _whole(node["id"], f"{where}: id")
        if not 0 <= number < len(nodes):
            raise TopologyError(f"{where}: id {number} is out of range; {len(nodes)} nodes: 0..{len(nodes) - 1}")
        if number in found:
            raise TopologyError(f"{where}: a second node with id {number}")
        kind = node["type"]
        if not isinstance(kind, str) or kind not in _KINDS:
            raise TopologyError(f"{where}: type {kind!r} is unknown; expected 'gpu', 'rank' or 'switch'")
        box, computes = node.get("box"), node.get("computes", False)
        if not isinstance(computes, bool):
            raise TopologyError(f"{where}: computes must be true or false, got {_kind_of(computes)}")
        device = usual if _KINDS[kind] == "rank" else None
        if "device" in node:
            device = _device(node["device"], f"{where}: device")
        found[number] = Vertex(
            kind=_KINDS[kind],
            label=_text(node.get("label", str(number)), f"{where}: label"),
            node=None if box is None else _text(box, f"{where}: box"),
            computes=computes,
            device=device,
        )
    return tuple(found[number] for number in range(len(nodes)))


def _device(data: object, where: str) -> Device:
    try:
        return device_from_json(data, where=where)
    except UsageError as error:
        raise TopologyError(str(error)) from None


def _link(position: int, item: object, vertices: tuple[Vertex, ...], source: str) -> Link:
    where = f"{source}: link {position}"
    if not isinstance(item, Mapping):
        raise TopologyError(f"{where}: expected an object with 'src', 'dst' and 'capacity', got {_kind_of(item)}")
    _check_keys(item, _LINK_KEYS, ("src", "dst", "capacity"), where)
    src, dst = _whole(item["src"], f"{where}: src"), _whole(item["dst"], f"{where}: dst")
    names = [vertices[end].label if 0 <= end < len(vertices) else str(end) for end in (src, dst)]
    where = f"{where} ({names[0]} -> {names[1]})"
    latency = item.get("latency", 0.0)
    if isinstance(latency, bool) or not isinstance(latency, int | float):
        raise TopologyError(f"{where}: latency must be a number of seconds, got {_kind_of(latency)}")
    try:
        latency_s = float(latency)
    except OverflowError:
        raise TopologyError(f"{where}: latency of {len(str(latency))} digits is out of range") from None
    of = item.get("class")
    return Link(
        src=src,
        dst=dst,
        capacity=_whole(item["capacity"], f"{where}: capacity"),
        latency_s=latency_s,
        link_class=None if of is None else _text(of, f"{where}: class"),
    )


def _check_keys(item: Mapping[str, Any], known: tuple[str, ...], required: tuple[str, ...], where: str) -> None:
    for key in item:
        if key not in known:
            raise TopologyError(f"{where}: unknown key {key!r}{nearest(key, known)}; known keys: {', '.join(known)}")
    for key in required:
        if key not in item:
            raise TopologyError(f"{where}: the key {key!r} is missing")


def _whole(value: object, where: str) -> int:
    """An integer; a whole float (what some writers make of one) counts, a boolean does not."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        hint = "; choose a smaller unit in which it is whole" if isinstance(value, float) else ""
        raise TopologyError(f"{where} must be a whole number, got {_kind_of(value)}{hint}")
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise TopologyError(f"{where} must be a text, got {_kind_of(value)}")
    return value


def _kind_of(value: object) -> str:
    """What a JSON value is, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"the truth value {str(value).lower()}"
    if isinstance(value, int | float | str):
        shown = repr(value)
        return shown if len(shown) <= 40 else f"{shown[:37]}..."
    return "a list" if isinstance(value, list) else "an object"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; the plain decoder would keep the last of two equal keys in silence."""
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise TopologyError(f"an object has the key {twice!r} twice")
    return result


def _refuse_constant(text: str) -> NoReturn:
    raise TopologyError(f"{text} is not a number that JSON knows")


JSON = FileFormat(
    name="JSON",
    suffixes=(".json",),
    signature=r"\A\s*[{\[]",
    parse=parse_json,
    becomes="",
)
