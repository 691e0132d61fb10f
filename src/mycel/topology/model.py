"""Topology: the fabric as a frozen directed graph of ranks and switches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Literal

from mycel.brief import brief
from mycel.errors import TopologyError
from mycel.topology.device import Device, device_to_json
from mycel.topology.link_class import LINK_CLASS_NAMES, StatedClass, stated_to_json
from mycel.units import RATE_UNITS

__all__ = ["LOCALHOST", "Link", "Topology", "Vertex", "VertexKind"]

#: The node of ranks that are processes of one machine of which nothing else is known.
LOCALHOST = "localhost"

VertexKind = Literal["rank", "switch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vertex:
    """One end of links: a rank, which has data, or a switch, which has none.

    Attributes:
        kind: ``"rank"`` or ``"switch"``.
        label: the name a person gave it; unique in a topology.
        node: the machine it belongs to, where that is known (used for drawing and placement).
        computes: the switch can copy what it receives to several ports, and add what it receives at several
            (NVLink SHARP, InfiniBand SHARP); other switches only forward. False for ranks, which always can.
        device: of a rank, where it is known.

    Examples:
        >>> Vertex(kind="rank", label="gpu0", node="left").computes
        False
        >>> Vertex(kind="switch", label="nvswitch", computes=True)
        Vertex(kind='switch', label='nvswitch', node=None, computes=True)
    """

    kind: VertexKind
    label: str
    node: str | None = None
    computes: bool = False
    device: Device | None = field(default=None, repr=False)

    __repr__ = brief


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction of a cable.

    Attributes:
        src: vertex index the bytes leave.
        dst: vertex index the bytes reach.
        capacity: positive integer, in the topology's unit.
        latency_s: seconds from the first byte sent to the first byte received.
        link_class: what it is, one of ``LINK_CLASS_NAMES``, where that is stated; it says nothing about bandwidth.

    Examples:
        >>> there = Link(src=0, dst=1, capacity=2, latency_s=1e-6)
        >>> replace(there, src=there.dst, dst=there.src)  # a cable is two links
        Link(src=1, dst=0, capacity=2, latency_s=1e-06, link_class=None)
    """

    src: int
    dst: int
    capacity: int
    latency_s: float = 0.0
    link_class: str | None = None

    __repr__ = brief


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A fabric. Vertices are indices into ``vertices``; rank ``r`` is the r-th vertex of kind ``rank``.

    Frozen and hashable; validated on construction, so that every Topology at hand can carry a collective.

    Attributes:
        name: what people call it.
        unit: what capacity 1 means, a key of ``mycel.units.RATE_UNITS``, or ``"link"`` for relative capacities.
        vertices: in index order.
        links: directed; at most one from a vertex to another (merge parallel cables into one capacity).
        link_classes: what is stated about classes of links, by name in any order.

    Raises:
        TopologyError: fewer than two ranks, an unknown vertex, a self-loop, a duplicate link, a capacity that
            is not a positive integer, a negative latency, or ranks that cannot all reach each other.

    Examples:
        >>> ends = (Vertex(kind="rank", label="a"), Vertex(kind="rank", label="b"), Vertex(kind="switch", label="s"))
        >>> cables = tuple(Link(src=i, dst=j, capacity=10) for i, j in [(0, 2), (2, 0), (1, 2), (2, 1)])
        >>> fabric = Topology(name="pair", unit="Gbit/s", vertices=ends, links=cables)
        >>> fabric.num_ranks, fabric.switches, fabric.capacity[0, 2]
        (2, (2,), 10)
    """

    name: str
    unit: str
    vertices: tuple[Vertex, ...]
    links: tuple[Link, ...]
    link_classes: tuple[StatedClass, ...] = ()
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    __repr__ = brief

    def __post_init__(self) -> None:
        object.__setattr__(self, "vertices", tuple(self.vertices))
        object.__setattr__(self, "links", tuple(self.links))
        object.__setattr__(self, "link_classes", tuple(sorted(self.link_classes, key=lambda one: one.name)))
        if self.unit != "link" and self.unit not in RATE_UNITS:
            known = ", ".join(["link", *RATE_UNITS])
            raise TopologyError(f"{self.name}: unknown unit {self.unit!r}; known units: {known}")
        self._check_vertices()
        self._check_links()
        self._check_connected()
        object.__setattr__(self, "_hash", hash((self.name, self.unit, self.vertices, self.links, self.link_classes)))

    def __hash__(self) -> int:
        return self._hash

    # -- what it holds ------------------------------------------------------------------------------------

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Vertex index of each rank."""
        return tuple(i for i, v in enumerate(self.vertices) if v.kind == "rank")

    @cached_property
    def switches(self) -> tuple[int, ...]:
        """Vertex indices of the switches."""
        return tuple(i for i, v in enumerate(self.vertices) if v.kind == "switch")

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """Rank number of each rank's vertex."""
        return {vertex: rank for rank, vertex in enumerate(self.ranks)}

    @cached_property
    def compute_vertices(self) -> tuple[int, ...]:
        """Vertex index of everything that can be the end of a transfer: the ranks, then computing switches."""
        return (*self.ranks, *(i for i in self.switches if self.vertices[i].computes))

    @cached_property
    def compute_index(self) -> dict[int, int]:
        """Place of each vertex in ``compute_vertices``; of a rank's vertex, its rank number."""
        return {vertex: place for place, vertex in enumerate(self.compute_vertices)}

    @cached_property
    def capacity(self) -> dict[tuple[int, int], int]:
        """Capacity of each link by ``(src, dst)``."""
        return {(link.src, link.dst): link.capacity for link in self.links}

    @cached_property
    def latency_s(self) -> dict[tuple[int, int], float]:
        """Latency of each link by ``(src, dst)``, in seconds."""
        return {(link.src, link.dst): link.latency_s for link in self.links}

    @property
    def num_ranks(self) -> int:
        """World size."""
        return len(self.ranks)

    @property
    def ranks_by_node(self) -> dict[str | None, tuple[int, ...]]:
        """Ranks of each node, nodes in the order of their first rank; ``None``: those that are in none."""
        found: dict[str | None, list[int]] = {}
        for rank, vertex in enumerate(self.ranks):
            found.setdefault(self.vertices[vertex].node, []).append(rank)
        return {node: tuple(ranks) for node, ranks in found.items()}

    @property
    def devices(self) -> tuple[Device | None, ...]:
        """Device of each rank; ``None`` where it is not known."""
        return tuple(self.vertices[vertex].device for vertex in self.ranks)

    @property
    def bytes_per_second_per_unit(self) -> Fraction | None:
        """Bytes a second of capacity 1; ``None`` where capacities are only relative (unit ``link``)."""
        return RATE_UNITS.get(self.unit)

    def label(self, vertex: int) -> str:
        """Name of a vertex, for messages."""
        return self.vertices[vertex].label

    @cached_property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits that change when anything but the name does."""
        payload: list[object] = [
            self.unit,
            [[v.kind, v.label, v.node, *([True] if v.computes else [])] for v in self.vertices],
            [[k.src, k.dst, k.capacity, k.latency_s, *([k.link_class] if k.link_class else [])] for k in self.links],
        ]
        payload += [stated_to_json(self.link_classes)] if self.link_classes else []
        if any(self.devices):
            payload.append([device and device_to_json(device) for device in self.devices])
        return hashlib.sha256(json.dumps(payload).encode()).hexdigest()[:12]

    # -- derived topologies -------------------------------------------------------------------------------

    def reversed(self) -> Topology:
        """The same fabric with every link turned round: all-gather here is reduce-scatter there."""
        return replace(self, links=tuple(replace(link, src=link.dst, dst=link.src) for link in self.links))

    def subset(self, ranks: Iterable[int]) -> Topology:
        """The fabric as a sub-group of ranks sees it.

        Rank ``i`` of the result is ``sorted(ranks)[i]`` here. The other ranks forward nothing where the group
        is connected without them; where it is not (a group of every second rank of a ring, say), they count as
        switches, since their machines forward packets. Vertices keep their labels, so physical paths can be
        recognised.

        Raises:
            TopologyError: fewer than two ranks, or an unknown rank.
        """
        chosen = sorted(set(ranks))
        unknown = [r for r in chosen if not 0 <= r < self.num_ranks]
        if unknown:
            raise TopologyError(f"{self.name}: no rank {unknown[0]} among {self.num_ranks}")
        members = {self.ranks[r] for r in chosen}
        kept = [i for i, v in enumerate(self.vertices) if v.kind == "switch" or i in members]
        try:
            return self._induced(kept, members)
        except TopologyError:
            return self._induced(list(range(len(self.vertices))), members)

    def reordered(self, order: Sequence[int]) -> Topology:
        """The same fabric with its ranks in another order: rank ``i`` of the result is rank ``order[i]`` here.

        Raises:
            TopologyError: the order does not hold each rank once.

        Examples:
            >>> ends = tuple(Vertex(kind="rank", label=label) for label in "abc")
            >>> ring = tuple(Link(src=i, dst=(i + 1) % 3, capacity=1 + i) for i in range(3))
            >>> turned = Topology(name="ring", unit="link", vertices=ends, links=ring).reordered([2, 0, 1])
            >>> [turned.label(vertex) for vertex in turned.ranks], turned.capacity[0, 1]
            (['c', 'a', 'b'], 3)
        """
        if sorted(order) != list(range(self.num_ranks)):
            raise TopologyError(f"{self.name}: {list(order)} is no order of {self.num_ranks} ranks")
        if list(order) == sorted(order):
            return self
        place = list(range(len(self.vertices)))  # from the vertex that was to the vertex that will be
        for number, rank in enumerate(order):
            place[self.ranks[rank]] = self.ranks[number]
        vertices = list(self.vertices)
        for was, now in enumerate(place):
            vertices[now] = self.vertices[was]
        links = tuple(replace(link, src=place[link.src], dst=place[link.dst]) for link in self.links)
        return replace(self, vertices=tuple(vertices), links=links)

    def with_vertices(self, vertices: Iterable[Vertex]) -> Topology:
        """The same links between other vertices."""
        return replace(self, vertices=tuple(vertices))

    def with_devices(self, devices: Sequence[Device | None]) -> Topology:
        """The same fabric whose ranks have these devices.

        Args:
            devices: of each rank, ``None`` where it is not known.

        Raises:
            TopologyError: not one for each rank.
        """
        if len(devices) != self.num_ranks:
            raise TopologyError(f"{self.name}: {len(devices)} devices for {self.num_ranks} ranks; give one for each")
        of = dict(zip(self.ranks, devices, strict=True))
        return self.with_vertices(replace(v, device=of.get(i, v.device)) for i, v in enumerate(self.vertices))

    def without_computing(self) -> Topology:
        """The fabric with switches that only forward: what programs over sockets can use."""
        if len(self.compute_vertices) == self.num_ranks:
            return self
        return self.with_vertices(replace(vertex, computes=False) for vertex in self.vertices)

    def _induced(self, kept: list[int], members: set[int]) -> Topology:
        index = {old: new for new, old in enumerate(kept)}
        vertices = tuple(
            Vertex(
                kind="rank" if old in members else "switch",
                label=self.vertices[old].label,
                node=self.vertices[old].node,
                computes=self.vertices[old].computes,
                device=self.vertices[old].device if old in members else None,
            )
            for old in kept
        )
        links = tuple(
            replace(k, src=index[k.src], dst=index[k.dst]) for k in self.links if k.src in index and k.dst in index
        )
        return replace(self, name=f"{self.name}/{len(members)}", vertices=vertices, links=links)

    # -- validation ---------------------------------------------------------------------------------------

    def _check_vertices(self) -> None:
        seen: set[str] = set()
        for vertex in self.vertices:
            if vertex.kind not in ("rank", "switch"):
                raise TopologyError(
                    f"{self.name}: vertex {vertex.label!r} is a {vertex.kind!r}; expected rank or switch"
                )
            if vertex.kind == "rank" and vertex.computes:
                raise TopologyError(
                    f"{self.name}: rank {vertex.label!r} is marked 'computes'; every rank does, only switches differ"
                )
            if vertex.kind == "switch" and vertex.device is not None:
                raise TopologyError(f"{self.name}: switch {vertex.label!r} has a device; only ranks compute")
            if vertex.label in seen:
                raise TopologyError(f"{self.name}: two vertices are called {vertex.label!r}")
            seen.add(vertex.label)
        if self.num_ranks < 2:
            raise TopologyError(
                f"{self.name}: {self.num_ranks} rank(s); a collective needs at least 2 "
                "(is every vertex marked a switch?)"
            )

    def _check_links(self) -> None:
        seen: set[tuple[int, int]] = set()
        for position, link in enumerate(self.links):
            for end in (link.src, link.dst):
                if not 0 <= end < len(self.vertices):
                    raise TopologyError(
                        f"{self.name}: link {position} ({link.src} -> {link.dst}): no vertex {end}; "
                        f"vertices are 0..{len(self.vertices) - 1}"
                    )
            where = f"{self.name}: link {position} ({self.label(link.src)} -> {self.label(link.dst)})"
            if link.src == link.dst:
                raise TopologyError(f"{where}: a link cannot end where it starts")
            if (link.src, link.dst) in seen:
                raise TopologyError(f"{where}: duplicate link; add the capacities into one")
            seen.add((link.src, link.dst))
            if isinstance(link.capacity, bool) or not isinstance(link.capacity, int) or link.capacity <= 0:
                raise TopologyError(f"{where}: capacity {link.capacity!r} must be a positive integer")
            if not 0 <= link.latency_s < float("inf"):
                raise TopologyError(f"{where}: latency {link.latency_s!r} s must be zero or more")
            if link.link_class is not None and link.link_class not in LINK_CLASS_NAMES:
                known = ", ".join(LINK_CLASS_NAMES)
                raise TopologyError(f"{where}: unknown class {link.link_class!r}; known: {known}")
        if twice := [a.name for a, b in pairwise(self.link_classes) if a.name == b.name]:
            raise TopologyError(f"{self.name}: the class of links {twice[0]} is stated twice")

    def _check_connected(self) -> None:
        outgoing: list[list[int]] = [[] for _ in self.vertices]
        incoming: list[list[int]] = [[] for _ in self.vertices]
        for link in self.links:
            outgoing[link.src].append(link.dst)
            incoming[link.dst].append(link.src)
        start = self.ranks[0]
        for neighbours, verb in ((outgoing, "cannot be reached from"), (incoming, "cannot reach")):
            seen, stack = {start}, [start]
            while stack:
                for other in neighbours[stack.pop()]:
                    if other not in seen:
                        seen.add(other)
                        stack.append(other)
            for vertex in self.ranks:
                if vertex not in seen:
                    raise TopologyError(
                        f"{self.name}: disconnected: rank {self.rank_of[vertex]} ({self.label(vertex)}) {verb} "
                        f"rank 0 ({self.label(start)}); add a link or remove the rank"
                    )
