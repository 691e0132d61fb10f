"""The links a sketch allows on a fabric, what they share, and the symmetries that map them onto themselves.

A *logical link* joins two ranks along one path through switches. Between ranks of a node it is any pair with such
a path inside the node (or anywhere, where nothing inside joins its ranks); between nodes it is what the sketch says.
Logical links share *resources*: the physical links of their paths, and where a sketch speaks of a switch that the
fabric does not show, one port in and one out.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mycel.collectives.synth.sketch.reader import Sketch
from mycel.cost import bytes_per_second
from mycel.errors import SynthesisError, UsageError
from mycel.topology.model import Topology

__all__ = ["LogicalLink", "Network", "Resource", "build_network"]

#: A physical link as ``(src, dst)`` vertices, or one rank's port of a switch as ``("out" | "in", group, rank)``.
Resource = tuple[int, int] | tuple[str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogicalLink:
    """A way from one rank to another.

    Attributes:
        src: sending rank.
        dst: receiving rank.
        path: topology vertices, ends included.
        crosses: whether it joins two nodes.
        alpha_s: seconds before the first byte arrives, which also keep the path busy.
        rate: bytes a second of its narrowest part.
        resources: what it shares with others, each with its own bytes a second.
    """

    src: int
    dst: int
    path: tuple[int, ...]
    crosses: bool
    alpha_s: float
    rate: float
    resources: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What routing and ordering work on.

    Attributes:
        sketch: what was asked for.
        num_ranks: world size.
        node_size: ranks of a node; rank ``r`` is GPU ``r % node_size`` of node ``r // node_size``.
        links: logical links.
        resources: what links share: a physical link by its vertices, or a port ``("out" | "in", group, rank)``.
        symmetries: of each offset, where it takes ranks, links and resources.
    """

    sketch: Sketch
    num_ranks: int
    node_size: int
    links: tuple[LogicalLink, ...]
    resources: tuple[Resource, ...]
    symmetries: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]

    def allows(self, link: LogicalLink, src: int, dsts: Sequence[int]) -> bool:
        """Whether data of rank ``src`` for ranks ``dsts`` may use a link.

        Between nodes they leave from their own node only, into nodes where they are wanted, and through the senders
        that the sketch gives them.
        """
        if not link.crosses:
            return True
        home, away = link.src // self.node_size, link.dst // self.node_size
        if src // self.node_size != home or not any(dst // self.node_size == away for dst in dsts):
            return False
        own = [sender for sender, gpus in self.sketch.senders if src % self.node_size in gpus]
        return not own or link.src % self.node_size in own


def build_network(topology: Topology, sketch: Sketch) -> Network:
    """The logical links of a sketch on a fabric.

    Raises:
        UsageError: the sketch and the fabric do not fit: another number of ranks, an unknown GPU, a symmetry the
            fabric does not have.
        SynthesisError: two ranks that the sketch connects have no path through switches only.
    """
    n, nodes, source = topology.num_ranks, sketch.num_nodes, sketch.source
    if n % nodes:
        raise UsageError(f"{source}: nnodes is {nodes}, but {topology.name} has {n} ranks, which do not divide by it")
    size = n // nodes
    _check_gpus(sketch, size, topology.name)
    return _Builder(topology, sketch, size).build()


def _check_gpus(sketch: Sketch, size: int, fabric: str) -> None:
    named = [("intranode_sketch.switches", gpu) for group in sketch.groups for gpu in group]
    if isinstance(sketch.connections, tuple):
        key = "internode_sketch.internode_conn"
        named += [(key, gpu) for src, dsts in sketch.connections for gpu in (src, *dsts)]
    key = "internode_sketch.gpus_to_sender_rev_map"
    named += [(key, gpu) for sender, gpus in sketch.senders for gpu in (sender, *gpus)]
    for key, gpu in named:
        if gpu >= size:
            raise UsageError(
                f"{sketch.source}: {key} names GPU {gpu}, but a node of {fabric} has {size} "
                f"({sketch.num_nodes} nodes): change it, or nnodes"
            )


