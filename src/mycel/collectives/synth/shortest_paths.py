"""Forests of shortest paths, where ranks are joined directly: the least depth there is, without a search.

In a tree of shortest paths each rank hangs on any neighbour that is nearer to the root, whatever the others do. So
trees of all roots are a choice that each rank makes by itself: which of its links carries how much of which root's
share. That is one small transport problem a rank, roots against links, solved by augmenting paths; where each has a
solution, all together are a forest as deep as its roots are far from the farthest rank. Tori and hypercubes of any
size have one at their bound, whatever their ranks are called; no symmetry has to be found.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mycel.collectives.bound import Optimum
from mycel.collectives.maxflow import IntArray
from mycel.collectives.synth.array_forest import Forest
from mycel.collectives.synth.logical_arcs import LogicalArcs, path_lengths
from mycel.compiled import compiled
from mycel.topology.model import Topology

__all__ = ["grow_shortest"]

#: Most units a root for which trees are cut where any rank changes its link, and most numbers in the table of all.
_MOST_UNITS = 64
_LARGEST = 1 << 27


def grow_shortest(topology: Topology, best: Optimum, capacity: IntArray, demand: IntArray) -> Forest | None:
    """A forest of shortest paths within whole capacities; ``None`` where there is none, or the fabric has switches.

    Args:
        topology: the fabric.
        best: its solved bound.
        capacity: whole units of each arc of ``best.graph``.
        demand: whole units of each root.
    """
    graph, n = best.graph, topology.num_ranks
    if graph.num_vertices > n or demand.max() > _MOST_UNITS or n * len(graph.tail) > _LARGEST:
        return None
    rank_of = {v: r for r, v in enumerate(graph.ranks.tolist())}
    pairs = zip(graph.tail.tolist(), graph.head.tolist(), capacity.tolist(), strict=True)
    arcs = LogicalArcs.of({(t, h): size for t, h, size in pairs if size}, rank_of)
    lengths = path_lengths(topology, arcs.paths, is_reversed=best.is_reversed)
    order = np.argsort(arcs.head, kind="stable")
    start = np.searchsorted(arcs.head[order], np.arange(n + 1))
    distance = _distances(n, arcs.tail, arcs.head, lengths)
    units = _choose(distance, demand, arcs.tail, arcs.capacity, lengths, order, start)
    if not len(units):
        return None
    roots, multiplicities, trees = _cut(distance, demand, units, order, start)
    return Forest(
        topology=topology,
        is_reversed=best.is_reversed,
        weights=best.weights,
        arcs=arcs,
        roots=roots,
        multiplicities=multiplicities,
        trees=trees,
        order=1,
    )


@compiled
def _distances(num_ranks: int, tail: IntArray, head: IntArray, lengths: IntArray) -> IntArray:
    """From each rank to each other; negative where there is no way."""
    order = np.argsort(tail)
    start = np.searchsorted(tail[order], np.arange(num_ranks + 1))
    found = np.full((num_ranks, num_ranks), -1, dtype=np.int64)
    waits = np.zeros(num_ranks, dtype=np.bool_)
    queue = np.empty(num_ranks, dtype=np.int64)
    for root in range(num_ranks):
        row = found[root]
        row[root] = 0
        queue[0], first, count = root, 0, 1
        while count:  # a ring of those whose distance has become less
            v = queue[first]
            first, count = (first + 1) % num_ranks, count - 1
            waits[v] = False
            for place in range(start[v], start[v + 1]):
                a = order[place]
                far = row[v] + lengths[a]
                if row[head[a]] < 0 or far < row[head[a]]:
                    row[head[a]] = far
                    if not waits[head[a]]:
                        waits[head[a]] = True
                        queue[(first + count) % num_ranks] = head[a]
                        count += 1
    return found


@compiled
def _choose(
    distance: IntArray,
    demand: IntArray,
    tail: IntArray,
    capacity: IntArray,
    lengths: IntArray,
    order: IntArray,
    start: IntArray,
) -> IntArray:
    """Units of each root that enter each rank by each of its links, those that lead on from a nearer rank.

    Args:
        distance: of each rank from each root.
        demand: units of each root.
        tail, capacity, lengths: of the links.
        order: links by the rank that they enter.
        start: where those of each rank begin.

    Returns:
        ``units[link's place in order, root]``; no rows where some rank cannot be served in this way.
    """
    n = len(distance)
    units = np.zeros((len(order), n), dtype=np.int64)
    nothing = np.zeros((0, n), dtype=np.int64)
    for v in range(n):
        first, stop = start[v], start[v + 1]
        count = stop - first
        serves = np.zeros((count, n), dtype=np.bool_)
        choices = np.zeros(n, dtype=np.int64)
        left = np.empty(count, dtype=np.int64)
        for j in range(count):
            a = order[first + j]
            left[j] = capacity[a]
            for root in range(n):
                if root != v and demand[root] and distance[root, tail[a]] >= 0:
                    serves[j, root] = distance[root, tail[a]] + lengths[a] == distance[root, v]
                    choices[root] += serves[j, root]
        chosen = units[first:stop]
        # Those with few links to choose from first, whole ones on the link with most room left.
        for root in np.argsort(choices, kind="mergesort"):
            rest = 0 if root == v else demand[root]
            while rest > 0:
                widest = -1
                for j in range(count):
                    if serves[j, root] and left[j] > 0 and (widest < 0 or left[j] > left[widest]):
                        widest = j
                if widest < 0:
                    break
                part = min(rest, left[widest])
                chosen[widest, root] += part
                left[widest] -= part
                rest -= part
            while rest > 0:
                moved = _make_room(chosen, serves, left, root, rest)
                if not moved:
                    return nothing
                rest -= moved
    return units


@compiled
def _make_room(chosen: IntArray, serves: IntArray, left: IntArray, root: int, most: int) -> int:
    """Give a root some units on a full link, whose others move on, link by link, to one with room; how many."""
    count, n = chosen.shape
    before = np.full(count, -2, dtype=np.int64)
    mover = np.full(count, -1, dtype=np.int64)
    queue = np.empty(count, dtype=np.int64)
    last = 0
    for j in range(count):
        if serves[j, root]:
            before[j] = -1
            queue[last] = j
            last += 1
    first = 0
    while first < last:
        j = queue[first]
        first += 1
        if left[j] > 0:
            part = min(most, left[j])
            here = j
            while before[here] >= 0:
                part = min(part, chosen[before[here], mover[here]])
                here = before[here]
            left[j] -= part
            here = j
            while before[here] >= 0:
                chosen[here, mover[here]] += part
                chosen[before[here], mover[here]] -= part
                here = before[here]
            chosen[here, root] += part
            return int(part)
        for other in range(count):
            if before[other] != -2:
                continue
            for r in range(n):
                if chosen[j, r] > 0 and serves[other, r]:
                    before[other] = j
                    mover[other] = r
                    queue[last] = other
                    last += 1
                    break
    return 0


def _cut(
    distance: IntArray, demand: IntArray, units: IntArray, order: IntArray, start: IntArray
) -> tuple[IntArray, IntArray, npt.NDArray[np.int32]]:
    """Trees of each root: its units cut where any rank changes its link; roots, multiplicities and rows of arcs."""
    roots: list[int] = []
    multiplicities: list[int] = []
    rows: list[npt.NDArray[np.int32]] = []
    for root in np.flatnonzero(demand).tolist():
        total = int(demand[root])
        ranks = np.argsort(distance[root], kind="stable")[1:]  # in the order of growth
        reached = np.cumsum(units[:, root])
        before = np.append(0, reached)[start[:-1]]  # units of the ranks that stand before
        low = 0
        table = reached - np.repeat(before, np.diff(start))  # where the units of each link end, rank by rank
        cuts = np.unique(table[units[:, root] > 0])
        for high in cuts.tolist():
            # The first of a rank's links whose units end after this cut begins carries them.
            place = np.searchsorted(reached, before[ranks] + low, side="right")
            rows.append(order[place].astype(np.int32))
            roots.append(root)
            multiplicities.append(high - low)
            low = high
        assert low == total
    return np.array(roots, dtype=np.int64), np.array(multiplicities, dtype=np.int64), np.array(rows)
