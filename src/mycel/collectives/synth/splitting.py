"""Switches removed by edge splitting: links between ranks that keep every cut, with their physical paths.

Capacity u -> w -> t through a switch w becomes capacity u -> t. How much may move is found with one test: move all
of M0 = min(c(u,w), c(w,t)); every set whose incoming capacity shrinks at all shrinks by exactly M0; so with d the
largest deficit of any rank afterwards, M0 - d is the largest amount that keeps every rank served. A switch with
equal capacity in and out can be split off completely in some order of its pairs.

Which pairs come first decides how the fabric is used. Whole capacities are moved at once, neighbour to next
neighbour, so that a switch becomes a ring of few fat logical links: over TCP a rank that receives from everyone at
once loses a quarter of its link (incast), one that receives from one peer does not. Across machines the pairs join
equal positions of neighbouring machines.

References:
    A. Frank, "On connectivity properties of Eulerian digraphs", Annals of Discrete Mathematics 41, 1989, and
    J. Bang-Jensen, A. Frank, B. Jackson, "Preserving and increasing local edge-connectivity in mixed graphs", SIAM
    J. Discrete Mathematics 8(2), 1995 (complete splittings); Zhao et al., arXiv 2402.06787, section 5 (switch
    removal for collectives).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from mycel.collectives.maxflow import FlowGraph, IntArray
from mycel.collectives.synth.logical_arcs import LogicalArcs, Path, without_loops
from mycel.errors import SynthesisError

__all__ = ["remove_switches", "trim_to_balance"]

#: Ranks for which capacity does not go to the next neighbour whole: fewer are not deep, and with more the additional
#: links cost minutes of proofs.
_STRIDED = range(33, 201)

Progress = Callable[[str, int, int], None]


class _Splitter:
    """The graph while switches disappear from it: arcs as growing arrays, zero capacity meaning gone."""

    def __init__(self, graph: FlowGraph, capacity: IntArray, demand: IntArray) -> None:
        self.graph = graph
        self.demand = demand
        self.tail = graph.tail.tolist()
        self.head = graph.head.tolist()
        self.capacity = [int(c) for c in capacity.tolist()]
        self.index = {(t, h): i for i, (t, h) in enumerate(zip(self.tail, self.head, strict=True))}
        self.into: list[list[int]] = [[] for _ in range(graph.num_vertices)]
        self.out: list[list[int]] = [[] for _ in range(graph.num_vertices)]
        for i, (t, h) in enumerate(zip(self.tail, self.head, strict=True)):
            self.out[t].append(i)
            self.into[h].append(i)
        self.paths: list[list[tuple[Path, int]]] = [
            [((t, h), c)] if c else [] for t, h, c in zip(self.tail, self.head, self.capacity, strict=True)
        ]

    def neighbours(self, vertex: int) -> tuple[list[int], list[int]]:
        """Vertices with capacity into, and out of, a vertex."""
        return (
            sorted(self.tail[i] for i in self.into[vertex] if self.capacity[i]),
            sorted(self.head[i] for i in self.out[vertex] if self.capacity[i]),
        )

    def largest_deficit(self) -> int:
        """By how much the worst-served rank falls short of the total demand."""
        changed = FlowGraph(
            num_vertices=self.graph.num_vertices,
            ranks=self.graph.ranks,
            tail=np.array(self.tail, dtype=np.int64),
            head=np.array(self.head, dtype=np.int64),
        )
        return int(changed.check(np.array(self.capacity, dtype=np.int64), self.demand)[0].max())

    def arc(self, tail: int, head: int) -> int:
        """Index of the arc, made with zero capacity where there is none."""
        found = self.index.get((tail, head))
        if found is None:
            found = self.index[tail, head] = len(self.tail)
            self.tail.append(tail)
            self.head.append(head)
            self.capacity.append(0)
            self.out[tail].append(found)
            self.into[head].append(found)
            self.paths.append([])
        return found

    def split(self, u: int, w: int, t: int, *, is_safe: bool, most: int | None = None) -> int:
        """Move as much as may be from u -> w -> t to u -> t (or away, where u is t); how much that was."""
        first, second = self.index[u, w], self.index[w, t]
        amount = min(self.capacity[first], self.capacity[second])
        amount = amount if most is None else min(amount, most)
        if not amount:
            return 0
        direct = self.arc(u, t) if u != t else -1
        if not is_safe:
            self.capacity[first] -= amount
            self.capacity[second] -= amount
            if direct >= 0:
                self.capacity[direct] += amount
            deficit = self.largest_deficit()
            self.capacity[first] += amount
            self.capacity[second] += amount
            if direct >= 0:
                self.capacity[direct] -= amount
            amount -= deficit
        if amount > 0:
            self.capacity[first] -= amount
            self.capacity[second] -= amount
            pieces = list(zip(*_align(self.take(first, amount), self.take(second, amount)), strict=True))
            if direct >= 0:
                self.capacity[direct] += amount
                for (head_path, size), (tail_path, _) in pieces:
                    self.give(direct, without_loops(head_path + tail_path[1:]), size)
        return amount

    def take(self, arc: int, amount: int) -> list[tuple[Path, int]]:
        """Remove an amount from an arc's paths, whole paths first where one fits."""
        taken: list[tuple[Path, int]] = []
        paths = self.paths[arc]
        while amount:
            fitting = [i for i, (_, size) in enumerate(paths) if size >= amount]
            position = min(fitting, key=lambda i: paths[i][1]) if fitting else max(
                range(len(paths)), key=lambda i: paths[i][1]
            )  # fmt: skip
            path, size = paths[position]
            part = min(size, amount)
            taken.append((path, part))
            amount -= part
            if part == size:
                del paths[position]
            else:
                paths[position] = (path, size - part)
        return taken

    def give(self, arc: int, path: tuple[int, ...], amount: int) -> None:
        paths = self.paths[arc]
        for position, (known, size) in enumerate(paths):
            if known == path:
                paths[position] = (path, size + amount)
                return
        paths.append((path, amount))


