"""YAML form of a topology: what a person writes by hand.

::

    boxes:
      - name: left                      # ranks left/0 .. left/3
        ranks: 4
        inside: {bandwidth: 400 Mbit/s, latency: 50us}              # through a switch in the box
        uplink: {to: core, bandwidth: 50 Mbit/s, latency: 100us, per: rank}
        overrides:
          - {rank: 2, uplink: {bandwidth: 25 Mbit/s}}               # a slow interface
      - {name: right, count: 3, ranks: 4, ...}                      # right0, right1, right2
    ranks: [monitor]                    # ranks in no box; a number n means 0 .. n-1
    switches: [core]                    # {name: core, computes: true}: it can copy and add (SHARP)
    links:
      - {from: monitor, to: core, bandwidth: 1 Gbit/s}              # both directions
      - {from: left/0, to: right0/0, bandwidth: 10 Gbit/s, one_way: true, class: tcp}
    link_classes:                       # what messages cost on links of a class, where no more is known of a link
      rdma: {latency: 3us, work: 0, wake: 0, pieces: [64KB, 512KB]}

``device: H100`` (or ``{name: X, flops: 60e12, memory: 10GiB, memory_gbps: 760}``) at the top or in a box says what
its ranks compute with, ``devices: {left: A100, right0/1: T4}`` the same by box or rank, which goes before.

``inside: {bandwidth: ..., computes: true}`` says the same of the switch in a box (NVLink SHARP).

Ranks are numbered in the order of the file, boxes first. ``vertices: [{rank: a}, {switch: core}, ...]`` instead of
boxes, ranks and switches fixes the order of all vertices; ``to_yaml`` writes that form.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction

import yaml

from mycel.errors import MycelError, TopologyError
from mycel.names import nearest
from mycel.topology.capacities import fitting_unit, read_rate, read_seconds, unit_of
from mycel.topology.formats.file_format import FileFormat
from mycel.topology.limits import MAX_VERTICES
from mycel.topology.link_class import LINK_CLASS_NAMES, StatedClass
from mycel.topology.model import Link, Topology, Vertex, VertexKind
from mycel.topology.yaml_devices import DeviceReader, device_lines
from mycel.topology.yaml_nodes import YamlReader, compose
from mycel.units import RATE_UNITS, format_size, parse_size

__all__ = ["YAML", "parse_yaml", "to_yaml"]

_TOP = ("name", "unit", "boxes", "ranks", "switches", "vertices", "links", "link_classes", "device", "devices")
_CLASS = ("latency", "wake", "work", "pieces")
_BOX = ("name", "count", "ranks", "inside", "uplink", "overrides", "device")
_CABLE = ("bandwidth", "latency", "class")
_INSIDE = (*_CABLE, "computes")
_UPLINK = ("to", *_CABLE, "per", "ranks")
_LINK = ("from", "to", *_CABLE, "one_way")

_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]*")


def parse_yaml(text: str, *, source: str) -> Topology:
    """The topology that a YAML text describes.

    Args:
        text: contents of a file.
        source: name of that file, for messages and as the name of a fabric that has none.

    Raises:
        TopologyError: not YAML, not a topology, or one that cannot work; the message begins with file and line.

    Examples:
        >>> parse_yaml("{ranks: 2, links: [{from: 0, to: 1, bandwidth: 10 Gb/s}]}", source="pair.yaml").unit
        'Gbit/s'
    """
    return _Description(compose(text, source=source), source).topology()


def to_yaml(topology: Topology) -> str:
    """A YAML text that ``parse_yaml`` reads back to an equal topology.

    Examples:
        >>> pair = parse_yaml("{ranks: 2, links: [{from: 0, to: 1, bandwidth: 10 Gb/s}]}", source="pair.yaml")
        >>> print(to_yaml(pair), end="")
        name: pair
        unit: Gbit/s
        vertices:
          - {rank: 0}
          - {rank: 1}
        links:
          - {from: 0, to: 1, bandwidth: 10 Gbit/s}
    """
    lines = [f"name: {_quoted(topology.name)}", f"unit: {topology.unit}", "vertices:"]
    for vertex in topology.vertices:
        box = "" if vertex.node is None else f", box: {_quoted(vertex.node)}"
        computes = ", computes: true" if vertex.computes else ""
        lines.append(f"  - {{{vertex.kind}: {_quoted(vertex.label)}{box}{computes}}}")
    lines.append("links:")
    waiting = list(reversed(topology.links))
    while waiting:
        link = waiting.pop()
        back = replace(link, src=link.dst, dst=link.src)
        both_ways = bool(waiting) and waiting[-1] == back
        if both_ways:
            waiting.pop()
        rate = str(link.capacity) if topology.unit == "link" else f"{link.capacity} {topology.unit}"
        parts = [f"from: {_quoted(topology.label(link.src))}", f"to: {_quoted(topology.label(link.dst))}"]
        parts.append(f"bandwidth: {rate}")
        if link.latency_s:
            parts.append(f"latency: {_seconds_text(link.latency_s)}")
        if link.link_class:
            parts.append(f"class: {link.link_class}")
        if not both_ways:
            parts.append("one_way: true")
        lines.append(f"  - {{{', '.join(parts)}}}")
    lines += ["link_classes:"] if topology.link_classes else []
    lines += [f"  {stated.name}: {{{', '.join(_class_parts(stated))}}}" for stated in topology.link_classes]
    lines += device_lines(topology, quoted=_quoted)
    return "\n".join(lines) + "\n"


def _class_parts(stated: StatedClass) -> list[str]:
    times = {"latency": stated.latency_s, "wake": stated.wake_s, "work": stated.work_s}
    parts = [f"{key}: {_seconds_text(value) if value else 0}" for key, value in times.items() if value is not None]
    return parts + ([f"pieces: [{', '.join(map(format_size, stated.piece_bytes))}]"] if stated.piece_bytes else [])


def _quoted(text: str) -> str:
    """A YAML scalar that is read back as ``text``."""
    if _PLAIN.fullmatch(text) and text.lower() != "null":
        return text
    escaped = "".join(c if c.isascii() and c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in text)
    return f'"{escaped}"'


def _seconds_text(seconds: float) -> str:
    """A time that is read back to exactly this number: decimal digits are shifted, never rounded."""
    if 1e-9 <= seconds < 1e3:
        return f"{(Decimal(repr(seconds)) * 10**6).normalize():f}us"
    return f"{seconds!r}s".replace("+", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cable:
    """Bandwidth, latency and class of one connection, and where the file says so."""

    rate: Fraction
    latency_s: float
    link_class: str | None
    node: yaml.Node


class _Description:
    """A topology in the making: vertices and links so far, each with the node of the file it comes from."""

    def __init__(self, root: yaml.Node, source: str) -> None:
        self._read = YamlReader(source)
        self._root = root
        self._stem = re.sub(r"\.ya?ml$", "", source.rpartition("/")[2])
        self._top = self._read.mapping(root, _TOP, what="a topology")
        self._unit = self._declared_unit()
        self._written_units: set[str] = set()
        self._ranks: dict[str, tuple[Vertex, yaml.Node]] = {}
        self._switches: dict[str, tuple[Vertex, yaml.Node]] = {}
        self._ordered: dict[str, tuple[Vertex, yaml.Node]] = {}
        self._links: dict[tuple[str, str], _Cable] = {}
        self._devices = DeviceReader(self._read)

    def topology(self) -> Topology:
        """The finished topology."""
        top, read = self._top, self._read
        boxes = read.items(top["boxes"], what="boxes") if "boxes" in top else []
        if "vertices" in top:
            self._read_vertices(top["vertices"])
        pending = [connect for box in boxes for connect in self._read_box(box)]
        if "ranks" in top:
            self._read_ranks(top["ranks"])
        if "switches" in top:
            for node in read.items(top["switches"], what="switches"):
                self._read_switch(node)
        for box, members, uplink, overrides in pending:
            self._connect_uplink(box, members, uplink, overrides)
        for node in read.items(top["links"], what="links") if "links" in top else []:
            self._read_link(node)
        return self._finish()

    # -- vertices ---------------------------------------------------------------------------------------------

    def _add(self, kind: VertexKind, label: str, box: str | None, node: yaml.Node, *, computes: bool = False) -> str:
        for known in (self._ordered, self._ranks, self._switches):
            if label in known:
                line = self._read.line(known[label][1])
                raise self._read.error(node, f"two vertices are called {label!r}; the first is on line {line}")
        if len(self._ranks) + len(self._switches) + len(self._ordered) >= MAX_VERTICES:
            raise self._read.error(node, f"more than {MAX_VERTICES} ranks and switches")
        place = self._ordered if "vertices" in self._top else self._ranks if kind == "rank" else self._switches
        place[label] = (Vertex(kind=kind, label=label, node=box, computes=computes), node)
        return label

    def _read_switch(self, node: yaml.Node) -> None:
        """A name, or a mapping of one that says more."""
        read, name, computes = self._read, node, False
        if isinstance(node, yaml.MappingNode):
            found = read.mapping(node, ("name", "computes"), required=("name",), what="a switch")
            name = found["name"]
            computes = "computes" in found and read.flag(found["computes"], what="computes")
        self._add("switch", read.text(name, what="a switch's name"), None, node, computes=computes)

    def _read_vertices(self, node: yaml.Node) -> None:
        read = self._read
        for other in ("boxes", "ranks", "switches"):
            if other in self._top:
                raise read.error(node, f"'vertices' cannot stand beside {other!r}; use one of the two")
        for item in read.items(node, what="vertices"):
            found = read.mapping(item, ("rank", "switch", "box", "computes"), what="a vertex")
            if ("rank" in found) == ("switch" in found):
                raise read.error(item, "a vertex is either {rank: NAME} or {switch: NAME}")
            kind: VertexKind = "rank" if "rank" in found else "switch"
            box = read.text(found["box"], what="box") if "box" in found else None
            computes = "computes" in found and read.flag(found["computes"], what="computes")
            if computes and kind == "rank":
                raise read.error(found["computes"], "'computes' is said of switches; every rank copies and adds")
            self._add(kind, read.text(found[kind], what=f"a {kind}'s name"), box, item, computes=computes)

    def _read_ranks(self, node: yaml.Node) -> None:
        read = self._read
        if isinstance(node, yaml.SequenceNode):
            for item in node.value:
                self._add("rank", read.text(item, what="a rank's name"), None, item)
            return
        for number in range(read.whole(node, what="ranks", least=1, most=MAX_VERTICES)):
            self._add("rank", str(number), None, node)

    # -- boxes ------------------------------------------------------------------------------------------------

    def _read_box(self, node: yaml.Node) -> list[tuple[str, list[str], yaml.Node, dict[int, yaml.Node]]]:
        """Add a box's ranks and inside links; its uplinks are returned, for their other ends may come later."""
        read = self._read
        found = read.mapping(node, _BOX, required=("name", "ranks"), what="a box")
        name = read.text(found["name"], what="a box's name")
        size = read.whole(found["ranks"], what=f"box {name}: ranks", least=1, most=MAX_VERTICES)
        names = [name]
        if "count" in found:
            count = read.whole(found["count"], what=f"box {name}: count", least=1, most=MAX_VERTICES)
            if count * size > MAX_VERTICES:
                raise read.error(
                    found["count"], f"box {name}: {count} boxes of {size} are more than {MAX_VERTICES} ranks"
                )
            names = [f"{name}{number}" for number in range(count)]
        overrides = self._read_overrides(found.get("overrides"), name, size, found)
        uplinks: list[yaml.Node] = []
        if "uplink" in found:
            uplink = found["uplink"]
            uplinks = list(uplink.value) if isinstance(uplink, yaml.SequenceNode) else [uplink]
        pending = []
        for box in names:
            members = [self._add("rank", f"{box}/{i}", box, node) for i in range(size)]
            if "device" in found:
                self._devices.of_box(box, found["device"])
            if "inside" in found:
                inside = read.mapping(found["inside"], _INSIDE, required=("bandwidth",), what=f"box {box}: inside")
                computes = "computes" in inside and read.flag(inside["computes"], what="computes")
                switch = self._add("switch", f"{box}/switch", box, found["inside"], computes=computes)
                for i, member in enumerate(members):
                    changes = self._changes(overrides.get(i), "inside", _CABLE, box)
                    self._connect(member, switch, self._cable(inside | changes, found["inside"]))
            pending += [(box, members, uplink, overrides) for uplink in uplinks]
        return pending

    def _read_overrides(
        self, node: yaml.Node | None, box: str, size: int, of_box: dict[str, yaml.Node]
    ) -> dict[int, yaml.Node]:
        """Override entries by rank of the box."""
        read, by_rank = self._read, dict[int, yaml.Node]()
        for item in read.items(node, what=f"box {box}: overrides") if node else []:
            what = f"box {box}: override"
            found = read.mapping(item, ("rank", "inside", "uplink"), required=("rank",), what=what)
            rank = read.whole(found["rank"], what=f"{what}: rank", least=0, most=size - 1)
            if rank in by_rank:
                line = read.line(by_rank[rank])
                raise read.error(item, f"{what}: rank {rank} is already overridden on line {line}")
            for key in ("inside", "uplink"):
                if key in found and key not in of_box:
                    raise read.error(found[key], f"{what}: the box has no {key!r} to override")
            by_rank[rank] = item
        return by_rank

    def _changes(self, node: yaml.Node | None, key: str, known: tuple[str, ...], box: str) -> dict[str, yaml.Node]:
        """What an override entry says about ``inside`` or ``uplink``."""
        if node is None:
            return {}
        what = f"box {box}: override"
        found = self._read.mapping(node, ("rank", "inside", "uplink"), what=what)
        return self._read.mapping(found[key], known, what=f"{what} of {key}") if key in found else {}

    def _connect_uplink(self, box: str, members: list[str], node: yaml.Node, overrides: dict[int, yaml.Node]) -> None:
        read, what = self._read, f"box {box}: uplink"
        found = read.mapping(node, _UPLINK, required=("to", "bandwidth", "per"), what=what)
        target = self._vertex(found["to"], f"{what}: to")
        per = read.text(found["per"], what=f"{what}: per")
        if per not in ("rank", "box"):
            raise read.error(
                found["per"], f"{what}: per must be 'rank' (one a rank) or 'box' (one shared); got {per!r}"
            )
        if per == "box":
            if f"{box}/switch" not in self._switches:
                raise read.error(
                    node, f"{what}: a shared uplink leaves from the box's switch; give the box an 'inside'"
                )
            if "ranks" in found:
                raise read.error(found["ranks"], f"{what}: 'ranks' chooses among uplinks of per: rank")
            for entry in overrides.values():
                for changed in self._changes(entry, "uplink", _CABLE, box).values():
                    raise read.error(changed, f"{what}: shared by the box; it cannot be overridden for one rank")
            self._connect(f"{box}/switch", target, self._cable(found, node))
            return
        chosen = list(range(len(members)))
        if "ranks" in found:
            entries = read.items(found["ranks"], what=f"{what}: ranks")
            chosen = [read.whole(e, what=f"{what}: rank", least=0, most=len(members) - 1) for e in entries]
        for i in chosen:
            changes = self._changes(overrides.get(i), "uplink", _CABLE, box)
            self._connect(members[i], target, self._cable(found | changes, node))

    # -- links ------------------------------------------------------------------------------------------------

    def _read_link(self, node: yaml.Node) -> None:
        read = self._read
        found = read.mapping(node, _LINK, required=("from", "to", "bandwidth"), what="a link")
        ends = self._vertex(found["from"], "a link's from"), self._vertex(found["to"], "a link's to")
        one_way = read.flag(found["one_way"], what="one_way") if "one_way" in found else False
        self._connect(*ends, self._cable(found, node), one_way=one_way)

    def _vertex(self, node: yaml.Node, what: str) -> str:
        label = self._read.text(node, what=what)
        if not any(label in part for part in (self._ordered, self._ranks, self._switches)):
            known = [*self._ordered, *self._ranks, *self._switches]
            listed = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
            hint = nearest(label, known) or f"; there are {listed}"
            raise self._read.error(node, f"{what}: no rank or switch is called {label!r}{hint}")
        return label

    def _connect(self, src: str, dst: str, cable: _Cable, *, one_way: bool = False) -> None:
        read = self._read
        if src == dst:
            raise read.error(cable.node, f"link {src} -> {dst}: a link cannot end where it starts")
        for ends in ((src, dst),) if one_way else ((src, dst), (dst, src)):
            if ends in self._links:
                raise read.error(
                    cable.node,
                    f"duplicate link {ends[0]} -> {ends[1]}: already given on line "
                    f"{read.line(self._links[ends].node)}; add the bandwidths into one, or say one_way: true",
                )
            self._links[ends] = cable

    def _cable(self, found: dict[str, yaml.Node], node: yaml.Node) -> _Cable:
        latency_s = self._seconds(found["latency"], "latency") if "latency" in found else 0.0
        of = self._class(found["class"], "class") if "class" in found else None
        return _Cable(rate=self._rate(found["bandwidth"]), latency_s=latency_s, link_class=of, node=node)

    def _class(self, node: yaml.Node, what: str) -> str:
        name = self._read.text(node, what=what)
        if name not in LINK_CLASS_NAMES:
            hint = nearest(name, LINK_CLASS_NAMES)
            known = ", ".join(LINK_CLASS_NAMES)
            raise self._read.error(node, f"unknown class of links {name!r}{hint}; known: {known}")
        return name

    def _stated(self) -> list[StatedClass]:
        """What the file says about classes of links."""
        read, stated = self._read, list[StatedClass]()
        if "link_classes" not in self._top:
            return stated
        for name, node in read.mapping(self._top["link_classes"], LINK_CLASS_NAMES, what="link_classes").items():
            said = read.mapping(node, _CLASS, what=f"class {name}")
            times = {f"{key}_s": self._seconds(said[key], key) for key in _CLASS[:3] if key in said}
            pieces = []
            for item in read.items(said["pieces"], what=f"class {name}: pieces") if "pieces" in said else []:
                try:
                    pieces.append(parse_size(read.text(item, what=f"class {name}: a piece")))
                except MycelError as error:
                    raise read.error(item, str(error)) from None
            try:
                stated.append(StatedClass(name=name, piece_bytes=tuple(pieces), **times))
            except TopologyError as error:
                raise read.error(node, str(error)) from None
        return stated

    def _rate(self, node: yaml.Node) -> Fraction:
        """Bytes a second, or relative capacity where the unit is ``link``."""
        text = self._read.text(node, what="bandwidth").strip()
        if text.startswith("-"):
            raise self._read.error(node, f"bandwidth {text!r} must be positive")
        if _NUMBER.fullmatch(text) and len(text) <= 40:
            if self._unit is None:
                raise self._read.error(
                    node,
                    f"bandwidth {text} has no unit; write for example '{text} Mbit/s', or give the file a 'unit'",
                )
            if not Fraction(text):
                raise self._read.error(node, f"bandwidth {text} must be positive")
            return Fraction(text) * RATE_UNITS.get(self._unit, Fraction(1))
        if self._unit == "link":
            raise self._read.error(node, f"bandwidth {text!r}: with unit: link, capacities are plain numbers")
        try:
            rate = read_rate(text)
        except MycelError as error:
            raise self._read.error(node, str(error)) from None
        self._written_units.add(unit_of(text))
        return rate

    def _seconds(self, node: yaml.Node, what: str) -> float:
        text = self._read.text(node, what=what).strip()
        if text == "0":
            return 0.0
        if text.startswith("-"):
            raise self._read.error(node, f"{what} {text!r} must be zero or more")
        try:
            return read_seconds(text)
        except MycelError as error:
            raise self._read.error(node, str(error)) from None

    # -- the whole --------------------------------------------------------------------------------------------

    def _declared_unit(self) -> str | None:
        if "unit" not in self._top:
            return None
        unit, known = self._read.text(self._top["unit"], what="unit"), ["link", *RATE_UNITS]
        if unit not in known:
            hint = nearest(unit, known)
            raise self._read.error(self._top["unit"], f"unknown unit {unit!r}{hint}; known units: {', '.join(known)}")
        return unit

    def _finish(self) -> Topology:
        read = self._read
        vertices = [*self._ordered.values(), *self._ranks.values(), *self._switches.values()]
        index = {vertex.label: number for number, (vertex, _) in enumerate(vertices)}
        unit = self._unit or fitting_unit([cable.rate for cable in self._links.values()], self._written_units)
        links = []
        for (src, dst), cable in self._links.items():
            capacity = cable.rate / RATE_UNITS.get(unit, Fraction(1))
            if capacity.denominator != 1:
                raise read.error(
                    cable.node,
                    f"link {src} -> {dst}: bandwidth is {float(capacity):g} {unit}, not a whole number; "
                    "choose a smaller unit",
                )
            ends = {"src": index[src], "dst": index[dst]}
            links.append(Link(**ends, capacity=int(capacity), latency_s=cable.latency_s, link_class=cable.link_class))
        name = read.text(self._top["name"], what="name") if "name" in self._top else self._stem
        stated = self._stated()
        known = self._devices.given([vertex for vertex, _ in vertices], self._top)
        try:
            return Topology(
                name=name,
                unit=unit,
                vertices=known,
                links=tuple(links),
                link_classes=tuple(stated),
            )
        except TopologyError as error:
            raise read.error(self._culprit(vertices), str(error)) from None

    def _culprit(self, vertices: list[tuple[Vertex, yaml.Node]]) -> yaml.Node:
        """Node of the first rank that the others do not reach or that does not reach them; else the file's."""
        ranks = [(vertex.label, node) for vertex, node in vertices if vertex.kind == "rank"]
        for forward in (True, False):
            beside: dict[str, list[str]] = {}
            for src, dst in self._links:
                beside.setdefault(src if forward else dst, []).append(dst if forward else src)
            seen = {ranks[0][0]} if ranks else set()
            stack = list(seen)
            while stack:
                fresh = [other for other in beside.get(stack.pop(), []) if other not in seen]
                seen.update(fresh)
                stack += fresh
            for label, node in ranks:
                if label not in seen:
                    return node
        return ranks[0][1] if ranks else self._root


YAML = FileFormat(
    name="YAML",
    suffixes=(".yaml", ".yml"),
    signature="",
    parse=parse_yaml,
    becomes="",
)
