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

__all__ = ["Description", "Reading", "gigabytes"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exit:
    name: str
    at: tuple[str, ...]
    rate: Fraction
    latency_s: float


def gigabytes(number: int | str | Fraction) -> Fraction:
    """Bytes a second of ``number`` GB/s.

    Examples:
        >>> gigabytes("20.6")
        Fraction(20600000000, 1)
    """
    return Fraction(number) * 10**9


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
            found.cable(*ends, link.capacity * scale, link.latency_s, one_way=True)
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
    ) -> None:
        """Add a cable of ``rate`` bytes a second; both ways unless ``one_way``.

        Args:
            src: label of one end.
            dst: label of the other.
            rate: bytes a second of each direction, whole; of relative capacities, the capacity.
            latency_s: seconds.
            one_way: from ``src`` to ``dst`` only.
            fallback: not used in a single machine whose ranks are joined without it (PCIe beside NVLink).
        """
        for a, b in ((src, dst),) if one_way else ((src, dst), (dst, src)):
            self._cables.append(_Cable(src=a, dst=b, rate=rate, latency_s=latency_s, fallback=fallback))
        if len(self._cables) > MAX_LINKS:
            raise TopologyError(f"{self._source}: more than {MAX_LINKS} links")

    def exit(self, name: str, at: Sequence[str], rate: Fraction, latency_s: float = 0.0) -> None:
        """Add a network interface that the vertices ``at`` reach at ``rate`` bytes a second each way."""
        self._exits.append(_Exit(name=name, at=tuple(at), rate=rate, latency_s=latency_s))

    def reading(self, *, nodes: int = 1, network: str | None = None) -> Reading:
        """The topology of ``nodes`` such machines.

        Several are joined by one network switch through their interfaces; without any, every rank has a cable to it.

        Args:
            nodes: how many.
            network: bandwidth of each interface, instead of what the file says.

        Raises:
            TopologyError: the fabric cannot work, or nothing says how fast the network is.
        """
        notes = list(self.notes)
        rates: dict[tuple[str, str], Fraction] = {}
        latencies: dict[tuple[str, str], float] = {}
        vertices: dict[str, Vertex] = {}
        unit = {self._unit}

        def connect(a: str, b: str, rate: Fraction, latency_s: float) -> None:
            rates[a, b] = rates.get((a, b), Fraction(0)) + rate
            latencies[a, b] = max(latencies.get((a, b), 0.0), latency_s)

        if nodes == 1 and network is not None:
            raise TopologyError(f"{self._source}: a network between nodes needs more than one node")
        if nodes > 1 and nodes * (len(self._vertices) + len(self._exits)) >= MAX_VERTICES:
            raise TopologyError(f"{self._source}: {nodes} nodes have more than {MAX_VERTICES} ranks and switches")
        if nodes > 1 and nodes * (len(self._cables) + 4 * len(self._exits)) >= MAX_LINKS:
            raise TopologyError(f"{self._source}: {nodes} nodes have more than {MAX_LINKS} links")
        drop = nodes == 1 and self._joined_without_fallback()
        if drop:
            notes.append("PCIe is left out: faster links join all GPUs")
        for number in range(nodes):
            prefix = f"node{number}/" if nodes > 1 else ""
            for label, vertex in self._vertices.items():
                node = f"node{number}" if prefix else vertex.node
                vertices[prefix + label] = replace(vertex, label=prefix + label, node=node)
            for cable in self._cables:
                if not (drop and cable.fallback):
                    connect(prefix + cable.src, prefix + cable.dst, cable.rate, cable.latency_s)
        if nodes > 1:
            exits, rate = self._ways_out(network, unit, notes)
            for number in range(nodes):
                for way in exits:
                    speed = rate or way.rate
                    end = "network"
                    if way.name:
                        end = f"node{number}/{way.name}"
                        vertices[end] = Vertex(kind="switch", label=end, node=f"node{number}")
                        for a, b in ((end, "network"), ("network", end)):
                            connect(a, b, speed, way.latency_s)
                    for vertex_label in way.at:
                        inside = f"node{number}/{vertex_label}"
                        for a, b in ((inside, end), (end, inside)):
                            connect(a, b, speed, 0.0 if way.name else way.latency_s)
            vertices["network"] = Vertex(kind="switch", label="network")
        name = self._name if nodes == 1 else f"{self._name}_x{nodes}"
        return Reading(topology=self._finish(name, vertices, rates, latencies, unit), notes=tuple(notes))

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
        ranks = [label for label, vertex in self._vertices.items() if vertex.kind == "rank"]
        return [_Exit(name="", at=(label,), rate=rate, latency_s=0.0) for label in ranks], rate

    def _joined_without_fallback(self) -> bool:
        """Whether the ranks reach each other without the cables that are a fallback, of which there are some."""
        if not any(cable.fallback for cable in self._cables):
            return False
        beside: dict[str, list[str]] = {}
        for cable in self._cables:
            if not cable.fallback:
                beside.setdefault(cable.src, []).append(cable.dst)
                beside.setdefault(cable.dst, []).append(cable.src)
        ranks = [label for label, vertex in self._vertices.items() if vertex.kind == "rank"]
        seen, stack = set(ranks[:1]), ranks[:1]
        while stack:
            for other in beside.get(stack.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    stack.append(other)
        return seen.issuperset(ranks)

    def _finish(
        self,
        name: str,
        vertices: dict[str, Vertex],
        rates: dict[tuple[str, str], Fraction],
        latencies: dict[tuple[str, str], float],
        written: set[str],
    ) -> Topology:
        kept = _without_dead_ends(vertices, rates)
        ordered = [v for kind in ("rank", "switch") for v in vertices.values() if v.kind == kind and v.label in kept]
        index = {vertex.label: number for number, vertex in enumerate(ordered)}
        used = {ends: rate for ends, rate in rates.items() if ends[0] in index and ends[1] in index}
        for (a, b), rate in used.items():
            if rate < 1 or rate.denominator != 1:
                raise TopologyError(f"{self._source}: link {a} -> {b}: bandwidth must be a positive whole number")
        unit = "link" if "link" in written else fitting_unit(used.values(), written)
        scale = RATE_UNITS.get(unit, Fraction(1))
        links = tuple(
            Link(src=index[a], dst=index[b], capacity=int(rate / scale), latency_s=latencies[a, b])
            for (a, b), rate in used.items()
        )
        try:
            return Topology(name=name, unit=unit, vertices=tuple(ordered), links=links)
        except TopologyError as error:
            raise TopologyError(f"{self._source}: {error}") from None


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
