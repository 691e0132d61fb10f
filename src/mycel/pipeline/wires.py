"""The path that a message between two ranks takes: the fewest hops, and of several such paths the widest."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from mycel.topology.model import Topology

__all__ = ["path_between"]


def path_between(topology: Topology, source: int, destination: int) -> tuple[int, ...]:
    """Vertices from one rank to another, both included.

    Other ranks are on the way only where there is no path over switches alone.

    Args:
        topology: the fabric; every rank can be reached.
        source, destination: two ranks.

    Examples:
        >>> from mycel.topology.builders import ring, star
        >>> path_between(star(num_ranks=3), 0, 2), path_between(ring(num_ranks=4), 0, 2)
        ((0, 3, 2), (0, 1, 2))
    """
    start, goal = topology.ranks[source], topology.ranks[destination]
    after: dict[int, list[int]] = {}
    for link in topology.links:
        after.setdefault(link.src, []).append(link.dst)
    path = _path(topology.capacity, after, start, goal, avoid=frozenset(topology.ranks))
    return path or _path(topology.capacity, after, start, goal, avoid=frozenset())


def _path(
    capacity: Mapping[tuple[int, int], int],
    after: Mapping[int, list[int]],
    start: int,
    goal: int,
    avoid: frozenset[int],
) -> tuple[int, ...]:
    # Fewer hops come first, then more capacity on the narrowest, then lower numbers, so that the choice is always
    # the same.
    heap: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, (start,))]
    done: set[int] = set()
    while heap:
        hops, width, path = heapq.heappop(heap)
        vertex = path[-1]
        if vertex == goal:
            return path
        if vertex in done:
            continue
        done.add(vertex)
        for then in after.get(vertex, ()):
            if then not in done and (then == goal or then not in avoid):
                narrowest = capacity[vertex, then] if hops == 0 else min(-width, capacity[vertex, then])
                heapq.heappush(heap, (hops + 1, -narrowest, (*path, then)))
    return ()