class _Builder:
    def __init__(self, topology: Topology, sketch: Sketch, size: int) -> None:
        self._topology, self._sketch, self._size = topology, sketch, size
        self._outgoing: dict[int, list[tuple[int, float, int]]] = {}
        for link in topology.links:
            self._outgoing.setdefault(link.src, []).append((link.dst, link.latency_s, link.capacity))
        self._rate = bytes_per_second(topology)
        self._resources: dict[Resource, int] = {}

    def build(self) -> Network:
        links = tuple(self._links())
        return Network(
            sketch=self._sketch,
            num_ranks=self._topology.num_ranks,
            node_size=self._size,
            links=links,
            resources=tuple(self._resources),
            symmetries=tuple(self._symmetry(number, links) for number in range(len(self._sketch.symmetry))),
        )

    def _links(self) -> Iterator[LogicalLink]:
        n, size = self._topology.num_ranks, self._size
        local = [self._inside(node, own) for node, own in enumerate(self._local_switches())]
        crossing = self._crossing()
        switches = frozenset(self._topology.switches)
        for src in range(n):
            node = src // size
            inside = self._paths(src, local[node])
            for dst in range(node * size, (node + 1) * size):
                if dst in inside:
                    yield self._link(src, dst, inside[dst], crosses=False)
            wanted = [dst for dst in crossing.get(src % size, ()) if dst // size != node]
            across = self._paths(src, switches) if wanted else {}
            for dst in wanted:
                if dst not in across:
                    raise SynthesisError(
                        f"{self._sketch.source}: internode_conn: rank {src} has no path to rank {dst} of "
                        f"{self._topology.name} that passes no other rank"
                    )
                yield self._link(src, dst, across[dst], crosses=True)

    def _inside(self, node: int, own: frozenset[int]) -> frozenset[int]:
        """Switches that links inside a node may use: its own, or all where those join none of its ranks."""
        ranks = range(node * self._size, (node + 1) * self._size)
        joined = any(dst in ranks for src in ranks for dst in self._paths(src, own))
        return own if joined else frozenset(self._topology.switches)

    def _crossing(self) -> dict[int, list[int]]:
        """Of each GPU number, the ranks of any node it is connected to."""
        size, given = self._size, self._sketch.connections
        if given is None:
            return {}
        table: dict[int, tuple[int, ...]]
        if given == "fully-connected":
            table = {gpu: tuple(range(size)) for gpu in range(size)}
        elif given == "direct-map":
            table = {gpu: (gpu,) for gpu in range(size)}
        else:
            table = {src: dsts for src, dsts in given if not isinstance(src, str)}
        nodes = range(self._sketch.num_nodes)
        return {src: [node * size + dst for node in nodes for dst in dsts] for src, dsts in table.items()}

    def _local_switches(self) -> list[frozenset[int]]:
        """Of each node, the switches from which switches alone lead to no other node."""
        topology, size = self._topology, self._size
        beside: dict[int, set[int]] = {switch: set() for switch in topology.switches}
        for link in topology.links:
            for a, b in ((link.src, link.dst), (link.dst, link.src)):
                if a in beside:
                    beside[a].add(b)
        reached: dict[int, set[int]] = {}
        for switch in topology.switches:
            seen, stack, nodes = {switch}, [switch], set()
            while stack:
                for other in beside[stack.pop()]:
                    if other in topology.rank_of:
                        nodes.add(topology.rank_of[other] // size)
                    elif other not in seen:
                        seen.add(other)
                        stack.append(other)
            reached[switch] = nodes
        return [
            frozenset(switch for switch, nodes in reached.items() if nodes == {node})
            for node in range(self._sketch.num_nodes)
        ]

    def _paths(self, src: int, switches: frozenset[int]) -> dict[int, tuple[int, ...]]:
        """Paths from a rank through given switches: least latency, then widest, then fewest hops."""
        start = self._topology.ranks[src]
        heap: list[tuple[float, int, int, tuple[int, ...]]] = [(0.0, -(1 << 62), 0, (start,))]
        best: dict[int, tuple[int, ...]] = {}
        while heap:
            latency_s, narrow, hops, path = heapq.heappop(heap)
            here = path[-1]
            if here in best:
                continue
            best[here] = path
            if here != start and here not in switches:
                continue
            for far, more_s, capacity in self._outgoing.get(here, ()):
                if far not in best:
                    heapq.heappush(heap, (latency_s + more_s, max(narrow, -capacity), hops + 1, (*path, far)))
        rank_of = self._topology.rank_of
        return {rank_of[v]: path for v, path in best.items() if v in rank_of and v != start}

    def _link(self, src: int, dst: int, path: tuple[int, ...], *, crosses: bool) -> LogicalLink:
        capacity, latency_s = self._topology.capacity, self._topology.latency_s
        rates = [capacity[hop] * self._rate for hop in pairwise(path)]
        shared = [(self._resource(hop), rate) for hop, rate in zip(pairwise(path), rates, strict=True)]
        if len(path) == 2 and not crosses:
            a, b = src % self._size, dst % self._size
            for number, group in enumerate(self._sketch.groups):
                if a in group and b in group:
                    shared.append((self._resource(("out", number, src)), rates[0]))
                    shared.append((self._resource(("in", number, dst)), rates[0]))
        return LogicalLink(
            src=src,
            dst=dst,
            path=path,
            crosses=crosses,
            alpha_s=sum(latency_s[hop] for hop in pairwise(path)),
            rate=min(rates),
            resources=tuple(shared),
        )

    def _resource(self, key: Resource) -> int:
        return self._resources.setdefault(key, len(self._resources))

    def _symmetry(
        self, number: int, links: tuple[LogicalLink, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Where an offset takes ranks, links and resources; checked."""
        offset, size = self._sketch.symmetry[number]
        n, where = self._topology.num_ranks, f"{self._sketch.source}: symmetry_offsets[{number}]"
        if n % size:
            raise UsageError(f"{where}: runs of {size} do not divide the {n} ranks of {self._topology.name}")
        ranks = tuple((r % size + offset) % size + r // size * size for r in range(n))
        at = {(link.src, link.dst): position for position, link in enumerate(links)}
        image = [0] * len(links)
        resources: dict[int, int] = {}
        for position, link in enumerate(links):
            there = (ranks[link.src], ranks[link.dst])
            other = links[at[there]] if there in at else None
            if (
                other is None
                or (link.alpha_s, link.crosses) != (other.alpha_s, other.crosses)
                or ([rate for _, rate in link.resources] != [rate for _, rate in other.resources])
            ):
                raise UsageError(
                    f"{where}: turns link {link.src} -> {link.dst} into {there[0]} -> {there[1]}, which "
                    f"{'is not there' if other is None else 'differs from it'}: the sketch on {self._topology.name} "
                    "has no such symmetry; remove it"
                )
            image[position] = at[there]
            for (mine, _), (its, _) in zip(link.resources, other.resources, strict=True):
                if resources.setdefault(mine, its) != its:
                    raise UsageError(
                        f"{where}: would take a part that links share to two places (seen at {link.src} -> "
                        f"{link.dst}): the sketch on {self._topology.name} has no such symmetry; remove it"
                    )
        if len(set(resources.values())) != len(resources):
            raise UsageError(f"{where}: would merge parts of {self._topology.name}; remove it")
        return ranks, tuple(image), tuple(resources[i] for i in range(len(resources)))
