"""Switches of large regular fabrics removed many at a time: propose a whole splitting, prove it with one cut test.

A switch between n equal neighbours (or n equal nodes, position by position) is replaced by links of strides 1, 2, 4,
... around the neighbours, with capacities in proportion to how often a binomial tree needs each stride: as many
links as log2 n, trees of depth log2 n, and the widest link to the next neighbour. All switches are replaced in one
go; then one maximum flow to every rank (to one of each orbit, where the fabric has a symmetry) says whether every
rank still receives what it must. If not, other proportions are tried; where none serves, ``splitting`` goes pair by
pair instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mycel.collectives.maxflow import FlowGraph, IntArray, violated_sets
from mycel.collectives.synth.logical_arcs import LogicalArcs, Path, without_loops

__all__ = ["replace_switches", "representatives"]

Proportions = Callable[[int], list[int]]


def _binomial(count: int) -> list[int]:
    """How often each stride occurs in the tree in which v hangs on v without its lowest bit."""
    strides = [0] * count
    for v in range(1, count):
        strides[v & -v] += 1
    return strides


def _doubling(count: int) -> list[int]:
    """Strides 1, 2, 4, ..., equally wide."""
    return [int(0 < s == s & -s) for s in range(count)]


def _mesh(count: int) -> list[int]:
    """Every stride, equally wide."""
    return [int(s > 0) for s in range(count)]


def _ring(count: int) -> list[int]:
    """The next neighbour alone."""
    return [int(s == 1) for s in range(count)]


_PROPORTIONS: tuple[Proportions, ...] = (_binomial, _doubling, _mesh, _ring)


def replace_switches(
    graph: FlowGraph,
    capacity: IntArray,
    demand: IntArray,
    *,
    images: IntArray,
    nodes: Sequence[object],
    is_reversed: bool = False,
) -> LogicalArcs | None:
    """Replace every switch at once.

    Args:
        graph: the fabric.
        capacity: of each arc, such that every rank is served.
        demand: of each root.
        images: the powers of an automorphism, shape ``[order, num_vertices]``; the identity alone if none is known.
        nodes: node of each vertex, ``None`` where it is in none or unknown; in what is not an automorphism's, the
            neighbours of a switch are grouped by it.
        is_reversed: the graph is a fabric turned round; strides then go the other way.

    Returns:
        Links between ranks, as symmetric as the fabric, or ``None`` where no proposal keeps every rank served.
    """
    sinks = representatives(graph, images)
    for proportions in _PROPORTIONS:
        found = _Replacement(graph, capacity, images, nodes).run(proportions, is_reversed=is_reversed)
        if found is None:
            return None
        if not violated_sets(len(graph.ranks), found.tail, found.head, found.capacity, demand, sinks, 1)[0]:
            return found
    return None


class _Replacement:
    """The graph while its switches disappear: what enters and leaves each switch, as physical paths."""

    def __init__(self, graph: FlowGraph, capacity: IntArray, images: IntArray, nodes: Sequence[object]) -> None:
        self.images = images
        self.nodes = nodes
        self.rank_of = {v: r for r, v in enumerate(graph.ranks.tolist())}
        self.switches = [v for v in range(graph.num_vertices) if v not in self.rank_of]
        self.into: dict[int, dict[int, list[tuple[Path, int]]]] = {w: {} for w in self.switches}
        self.out: dict[int, dict[int, list[tuple[Path, int]]]] = {w: {} for w in self.switches}
        self.done: dict[Path, int] = {}
        for t, h, c in zip(graph.tail.tolist(), graph.head.tolist(), capacity.tolist(), strict=True):
            if c:
                self.add((t, h), c)

    def add(self, path: Path, amount: int) -> None:
        """Capacity along a path; for two ranks it is there to stay."""
        t, h = path[0], path[-1]
        if t in self.rank_of and h in self.rank_of:
            self.done[path] = self.done.get(path, 0) + amount
        if h in self.into:
            self.into[h].setdefault(t, []).append((path, amount))
        if t in self.out:
            self.out[t].setdefault(h, []).append((path, amount))

    def run(self, proportions: Proportions, *, is_reversed: bool) -> LogicalArcs | None:
        """Replace all, those with the fewest links first; ``None`` where a switch's neighbours are not alike."""
        for switch in sorted(self.switches, key=lambda w: (len(self.into[w]) + len(self.out[w]), w)):
            groups = self.groups(switch)
            if groups is None or not self.replace(switch, groups, proportions(len(groups)), is_reversed):
                return None
        return LogicalArcs.of(dict(sorted(self.done.items())), self.rank_of)

    def groups(self, switch: int) -> list[list[int]] | None:
        """The neighbours, in an order that the symmetry respects: equal positions of the nodes it joins."""
        neighbours = sorted(self.into[switch])
        if neighbours != sorted(self.out[switch]) or len(neighbours) < 2:
            return None
        order = len(self.images)
        orbit = self.images[:, switch]
        if order > 1 and (orbit == switch).all():
            first = sorted({int(self.images[:, v].min()) for v in neighbours})
            groups = [[int(image[v]) for v in first] for image in self.images]
        elif order > 1:
            if len(set(orbit.tolist())) < order:
                return None
            power = int(np.argmin(orbit))
            to_first, back = self.images[power], self.images[-power % order]
            groups = [[int(back[v])] for v in sorted(int(to_first[v]) for v in neighbours)]
        else:
            by_node: dict[object, list[int]] = {}
            for v in neighbours:
                by_node.setdefault(self.nodes[v], []).append(v)
            groups = list(by_node.values())
            if len(groups) == 1 or len({len(group) for group in groups}) > 1:
                groups = [[v] for v in neighbours]
        return groups if sorted(v for group in groups for v in group) == neighbours else None

    def replace(self, switch: int, groups: list[list[int]], counts: list[int], is_reversed: bool) -> bool:
        """Join position by position at all strides; whether the nodes were alike enough for it."""
        count = len(groups)
        for position in range(len(groups[0])):
            ring = [group[position] for group in groups]
            sizes = {sum(size for _, size in side[switch][v]) for v in ring for side in (self.into, self.out)}
            if len(sizes) > 1:
                return False
            size = sizes.pop()
            amounts = [size * part // sum(counts) for part in counts]
            amounts[1] += size - sum(amounts)
            for stride, amount in enumerate(amounts):
                for place, u in enumerate(ring if amount else []):
                    t = ring[(place + (-stride if is_reversed else stride)) % count]
                    self.join(switch, u, t, amount)
        for v in list(self.into[switch]):
            if v in self.out:
                del self.out[v][switch], self.into[v][switch]
        return True

    def join(self, switch: int, u: int, t: int, amount: int) -> None:
        """Move an amount from u -> switch -> t to u -> t."""
        first, second = self.into[switch][u], self.out[switch][t]
        while amount:
            (head_path, a), (tail_path, b) = first.pop(), second.pop()
            part = min(a, b, amount)
            self.add(without_loops(head_path + tail_path[1:]), part)
            if a > part:
                first.append((head_path, a - part))
            if b > part:
                second.append((tail_path, b - part))
            amount -= part


def representatives(graph: FlowGraph, images: IntArray) -> IntArray:
    """The lowest rank of each orbit of ranks."""
    rank_of = np.full(graph.num_vertices, -1, dtype=np.int64)
    rank_of[graph.ranks] = np.arange(len(graph.ranks))
    lowest = rank_of[images[:, graph.ranks]].min(axis=0)
    return np.unique(lowest)
