"""How fast groups of ranks exchange bytes on a topology: what our schedules reach there, all groups at once."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

from mycel.collectives.bound import bound
from mycel.cost import bytes_per_second
from mycel.errors import UsageError
from mycel.planning.step.points import Numbers
from mycel.topology.model import Topology

__all__ = ["Wires", "message_rate", "ring_rate"]

Path = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Wires:
    """The links of a topology, as ``Links`` of a cost model.

    Alone, a group moves bytes at the rate of the schedules that mycel makes for it, which is the bound of its
    sub-topology. All groups of a job work at the same time: what that leaves is taken from rings of all groups along
    shortest paths, by the busiest link with all of them against one alone.

    Attributes:
        topology: the fabric, with rates.
        order: rank of the fabric at each place of the mesh; by number if not given.

    Raises:
        UsageError: the topology has relative capacities only, or the order is not one of its ranks.

    References:
        Zhao et al., "ForestColl", arXiv 2402.06787 (the bound that schedules meet).

    Examples:
        >>> from mycel.topology import load_topology
        >>> wires = Wires(topology=load_topology("dgx_a100:nodes=2"))
        >>> wires.ring(np.array([8.0, 2.0]), np.array([1.0, 8.0]), 1.0, 1.0) / 1e9  # in a box; between two
        array([325.,  25.])
    """

    topology: Topology
    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.topology.unit == "link":
            raise UsageError(
                f"{self.topology.name} has relative capacities: give it bandwidths such as '25 GB/s' to plan by them"
            )
        if self.order and sorted(self.order) != list(range(self.topology.num_ranks)):
            raise UsageError(f"{self.topology.name}: an order must hold each of {self.topology.num_ranks} ranks once")

    def ring(self, size: Numbers, stride: Numbers, link: float, network: float) -> Numbers:
        """See ``Links``."""
        return self._rates(size, stride, link, network, self._group)

    def hop(self, stride: Numbers, size: Numbers, link: float, network: float) -> Numbers:
        """See ``Links``."""
        return self._rates(size, stride, link, network, self._chain)

    # -- one shape of groups ----------------------------------------------------------------------------------

    def _rates(
        self, size: Numbers, stride: Numbers, link: float, network: float, one: Callable[[int, int], float]
    ) -> Numbers:
        shapes = np.stack([np.asarray(size), np.asarray(stride)], axis=1).astype(int)
        found: dict[tuple[int, int], float] = {}
        for shape in {(int(a), int(b)) for a, b in shapes}:
            if shape[0] < 2:
                found[shape] = float("inf")
                continue
            if shape[0] * shape[1] > self.topology.num_ranks:
                raise UsageError(
                    f"groups of {shape[0]} ranks, {shape[1]} apart, need {shape[0] * shape[1]} ranks; "
                    f"{self.topology.name} has {self.topology.num_ranks}"
                )
            found[shape] = one(*shape) * (link if self._is_inside(*shape) else network)
        return np.array([found[int(a), int(b)] for a, b in shapes])

    def _groups(self, size: int, stride: int) -> list[tuple[int, ...]]:
        """Ranks of every group: of each block of ``size * stride`` places, those a stride apart."""
        count = self.topology.num_ranks
        order = self.order or tuple(range(count))
        return [
            tuple(order[first + offset + k * stride] for k in range(size))
            for first in range(0, count - size * stride + 1, size * stride)
            for offset in range(stride)
        ]

    def _is_inside(self, size: int, stride: int) -> bool:
        vertices, ranks = self.topology.vertices, self.topology.ranks
        return all(
            len({vertices[ranks[rank]].node for rank in group}) == 1 and vertices[ranks[group[0]]].node is not None
            for group in self._groups(size, stride)
        )

    def _group(self, size: int, stride: int) -> float:
        """Bytes a second that a rank of the slowest group sends."""
        return ring_rate(self.topology, tuple(self._groups(size, stride)))

    def _chain(self, size: int, stride: int) -> float:
        """Bytes a second of a message from every rank to the next of its chain, all at once, one direction."""
        pairs = [pair for group in self._groups(size, stride) for pair in pairwise(group)]
        return self._busiest(pairs)

    def _busiest(self, pairs: Iterable[tuple[int, int]]) -> float:
        return message_rate(self.topology, tuple(pairs))


@lru_cache(maxsize=4096)
def ring_rate(
    topology: Topology, groups: tuple[tuple[int, ...], ...], beside: tuple[tuple[int, ...], ...] = ()
) -> float:
    """Bytes a second that a rank of the slowest of some groups sends in a collective, all of them at once.

    Args:
        topology: the fabric.
        groups: ranks of each, which form a ring from node to node.
        beside: other groups that exchange at the same time.
    """
    rings = [_ring(_by_node(topology, group)) for group in groups]
    mine = tuple(pair for ring in rings for pair in ring)
    together = message_rate(topology, mine, tuple(p for group in beside for p in _ring(_by_node(topology, group))))
    # Groups that look alike have the same bound: the one whose own ring is slowest stands for all.
    alone = [message_rate(topology, tuple(ring)) for ring in rings]
    worst = int(np.argmin(alone))
    return _best_alone(topology, tuple(sorted(groups[worst]))) * min(1.0, together / alone[worst])


@lru_cache(maxsize=4096)
def _best_alone(topology: Topology, group: tuple[int, ...]) -> float:
    part = topology.subset(group)
    best = bound(part, "all_gather")
    return float(best.algbw) * bytes_per_second(part) * (len(group) - 1) / len(group)


def _by_node(topology: Topology, group: Sequence[int]) -> list[int]:
    """Ranks of a group, those of a node one after the other, whatever their order in the mesh."""
    of = {rank: topology.vertices[topology.ranks[rank]].node or "" for rank in group}
    return sorted(group, key=lambda rank: (of[rank], rank))


def _ring(group: Sequence[int]) -> list[tuple[int, int]]:
    return [(group[k], group[(k + 1) % len(group)]) for k in range(len(group))]


@lru_cache(maxsize=16384)
def message_rate(
    topology: Topology, pairs: tuple[tuple[int, int], ...], beside: tuple[tuple[int, int], ...] = ()
) -> float:
    """Bytes a second of each of some messages along shortest paths, when all go at once at the same rate.

    Args:
        topology: the fabric.
        pairs: source and target of each.
        beside: other messages at the same time, whose own rate is not asked for.
    """
    loads: Counter[tuple[int, int]] = Counter()
    paths = _paths(topology)
    for source, target in pairs:
        loads.update(paths.between(topology.ranks[source], topology.ranks[target]))
    own = tuple(loads)
    for source, target in beside:
        loads.update(paths.between(topology.ranks[source], topology.ranks[target]))
    rate = bytes_per_second(topology)
    return min(topology.capacity[hop] * rate / loads[hop] for hop in own)


class _Paths:
    """Shortest paths by hops, the widest of those, found once for each source."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.trees: dict[int, dict[int, int]] = {}

    @cached_property
    def neighbours(self) -> dict[int, list[int]]:
        """Of each vertex, those over the widest links first."""
        found: dict[int, list[int]] = {}
        for link in sorted(self.topology.links, key=lambda one: -one.capacity):
            found.setdefault(link.src, []).append(link.dst)
        return found

    def between(self, source: int, target: int) -> Path:
        """Hops from one vertex to another."""
        if source not in self.trees:
            self.trees[source] = self._grow(source)
        tree, hops, at = self.trees[source], [], target
        while at != source:
            hops.append((tree[at], at))
            at = tree[at]
        return tuple(reversed(hops))

    def _grow(self, source: int) -> dict[int, int]:
        tree, queue, seen = {}, deque([source]), {source}
        while queue:
            at = queue.popleft()
            for other in self.neighbours.get(at, ()):
                if other not in seen:
                    seen.add(other)
                    tree[other] = at
                    queue.append(other)
        return tree


@lru_cache(maxsize=8)
def _paths(topology: Topology) -> _Paths:
    return _Paths(topology)
