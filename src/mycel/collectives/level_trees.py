"""Trees by levels: as many spanning trees as links hold, none deeper than its root is far from the farthest rank.

For fabrics without switches whose links are as wide as their opposites, where all_reduce adds up and spreads along
the same trees. Every rank's distances put the others on levels. A tree from there gives each rank one link to a rank
that comes before it: one level nearer, or on the same level with a smaller number. Whatever is chosen is a tree, and
no choice depends on another, so that what is left is an assignment: each rank of each tree to one of its links, no
link to more than it has units. It is a flow, found by moving choices from links that have too many, over links that
are full, to such as have room, along shortest ways. Where there is no way, a tree is given up.

Nothing here knows of symmetry, and failed cables make little difference: the ranks round them have fewer links to
choose from, and others choose around them.

References:
    J. Edmonds, R. M. Karp, "Theoretical improvements in algorithmic efficiency for network flow problems", Journal of
    the ACM 19(2), 1972 (shortest augmenting ways).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mycel.collectives.maxflow import IntArray
from mycel.compiled import compiled
from mycel.topology.model import Topology

__all__ = ["LevelTrees", "grow_levels"]

#: Trees times ranks, summed over all times that they are gone through: some seconds.
_MOST_WORK = 500_000_000
#: What is farther than all links.
_FAR = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LevelTrees:
    """Spanning trees, each rank on its level.

    Attributes:
        roots: rank at which each begins, shape ``[trees]``.
        entered_by: the link over which each tree enters each rank, -1 at its root; shape ``[trees, ranks]``.
        levels: how far each rank is from the root, shape ``[trees, ranks]``.
        loads: trees that use each link one way or the other, of each link of the fabric.
    """

    roots: IntArray
    entered_by: IntArray
    levels: IntArray
    loads: IntArray


def grow_levels(topology: Topology, units: IntArray, *, wanted: int, least: int) -> LevelTrees | None:
    """As many trees as wanted, or nearly; ``None`` where fewer than the least are found, or there are switches.

    Args:
        topology: a fabric whose links are as wide as their opposites.
        units: trees that each link may hold both ways together, the same as its opposite; shape ``[links]``.
        wanted: trees.
        least: fewest trees that are enough.
    """
    n = topology.num_ranks
    if topology.switches or len(set(topology.latency_s.values())) > 1 or n < 2:
        return None
    near, way, edge_of = _neighbours(topology)
    room = np.zeros(int(edge_of.max()) + 1, dtype=np.int64)
    room[edge_of] = units
    edge = np.where(way >= 0, edge_of[way], -1)
    near = np.where((way >= 0) & (room[edge] > 0), near, -1)
    distance = _levels(near)
    if distance.min() < 0:
        return None
    farthest = distance.max(axis=1)
    for starts in dict.fromkeys((tuple(np.flatnonzero(farthest == farthest.min()).tolist()), tuple(range(n)))):
        roots = _spread(np.array(starts, dtype=np.int64), wanted)
        chosen, count = _choose(near, edge, distance, roots, room, least)
        if count >= least:
            kept = roots[:count]
            entered_by = np.take_along_axis(
                np.broadcast_to(way[None], (count, *way.shape)), np.maximum(chosen[:count], 0)[..., None], axis=2
            )[..., 0]
            entered_by = np.where(chosen[:count] >= 0, entered_by, -1)
            loads = np.bincount(edge_of[entered_by[entered_by >= 0]], minlength=len(room))
            return LevelTrees(roots=kept, entered_by=entered_by, levels=distance[kept], loads=loads[edge_of])
    return None


def _neighbours(topology: Topology) -> tuple[IntArray, IntArray, IntArray]:
    """Of each rank, its neighbours and the links from them, -1 where it has fewer; of each link, its cable."""
    rank_of = topology.rank_of
    edges: dict[tuple[int, int], int] = {}
    into: list[list[tuple[int, int]]] = [[] for _ in range(topology.num_ranks)]
    edge_of = []
    for number, link in enumerate(topology.links):
        edge_of.append(edges.setdefault((min(link.src, link.dst), max(link.src, link.dst)), len(edges)))
        into[rank_of[link.dst]].append((rank_of[link.src], number))
    width = max(map(len, into))
    near, way = (np.full((len(into), width), -1, dtype=np.int64) for _ in range(2))
    for rank, links in enumerate(into):
        for place, (other, number) in enumerate(sorted(links)):
            near[rank, place], way[rank, place] = other, number
    return near, way, np.array(edge_of, dtype=np.int64)


def _spread(starts: IntArray, wanted: int) -> IntArray:
    """Roots of so many trees: each start as often as the others, or every so many one."""
    count = len(starts)
    place = np.arange(wanted, dtype=np.int64)
    found: IntArray = starts[place % count if wanted > count else place * count // wanted]
    return found


def _choose(
    near: IntArray, edge: IntArray, distance: IntArray, roots: IntArray, room: IntArray, least: int
) -> tuple[IntArray, int]:
    """Of each tree and rank, the place of its link among its neighbours', -1 at roots; and how many trees fit."""
    load = np.zeros(len(room), dtype=np.int64)
    chosen = _begin(near, edge, distance, roots, room, load)
    count, left = len(roots), _MOST_WORK
    while count >= least and left > 0:
        over, passes = _move(near, edge, distance, roots[:count], room, load, chosen, left // chosen[:count].size)
        if not over:
            return chosen, count
        left -= max(passes, 1) * chosen[:count].size
        # Each tree has a link fewer than ranks: so many at least are too many.
        for _ in range(-(-over // (len(near) - 1))):
            count -= 1
            mine = chosen[count]
            ranks = np.flatnonzero(mine >= 0)
            np.subtract.at(load, edge[ranks, mine[ranks]], 1)
    return chosen, 0


@compiled
def _levels(near: IntArray) -> IntArray:
    """How far each rank is from each, -1 where there is no way; shape ``[ranks, ranks]``."""
    n = len(near)
    far = np.full((n, n), -1, dtype=np.int64)
    queue = np.empty(n, dtype=np.int64)
    for root in range(n):
        far[root, root] = 0
        queue[0] = root
        first, last = 0, 1
        while first < last:
            rank = queue[first]
            first += 1
            for i in range(near.shape[1]):
                other = near[rank, i]
                if other >= 0 and far[root, other] < 0:
                    far[root, other] = far[root, rank] + 1
                    queue[last] = other
                    last += 1
    return far


@compiled
def _begin(
    near: IntArray, edge: IntArray, distance: IntArray, roots: IntArray, room: IntArray, load: IntArray
) -> IntArray:
    """Each rank of each tree takes the link that is least full."""
    chosen = np.full((len(roots), len(near)), -1, dtype=np.int64)
    for t in range(len(roots)):
        far = distance[roots[t]]
        for v in range(len(near)):
            for i in range(near.shape[1]):
                u = near[v, i]
                if u >= 0 and (far[u] < far[v] or (far[u] == far[v] and u < v)):
                    best = chosen[t, v]
                    # Loads over rooms, compared as products.
                    if best < 0 or load[edge[v, i]] * room[edge[v, best]] < load[edge[v, best]] * room[edge[v, i]]:
                        chosen[t, v] = i
            if chosen[t, v] >= 0:
                load[edge[v, chosen[t, v]]] += 1
    return chosen


@compiled
def _move(
    near: IntArray,
    edge: IntArray,
    distance: IntArray,
    roots: IntArray,
    room: IntArray,
    load: IntArray,
    chosen: IntArray,
    most: int,
) -> tuple[int, int]:
    """Moves choices until no link has too many, or none can be moved; how many are too many, and passes over all."""
    far = np.empty(len(room), dtype=np.int64)
    passes, moves = 0, 1
    while True:
        over = 0
        for e in range(len(room)):
            over += max(0, load[e] - room[e])
            far[e] = 0 if load[e] < room[e] else _FAR
        if over == 0 or moves == 0 or passes >= most:
            return over, passes
        # How many moves each link is from one that has room.
        level = 0
        is_more = True
        while is_more:
            is_more = False
            for t in range(len(roots)):
                there = distance[roots[t]]
                for v in range(len(near)):
                    if chosen[t, v] < 0 or far[edge[v, chosen[t, v]]] <= level:
                        continue
                    for i in range(near.shape[1]):
                        u = near[v, i]
                        if u < 0 or far[edge[v, i]] != level:
                            continue
                        if there[u] < there[v] or (there[u] == there[v] and u < v):
                            far[edge[v, chosen[t, v]]] = level + 1
                            is_more = True
                            break
            passes += 1
            level += is_more
        moves = 0
        for step in range(level, 0, -1):
            passes += 1
            for t in range(len(roots)):
                there = distance[roots[t]]
                for v in range(len(near)):
                    if chosen[t, v] < 0:
                        continue
                    now = edge[v, chosen[t, v]]
                    if far[now] != step or load[now] <= room[now]:
                        continue
                    for i in range(near.shape[1]):
                        u = near[v, i]
                        if (
                            u < 0
                            or far[edge[v, i]] != step - 1
                            or (step == 1 and load[edge[v, i]] >= room[edge[v, i]])
                        ):
                            continue
                        if there[u] < there[v] or (there[u] == there[v] and u < v):
                            chosen[t, v] = i
                            load[edge[v, i]] += 1
                            load[now] -= 1
                            moves += 1
                            break