def _align(
    one: list[tuple[Path, int]], two: list[tuple[Path, int]]
) -> tuple[list[tuple[Path, int]], list[tuple[Path, int]]]:
    """Cut two lists of equal total into pieces of pairwise equal amounts."""
    left: list[tuple[Path, int]] = []
    right: list[tuple[Path, int]] = []
    i = j = 0
    rest_one, rest_two = one[0][1], two[0][1]
    while True:
        part = min(rest_one, rest_two)
        left.append((one[i][0], part))
        right.append((two[j][0], part))
        rest_one, rest_two = rest_one - part, rest_two - part
        if not rest_one:
            i += 1
            if i == len(one):
                return left, right
            rest_one = one[i][1]
        if not rest_two:
            j += 1
            rest_two = two[j][1]


def remove_switches(
    graph: FlowGraph,
    capacity: IntArray,
    demand: IntArray,
    *,
    nodes: Mapping[int, str | None],
    is_reversed: bool = False,
    progress: Progress | None = None,
) -> LogicalArcs:
    """Split off every switch, those with the fewest links first; links between the same ranks stand together.

    Args:
        graph: the fabric.
        capacity: of each arc, balanced at every switch, such that every rank is served.
        demand: of each root.
        nodes: machine of each vertex, where known; decides which pairs come first.
        is_reversed: the graph is a fabric turned round; pairs are then taken the other way round, so that both
            phases of an all-reduce use the same logical links.
        progress: called with ``("switches", done, total)``.

    Raises:
        SynthesisError: a switch cannot be split off completely (it was not balanced).
    """
    splitter = _Splitter(graph, capacity, demand)
    rank_of = {v: r for r, v in enumerate(graph.ranks.tolist())}
    waiting = {v for v in range(graph.num_vertices) if v not in rank_of}
    total = len(waiting)
    while waiting:
        degree = {v: len(splitter.neighbours(v)[0]) + len(splitter.neighbours(v)[1]) for v in waiting}
        switch = min(waiting, key=lambda v: (degree[v], v))
        waiting.remove(switch)
        _split_off(splitter, switch, nodes, is_reversed=is_reversed)
        if progress is not None:
            progress("switches", total - len(waiting), total)
    hops = sorted((t, h, i) for i, (t, h) in enumerate(zip(splitter.tail, splitter.head, strict=True)))
    arcs = [i for t, h, i in hops if splitter.capacity[i] and t in rank_of and h in rank_of]
    return LogicalArcs.of({path: size for i in arcs for path, size in splitter.paths[i]}, rank_of)


def _split_off(splitter: _Splitter, switch: int, nodes: Mapping[int, str | None], *, is_reversed: bool) -> None:
    is_first = len(splitter.graph.ranks) in _STRIDED
    # A splitting that was blocked can be freed by a later one, so passes repeat while they change anything.
    while True:
        incoming, outgoing = splitter.neighbours(switch)
        if not incoming and not outgoing:
            return
        # With a single neighbour on one side, or a mere relay between two, no cut can fail: the switch itself may
        # change sides in any set that would. Loops u -> w -> u waste capacity and are always tested.
        is_safe = (
            len(incoming) == 1
            or len(outgoing) == 1
            or (len(incoming) == 2 and incoming == outgoing and _is_relay(splitter, switch, incoming))
        )
        groups = _groups(splitter, switch, sorted(set(incoming) | set(outgoing)), nodes)
        moved = 0
        if is_first:
            is_first = False
            for u, t, most in _strides(splitter, switch, groups, is_reversed=is_reversed):
                if (u, switch) in splitter.index and (switch, t) in splitter.index:
                    moved += splitter.split(u, switch, t, is_safe=is_safe, most=most)
        for u, t in _pairs(groups, is_reversed=is_reversed):
            if (u, switch) in splitter.index and (switch, t) in splitter.index:
                moved += splitter.split(u, switch, t, is_safe=is_safe and u != t)
        if not moved:
            raise SynthesisError(
                f"internal: switch vertex {switch} could not be split off; neighbours in {incoming}, out {outgoing}"
            )


