"""A machine or network as another tool describes it, and the topology that one or several of it make.

A reader of a format fills a ``Description``. What the format does not say and the reader assumes goes to its notes,
so that a person is told; network interfaces go to its exits, so that several equal machines can be joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from mycel.brief import brief
from mycel.errors import MycelError, TopologyError
from mycel.topology.capacities import fitting_unit, read_rate, unit_of
from mycel.topology.limits import MAX_LINKS, MAX_VERTICES
from mycel.topology.model import Link, Topology, Vertex, VertexKind
from mycel.units import RATE_UNITS

__all__ = ["Description", "Reading", "join"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A topology, and what had to be assumed to get it.

    Attributes:
        topology: the fabric.
        notes: a sentence each: what the file does not say and was inferred, assumed or left out.
    """

    topology: Topology
    notes: tuple[str, ...] = ()

    __repr__ = brief


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cable:
    src: str
    dst: str
    rate: Fraction
    latency_s: float
    fallback: bool
    link_class: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exit:
    name: str
    at: tuple[str, ...]
    rate: Fraction
    latency_s: float


class Description:
    """One machine or network in the making.

    Args:
        name: of the topology.
        source: name of the file, for messages.
        unit: in which the format has its bandwidths, a key of ``RATE_UNITS``; ``"link"`` for relative capacities.
    """

    def __init__(self, name: str, source: str, *, unit: str = "GB/s") -> None:
        self.notes: list[str] = []
        self._name = name
        self._source = source
        self._unit = unit
        self._vertices: dict[str, Vertex] = {}
        self._cables: list[_Cable] = []
        self._exits: list[_Exit] = []

    @classmethod
    def of(cls, topology: Topology, source: str) -> Description:
        """A finished topology as a description, so that several of it can be joined."""
        found = cls(topology.name, source, unit=topology.unit)
        scale = RATE_UNITS.get(topology.unit, Fraction(1))
        for vertex in topology.vertices:
            found._add(vertex.kind, vertex.label, vertex.node, computes=vertex.computes)
        for link in topology.links:
            ends = (topology.label(link.src), topology.label(link.dst))
            found.cable(*ends, link.capacity * scale, link.latency_s, one_way=True, link_class=link.link_class)
        return found

    def rank(self, label: str, node: str | None = None) -> str:
        """Add a rank; returns its label. Ranks are numbered in the order in which they are added."""
        return self._add("rank", label, node)

    def switch(self, label: str, node: str | None = None) -> str:
        """Add a switch; returns its label. Those that lead nowhere are dropped in the end."""
        return self._add("switch", label, node)

    def _add(self, kind: VertexKind, label: str, node: str | None, *, computes: bool = False) -> str:
        if label in self._vertices:
            raise TopologyError(f"{self._source}: two vertices are called {label!r}")
        if len(self._vertices) >= MAX_VERTICES:
            raise TopologyError(f"{self._source}: more than {MAX_VERTICES} ranks and switches")
        self._vertices[label] = Vertex(kind=kind, label=label, node=node, computes=computes)
        return label

    def cable(
        self,
        src: str,
        dst: str,
        rate: Fraction,
        latency_s: float = 0.0,
        *,
        one_way: bool = False,
        fallback: bool = False,
        link_class: str | None = None,
    ) -> None:
        """Add a cable of ``rate`` bytes a second; both ways unless ``one_way``.

        Args:
            src: label of one end.
            dst: label of the other.
            rate: bytes a second of each direction, whole; of relative capacities, the capacity.
            latency_s: seconds.
            one_way: from ``src`` to ``dst`` only.
            fallback: not used in a single machine whose ranks are joined without it (PCIe beside NVLink).
            link_class: what it is, where that is known.
        """
        for a, b in ((src, dst),) if one_way else ((src, dst), (dst, src)):
            cable = _Cable(src=a, dst=b, rate=rate, latency_s=latency_s, fallback=fallback, link_class=link_class)
            self._cables.append(cable)
        if len(self._cables) > MAX_LINKS:
            raise TopologyError(f"{self._source}: more than {MAX_LINKS} links")

    def exit(self, name: str, at: Sequence[str], rate: Fraction, latency_s: float = 0.0) -> None:
        """Add a network interface that the vertices ``at`` reach at ``rate`` bytes a second each way.

        One that is there already is the same: reached from more vertices, and no faster for it.
        """
        for number, known in enumerate(self._exits):
            if name and known.name == name:
                self._exits[number] = replace(known, at=tuple(dict.fromkeys((*known.at, *at))))
                return
        self._exits.append(_Exit(name=name, at=tuple(at), rate=rate, latency_s=latency_s))

    @property
    def has_exits(self) -> bool:
        """Whether a network interface is known."""
        return bool(self._exits)

    def drop_exits(self, names: Sequence[str]) -> list[str]:
        """Leave out interfaces, for example those whose ports are down; returns which of them were there."""
        dropped = [way.name for way in self._exits if way.name in names]
        self._exits = [way for way in self._exits if way.name not in names]
        return dropped

    @property
    def switches(self) -> list[str]:
        """Labels of the switches, in order."""
        return [label for label, vertex in self._vertices.items() if vertex.kind == "switch"]

    @property
    def ranks(self) -> list[str]:
        """Labels of the ranks, in order."""
        return [label for label, vertex in self._vertices.items() if vertex.kind == "rank"]

    def reading(self, *, nodes: int = 1, network: str | None = None) -> Reading:
        """The topology of ``nodes`` such machines.

        Several are joined by one network switch through their interfaces; without any, every rank has a cable to it.

        Args:
            nodes: how many.
            network: bandwidth of each interface, instead of what the file says.

        Raises:
            TopologyError: the fabric cannot work, or nothing says how fast the network is.
        """
        if nodes == 1 and network is not None:
            raise TopologyError(f"{self._source}: a network between nodes needs more than one node")
        if nodes == 1 and len(self.ranks) == 1:
            raise TopologyError(
                f"{self._source}: describes one rank alone, and a collective needs two; "
                f"'{self._source}*2' is two such machines on one network"
            )
        if nodes == 1:
            return _combine(self._name, [("", self)], network)
        return _combine(f"{self._name}_x{nodes}", [(f"node{number}", self) for number in range(nodes)], network)

    def _ways_out(self, network: str | None, unit: set[str], notes: list[str]) -> tuple[list[_Exit], Fraction | None]:
        rate = None
        if network is not None:
            if self._unit == "link":
                if not (network.strip().isdecimal() and len(network) < 20 and int(network)):
                    raise TopologyError(f"{self._source}: capacities are relative: {network!r} is no whole number")
                rate = Fraction(int(network))
            else:
                try:
                    rate = read_rate(network)
                    unit.add(unit_of(network))
                except MycelError as error:
                    raise TopologyError(f"{self._source}: {error}") from None
        if self._exits:
            notes.append(f"nodes are joined by their {len(self._exits)} interfaces each, through one network switch")
            return self._exits, rate
        if rate is None:
            raise TopologyError(
                f"{self._source}: names no network interface; say how fast each rank's is, for example "
                f"'{self._source}*2@25 GB/s'"
            )
        notes.append("nodes are joined by a cable of each rank to one network switch")
        return [_Exit(name="", at=(label,), rate=rate, latency_s=0.0) for label in self.ranks], rate

    def _joins_all(self, *, fallback: bool) -> bool:
        """Whether the ranks reach each other over its cables; without ``fallback``, over those that are none."""
        beside: dict[str, list[str]] = {}
        for cable in self._cables:
            if fallback or not cable.fallback:
                beside.setdefault(cable.src, []).append(cable.dst)
                beside.setdefault(cable.dst, []).append(cable.src)
        ranks = self.ranks
        seen, stack = set(ranks[:1]), ranks[:1]
        while stack:
            for other in beside.get(stack.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    stack.append(other)
        return seen.issuperset(ranks)


def join(name: str, machines: Sequence[tuple[str, Description]]) -> Reading:
    """The topology of several machines, equal or not, on one network switch through their interfaces.

    Args:
        name: of the topology.
        machines: the name of each, and what it is.

    Raises:
        TopologyError: as for ``Description.reading``.
    """
    if len(machines) == 1:
        return _renamed(machines[0][1].reading(), name)
    return _combine(name, machines, None)


def _renamed(reading: Reading, name: str) -> Reading:
    """The same with the topology under another name."""
    return replace(reading, topology=replace(reading.topology, name=name))


class _Fabric:
    """Vertices and merged links of several machines."""

    def __init__(self) -> None:
        self.vertices: dict[str, Vertex] = {}
        self.rates: dict[tuple[str, str], Fraction] = {}
        self.latencies: dict[tuple[str, str], float] = {}
        self.classes: dict[tuple[str, str], str] = {}

    def add(self, machine: Description, node: str, *, drop: bool) -> None:
        prefix = f"{node}/" if node else ""
        for label, vertex in machine._vertices.items():
            self.vertices[prefix + label] = replace(vertex, label=prefix + label, node=node or vertex.node)
        for cable in machine._cables:
            if not (drop and cable.fallback):
                ends = (prefix + cable.src, prefix + cable.dst)
                self.connect(*ends, cable.rate, cable.latency_s)
                if cable.link_class:
                    self.classes[ends] = cable.link_class

    def connect(self, a: str, b: str, rate: Fraction, latency_s: float) -> None:
        self.rates[a, b] = self.rates.get((a, b), Fraction(0)) + rate
        self.latencies[a, b] = max(self.latencies.get((a, b), 0.0), latency_s)

    def both(self, a: str, b: str, rate: Fraction, latency_s: float) -> None:
        self.connect(a, b, rate, latency_s)
        self.connect(b, a, rate, latency_s)

    def leave(self, node: str, ways: Sequence[_Exit], rate: Fraction | None) -> None:
        """Cables from a machine's interfaces to the network."""
        prefix = f"{node}/" if node else ""
        for way in ways:
            speed, end = rate or way.rate, "network"
            if way.name:
                end = f"{prefix}{way.name}"
                self.vertices[end] = Vertex(kind="switch", label=end, node=node or None)
                self.both(end, "network", speed, way.latency_s)
            for label in way.at:
                self.both(f"{prefix}{label}", end, speed, 0.0 if way.name else way.latency_s)


def _combine(name: str, machines: Sequence[tuple[str, Description]], network: str | None) -> Reading:
    first, several = machines[0][1], len(machines) > 1
    source, size = first._source, len(machines)
    if several and sum(len(m._vertices) + len(m._exits) for _, m in machines) >= MAX_VERTICES:
        raise TopologyError(f"{source}: {size} nodes have more than {MAX_VERTICES} ranks and switches")
    if several and sum(len(m._cables) + 4 * len(m._exits) for _, m in machines) >= MAX_LINKS:
        raise TopologyError(f"{source}: {size} nodes have more than {MAX_LINKS} links")
    notes = list(dict.fromkeys(note for _, machine in machines for note in machine.notes))
    drop = not several and any(cable.fallback for cable in first._cables) and first._joins_all(fallback=False)
    if drop:
        notes.append("PCIe is left out: faster links join all GPUs")
    unit, fabric = {first._unit}, _Fabric()
    for node, machine in machines:
        fabric.add(machine, node, drop=drop)
    # Hosts of one file that nothing joins, as a dump over several has them, meet on a network as well.
    if several or (first._exits and not first._joins_all(fallback=True)):
        for node, machine in machines:
            ways, rate = machine._ways_out(network, unit, notes)
            fabric.leave(node, ways, rate)
        fabric.vertices["network"] = Vertex(kind="switch", label="network")
    return Reading(topology=_finish(name, source, fabric, unit), notes=tuple(dict.fromkeys(notes)))


def _finish(name: str, source: str, fabric: _Fabric, written: set[str]) -> Topology:
    vertices, rates = fabric.vertices, fabric.rates
    kept = _without_dead_ends(vertices, rates)
    ordered = [v for kind in ("rank", "switch") for v in vertices.values() if v.kind == kind and v.label in kept]
    index = {vertex.label: number for number, vertex in enumerate(ordered)}
    used = {ends: rate for ends, rate in rates.items() if ends[0] in index and ends[1] in index}
    for (a, b), rate in used.items():
        if rate < 1 or rate.denominator != 1:
            raise TopologyError(f"{source}: link {a} -> {b}: bandwidth must be a positive whole number")
    unit = "link" if "link" in written else fitting_unit(used.values(), written)
    scale = RATE_UNITS.get(unit, Fraction(1))
    links = tuple(
        Link(
            src=index[a],
            dst=index[b],
            capacity=int(rate / scale),
            latency_s=fabric.latencies[a, b],
            link_class=fabric.classes.get((a, b)),
        )
        for (a, b), rate in used.items()
    )
    try:
        return Topology(name=name, unit=unit, vertices=tuple(ordered), links=links)
    except TopologyError as error:
        raise TopologyError(f"{source}: {error}") from None


def _without_dead_ends(vertices: dict[str, Vertex], links: dict[tuple[str, str], Fraction]) -> set[str]:
    """Labels of the vertices that can lie on a way between two ranks."""
    beside: dict[str, set[str]] = {label: set() for label in vertices}
    for a, b in links:
        beside[a].add(b)
        beside[b].add(a)
    kept = set(vertices)
    waiting = [label for label in vertices if vertices[label].kind == "switch" and len(beside[label]) < 2]
    while waiting:
        label = waiting.pop()
        kept.discard(label)
        for other in beside.pop(label, ()):
            beside[other].discard(label)
            if vertices[other].kind == "switch" and len(beside[other]) == 1:
                waiting.append(other)
    return kept
