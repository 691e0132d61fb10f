"""One tree along the links, through switches: breadth first, entering sets of vertices as often as they can bear.

First it goes once into every set that trees had better enter once (``mycel.collectives.clusters``) or must not enter
twice; then on inside of those; and then wherever there is room.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mycel.collectives.maxflow import BoolArray, IntArray
from mycel.compiled import compiled

__all__ = ["LinkTree", "grow_tree"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinkTree:
    """A spanning out-tree whose edges are paths.

    Attributes:
        root: a rank.
        multiplicity: units of the root's share that use it.
        links: arcs of all paths one after the other, in the order of growth.
        stops: where each path ends among them; shape ``[num_ranks - 1]``.
        depth: of the deepest rank, in paths.
        is_whole: it spans.
    """

    root: int
    multiplicity: int
    links: IntArray
    stops: IntArray
    depth: int
    is_whole: bool

    def first(self, count: int) -> LinkTree:
        """Its beginning: so many paths."""
        return replace(
            self, is_whole=False, stops=self.stops[:count], links=self.links[: self.stops[count - 1] if count else 0]
        )


@compiled
def grow_tree(
    is_rank: BoolArray,
    root: int,
    num_ranks: int,
    kept_links: IntArray,
    kept_stops: IntArray,
    start: IntArray,
    order: IntArray,
    tail: IntArray,
    head: IntArray,
    left: IntArray,
    multiplicity: int,
    sets: BoolArray,
    entry_start: IntArray,
    entry_sets: IntArray,
    budget: IntArray,
    num_soft: int,
    num_first: int,
) -> tuple[int, IntArray, IntArray]:
    num_vertices, num_sets = len(is_rank), len(sets)
    need = np.zeros(num_sets, dtype=np.int64)
    for c in range(num_sets):
        need[c] = 0 if sets[c, root] else 1
    spent = np.zeros(num_sets, dtype=np.int64)
    cost = np.zeros(num_sets, dtype=np.int64)
    depth = np.full(num_vertices, -1, dtype=np.int64)
    depth[root] = 0
    members = np.empty(num_ranks, dtype=np.int64)
    members[0] = root
    size = 1
    stops = np.empty(num_ranks - 1, dtype=np.int64)
    links = np.empty(4 * num_ranks + len(kept_links), dtype=np.int64)
    used = 0
    queue = np.empty(num_vertices, dtype=np.int64)
    parent = np.empty(num_vertices, dtype=np.int64)
    seen = np.zeros(num_vertices, dtype=np.int64)
    stamp = 0
    trail = np.empty(num_vertices, dtype=np.int64)
    deepest = 0
    for stop in kept_stops:
        x = tail[kept_links[used]]
        y = head[kept_links[stop - 1]]
        while used < stop:
            a = kept_links[used]
            left[a] -= multiplicity
            links[used] = a
            used += 1
            for e in range(entry_start[a], entry_start[a + 1]):
                spent[entry_sets[e]] += 1
        for c in range(num_sets):
            if sets[c, y]:
                need[c] = 0
        depth[y] = depth[x] + 1
        deepest = max(deepest, depth[y])
        stops[size - 1] = used
        members[size] = y
        size += 1
    # First into every set that is to be entered once, then on inside of those, then wherever there is room.
    for phase in range(0 if num_first > 0 else 2, 3):
        level = 0
        while size < num_ranks and level <= deepest:
            grew = True
            while grew and size < num_ranks:
                grew = False
                stamp += 1
                last = 0
                for i in range(size):
                    if depth[members[i]] == level:
                        queue[last] = members[i]
                        seen[members[i]] = stamp
                        last += 1
                first = 0
                while first < last:
                    v = queue[first]
                    first += 1
                    for place in range(start[v], start[v + 1]):
                        a = order[place]
                        y = head[a]
                        if left[a] < multiplicity or seen[y] == stamp:
                            continue
                        if is_rank[y] and depth[y] >= 0:
                            continue
                        allowed = True
                        for e in range(entry_start[a], entry_start[a + 1]):
                            c = entry_sets[e]
                            allowed = allowed and spent[c] < (
                                min(budget[c], 1) if phase < 2 and c < num_soft else budget[c]
                            )
                        if not allowed:
                            continue
                        if not is_rank[y]:
                            seen[y] = stamp
                            parent[y] = a
                            queue[last] = y
                            last += 1
                            continue
                        # The way back to the member that it comes from, and what it enters.
                        length = 1
                        trail[0] = a
                        x = tail[a]
                        while not is_rank[x]:
                            trail[length] = parent[x]
                            length += 1
                            x = tail[parent[x]]
                        is_first = phase > 0
                        for i in range(length):
                            allowed = allowed and left[trail[i]] >= multiplicity
                            for e in range(entry_start[trail[i]], entry_start[trail[i] + 1]):
                                c = entry_sets[e]
                                cost[c] += 1
                                is_first = is_first or (c < num_first and need[c] > 0 and sets[c, y])
                        for i in range(length):
                            for e in range(entry_start[trail[i]], entry_start[trail[i] + 1]):
                                c = entry_sets[e]
                                fresh = need[c] if sets[c, y] else 0
                                most = min(budget[c], 1) if phase < 2 and c < num_soft else budget[c]
                                allowed = allowed and spent[c] + cost[c] + need[c] - fresh <= most
                        for i in range(length):
                            for e in range(entry_start[trail[i]], entry_start[trail[i] + 1]):
                                c = entry_sets[e]
                                if allowed and is_first:
                                    spent[c] += cost[c]
                                    if sets[c, y]:
                                        need[c] = 0
                                cost[c] = 0
                        if not allowed or not is_first:
                            continue
                        if used + length > len(links):
                            more = np.empty(2 * len(links) + length, dtype=np.int64)
                            more[:used] = links[:used]
                            links = more
                        for i in range(length - 1, -1, -1):
                            left[trail[i]] -= multiplicity
                            links[used] = trail[i]
                            used += 1
                        stops[size - 1] = used
                        depth[y] = level + 1
                        deepest = max(deepest, level + 1)
                        seen[y] = stamp
                        members[size] = y
                        size += 1
                        grew = True
            level += 1
    return deepest, links[:used], stops[: size - 1]