def _is_relay(splitter: _Splitter, switch: int, pair: list[int]) -> bool:
    """A two-port switch whose capacity in from one side equals that out on the other."""
    a, b = pair
    size = {
        key: splitter.capacity[splitter.index[key]] for key in ((a, switch), (switch, b), (b, switch), (switch, a))
    }
    return size[a, switch] == size[switch, b] and size[b, switch] == size[switch, a]


def _groups(
    splitter: _Splitter, switch: int, neighbours: list[int], nodes: Mapping[int, str | None]
) -> list[list[int]]:
    """The switch's neighbours by machine; by what stays connected without the switch, where machines are unknown."""
    names = {nodes.get(v) for v in neighbours}
    by_name: dict[object, list[int]] = {}
    if None not in names:
        for v in neighbours:
            by_name.setdefault(nodes.get(v), []).append(v)
    else:
        around: dict[int, list[int]] = {}
        for i, c in enumerate(splitter.capacity):
            t, h = splitter.tail[i], splitter.head[i]
            if c and switch not in (t, h):
                around.setdefault(t, []).append(h)
                around.setdefault(h, []).append(t)
        place: dict[int, int] = {}
        for v in neighbours:
            if v not in place:
                stack = [v]
                place[v] = v
                while stack:
                    for other in around.get(stack.pop(), []):
                        if other not in place:
                            place[other] = v
                            stack.append(other)
            by_name.setdefault(place[v], []).append(v)
    if len(by_name) == 1:
        return [[v] for v in neighbours]
    return list(by_name.values())


def _strides(
    splitter: _Splitter, switch: int, groups: list[list[int]], *, is_reversed: bool
) -> list[tuple[int, int, int]]:
    """Neighbours 1, 2, 4, ... groups apart at equal positions, and what a binomial tree would use between them.

    Whole capacities to the next neighbour make rings, which on a large fabric are long.
    """
    pairs: list[tuple[int, int, int]] = []
    count = len(groups)
    uses = [0] * count
    for place in range(1, count):
        uses[place & -place] += 1
    for shift, share in enumerate(uses):
        for g, group in enumerate(groups if share else []):
            other = groups[(g + (-shift if is_reversed else shift)) % count]
            for u, t in zip(group, other, strict=False):
                ends = splitter.index.get((u, switch)), splitter.index.get((switch, t))
                if None not in ends:
                    width = min(splitter.capacity[arc] for arc in ends if arc is not None)
                    pairs.append((u, t, max(int(width >= count.bit_length()), width * share // (count - 1))))
    return pairs


def _pairs(groups: list[list[int]], *, is_reversed: bool) -> list[tuple[int, int]]:
    """All ordered pairs of neighbours, best first: next group at the same position, ..., loops last."""
    pairs: dict[tuple[int, int], None] = {}
    count = len(groups)
    for shift in range(1, count):
        for g, group in enumerate(groups):
            other = groups[(g + (-shift if is_reversed else shift)) % count]
            for i, u in enumerate(group):
                if i < len(other):
                    pairs[u, other[i]] = None
    everyone = [v for group in groups for v in group]
    for shift in range(1, len(everyone)):
        for i, u in enumerate(everyone):
            pairs[u, everyone[(i + (-shift if is_reversed else shift)) % len(everyone)]] = None
    for u in everyone:
        pairs[u, u] = None
    return list(pairs)


def trim_to_balance(graph: FlowGraph, capacity: IntArray, demand: IntArray) -> IntArray | None:
    """Take capacity away from unbalanced switches, arc by arc, while every rank stays served.

    Used where capacities had to be rounded down. Each step removes from one arc what a single test allows; an
    imbalance that moves to a neighbouring switch is treated there.

    Returns:
        Balanced capacities, or ``None`` where none were found this way.
    """
    trimmed = capacity.copy()
    ranks = set(graph.ranks.tolist())
    if graph.check(trimmed, demand)[0].any():
        return None
    stuck: set[int] = set()
    while True:
        excess = np.zeros(graph.num_vertices, dtype=np.int64)
        np.add.at(excess, graph.head, trimmed)
        np.subtract.at(excess, graph.tail, trimmed)
        uneven = [v for v in range(graph.num_vertices) if v not in ranks and excess[v]]
        if not uneven:
            return trimmed
        moved = 0
        for v in uneven:
            inward = excess[v] > 0
            far = graph.tail if inward else graph.head
            mine = np.flatnonzero((graph.head if inward else graph.tail) == v)
            # Arcs whose other end has too much of the same kind mend two switches at once; ranks do not mind.
            helpful = [int(a) for a in mine if far[a] in ranks or excess[far[a]] * excess[v] < 0]
            other = [int(a) for a in mine if int(a) not in helpful and int(a) not in stuck]
            for arc in sorted(helpful, key=lambda a: -int(trimmed[a])) + other:
                amount = min(int(trimmed[arc]), abs(int(excess[v])))
                if amount:
                    trimmed[arc] -= amount
                    back = min(int(graph.check(trimmed, demand)[0].max()), amount)
                    trimmed[arc] += back
                    moved += amount - back
                    excess[v] += (back - amount) if inward else (amount - back)
                    if arc in other:
                        stuck.add(arc)
                    if far[arc] not in ranks:
                        break
            if moved:
                break
        if not moved:
            return None
