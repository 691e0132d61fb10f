"""Which way packets go through an emulated cluster: default routes, and addresses that pin single paths.

Both are forests of *destination trees*: at every vertex of a tree there is one next hop, which is all that a kernel
routing table can say about one address. No privileges are needed here; ``cluster`` writes the tables.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from mycel.topology.model import Topology

__all__ = ["PinnedTree", "default_next_hops", "merge_paths", "switch_paths"]

#: Partial paths looked at for one pair of ranks before the search gives up on finding more.
_SEARCH_LIMIT = 20_000


@dataclass(slots=True, kw_only=True)
class PinnedTree:
    """One extra address of a rank, and how packets get there.

    Attributes:
        destination: vertex of the rank that owns the address.
        next_hop: from each vertex on the way to the vertex after it.
        paths: the paths this address pins, as vertices from the sending rank to ``destination``.
    """

    destination: int
    next_hop: dict[int, int] = field(default_factory=dict)
    paths: list[tuple[int, ...]] = field(default_factory=list)

    def accepts(self, path: Sequence[int]) -> bool:
        """Whether the path leaves every vertex it shares with this tree by the hop that the tree takes."""
        return all(self.next_hop.get(here, there) == there for here, there in pairwise(path))

    def add(self, path: tuple[int, ...]) -> None:
        """Pin one more path; only paths that ``accepts`` approves."""
        self.next_hop.update(pairwise(path))
        self.paths.append(path)


def default_next_hops(topology: Topology, destination: int) -> dict[int, int]:
    """Next hop towards a vertex from every vertex that reaches it: what ordinary routing would configure.

    Paths transit as few ranks as possible (machines are not routers, unless nothing else connects them); among
    those the widest; among those the one of least latency, then of fewest hops. Vertices are settled in that order,
    so that a next hop is always settled before and following the hops cannot loop.

    Args:
        topology: the fabric.
        destination: a vertex index.

    References:
        Z. Wang and J. Crowcroft, "Quality-of-Service Routing for Supporting Multimedia Applications", IEEE JSAC
        1996 (widest paths, shortest among them).
    """
    incoming: list[list[tuple[int, int, float]]] = [[] for _ in topology.vertices]
    for link in topology.links:
        incoming[link.dst].append((link.src, link.capacity, link.latency_s))
    widest = max(link.capacity for link in topology.links)
    hops: dict[int, int] = {}
    settled: set[int] = set()
    queue: list[tuple[int, int, float, int, int, int]] = [(0, -widest, 0.0, 0, destination, destination)]
    while queue:
        transits, negative_width, latency_s, length, vertex, towards = heapq.heappop(queue)
        if vertex in settled:
            continue
        settled.add(vertex)
        if vertex != destination:
            hops[vertex] = towards
        is_transit = vertex != destination and topology.vertices[vertex].kind == "rank"
        for other, capacity, delay_s in incoming[vertex]:
            if other not in settled:
                width = max(negative_width, -capacity)
                label = (transits + is_transit, width, latency_s + delay_s, length + 1)
                heapq.heappush(queue, (*label, other, vertex))
    return hops


def switch_paths(topology: Topology, src: int, dst: int, *, max_paths: int) -> list[tuple[int, ...]]:
    """Simple paths from one rank to another with nothing but switches between, shortest first.

    Args:
        topology: the fabric.
        src: vertex of the sending rank.
        dst: vertex of the receiving rank.
        max_paths: stop after so many.
    """
    outgoing: dict[int, list[int]] = {}
    incoming: dict[int, list[int]] = {}
    for link in topology.links:
        outgoing.setdefault(link.src, []).append(link.dst)
        incoming.setdefault(link.dst, []).append(link.src)
    remaining = _distances(topology, dst, incoming)
    found: list[tuple[int, ...]] = []
    if src not in remaining:
        return found
    queue: list[tuple[int, tuple[int, ...]]] = [(remaining[src], (src,))]
    looked_at = 0
    while queue and len(found) < max_paths and looked_at < _SEARCH_LIMIT:
        _, path = heapq.heappop(queue)
        looked_at += 1
        if path[-1] == dst:
            found.append(path)
            continue
        for other in outgoing.get(path[-1], ()):
            usable = other == dst or topology.vertices[other].kind == "switch"
            if usable and other in remaining and other not in path:
                heapq.heappush(queue, (len(path) + remaining[other], (*path, other)))
    return found


def merge_paths(paths: Iterable[tuple[int, ...]]) -> list[PinnedTree]:
    """Share pinned addresses: paths to one rank that never disagree about a next hop need only one.

    A star of eight then needs eight addresses instead of fifty-six. Two paths between the same two ranks always
    disagree somewhere, so they never share.
    """
    trees: dict[int, list[PinnedTree]] = {}
    for path in paths:
        candidates = trees.setdefault(path[-1], [])
        for tree in candidates:
            if tree.accepts(path):
                tree.add(path)
                break
        else:
            tree = PinnedTree(destination=path[-1])
            tree.add(path)
            candidates.append(tree)
    return [tree for group in trees.values() for tree in group]


def _distances(topology: Topology, dst: int, incoming: dict[int, list[int]]) -> dict[int, int]:
    """Hops to ``dst`` over switches only, from every vertex that has such a path."""
    distance = {dst: 0}
    frontier = [dst]
    while frontier:
        following = []
        for vertex in frontier:
            if vertex != dst and topology.vertices[vertex].kind == "rank":
                continue
            for other in incoming.get(vertex, ()):
                if other not in distance:
                    distance[other] = distance[vertex] + 1
                    following.append(other)
        frontier = following
    return distance
