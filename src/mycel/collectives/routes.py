"""Routes: the best way from a rank to another, by latency, then by the ranks that it passes, then by its width."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from mycel.collectives.moves import find_moves
from mycel.errors import SynthesisError
from mycel.topology.model import Topology

__all__ = ["Route", "Routes", "shortest_routes", "way_through"]

#: Up to so many ranks, every rank's routes are searched for; beyond, those of ranks that are alike are one rank's.
_SEARCHED = 32


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Route:
    """A way from one rank to another; routes compare by latency, then ranks passed, then narrowness, then links.

    Attributes:
        latency_s: sum over its links.
        num_relays: ranks on the way that must receive and send on.
        narrowness: minus its smallest link capacity.
        vertices: of the topology, ends included.
    """

    latency_s: float
    num_relays: int
    narrowness: int
    num_links: int
    vertices: tuple[int, ...]


def shortest_routes(topology: Topology, src: int, *, relays: bool = True) -> dict[int, Route]:
    """Best route from rank ``src`` to every other rank: by latency, then fewest relays, then widest.

    Ranks relay only where latency says so; with latencies unknown (all zero), fewest relays come first. Without
    ``relays`` they never do, and ranks that can be reached in no other way are missing from the result.
    """
    best = _search(topology, topology.ranks[src], relays=relays)
    return {rank: best[vertex] for vertex, rank in topology.rank_of.items() if rank != src and vertex in best}


def way_through(
    topology: Topology, stops: Sequence[int], known: dict[int, dict[int, Route]] | None = None
) -> tuple[int, ...] | None:
    """The vertices of the best way from the first stop to the last by all between, or ``None`` if there is none.

    Args:
        topology: the fabric.
        stops: vertices, at least two; all between are switches. No rank is passed.
        known: routes of this fabric from vertices that were asked for before; others are put there.

    Examples:
        >>> from mycel.topology import load_topology
        >>> ring = load_topology("ring:ranks=4")
        >>> way_through(ring, [0, 1]), way_through(ring, [0, 2])  # rank 2 is reached through others only
        ((0, 1), None)
    """
    way, known = [stops[0]], {} if known is None else known
    for here, there in pairwise(stops):
        if here not in known:
            known[here] = _search(topology, here, relays=False)
        route = known[here].get(there)
        if route is None:
            return None
        way += route.vertices[1:]
    return tuple(way)


@lru_cache(maxsize=4)
def _outgoing(topology: Topology) -> dict[int, list[tuple[int, float, int]]]:
    """Of each vertex: where its links lead, their latency, and minus their capacity."""
    found: dict[int, list[tuple[int, float, int]]] = {}
    for link in topology.links:
        found.setdefault(link.src, []).append((link.dst, link.latency_s, -link.capacity))
    return found


def _search(topology: Topology, start: int, *, relays: bool) -> dict[int, Route]:
    """Best route from a vertex to every other one that it reaches."""
    outgoing = _outgoing(topology)
    widest = max(link.capacity for link in topology.links)
    # Fields of routes, in their order: tuples of them compare many times as fast.
    heap: list[tuple[float, int, int, int, tuple[int, ...]]] = [(0.0, 0, -widest, 0, (start,))]
    best: dict[int, Route] = {}
    while heap:
        latency_s, num_relays, narrowness, num_links, vertices = heapq.heappop(heap)
        here = vertices[-1]
        if here in best:
            continue
        best[here] = Route(
            latency_s=latency_s,
            num_relays=num_relays,
            narrowness=narrowness,
            num_links=num_links,
            vertices=vertices,
        )
        at_relay = here in topology.rank_of and here != start
        if at_relay and not relays:
            continue
        for far, more_s, narrow in outgoing.get(here, ()):
            if far not in best:
                longer = (
                    latency_s + more_s,
                    num_relays + at_relay,
                    max(narrowness, narrow),
                    num_links + 1,
                    (*vertices, far),
                )
                heapq.heappush(heap, longer)
    return best


class Routes:
    """Best routes between ranks, searched for when they are asked for; of ranks that are alike, for one of them.

    Args:
        topology: the fabric.
        relays: whether ranks pass on; without, some ranks may have no route to others.
    """

    def __init__(self, topology: Topology, *, relays: bool = True) -> None:
        self._topology = topology
        self._relays = relays
        self._moves = find_moves(topology) if topology.num_ranks > _SEARCHED else None
        self._found: dict[int, dict[int, Route]] = {}

    def __getitem__(self, src: int) -> dict[int, Route]:
        """Routes from a rank to all others that it reaches."""
        if src not in self._found:
            self._found[src] = shortest_routes(self._topology, src, relays=self._relays)
        return self._found[src]

    def alike(self, src: int) -> dict[int, Route]:
        """Routes as long, as narrow and over as many ranks as those from a rank to all others that it reaches.

        Where ranks are alike they are those of rank 0, and lead over other vertices.
        """
        if self._moves is None:
            return self[src]
        ranks = np.arange(self._topology.num_ranks)
        there = self._moves.between(np.full_like(ranks, src), ranks).tolist()
        first = self[0]
        return {dst: first[seen] for dst, seen in enumerate(there) if seen in first}

    def vertices(self, src: int, dst: int) -> tuple[int, ...]:
        """The way from a rank to another.

        Raises:
            KeyError: there is none without relays.
        """
        if self._moves is None:
            return self[src][dst].vertices
        # A move is known by where it takes rank 0: the one from src to dst takes it to where dst is, seen from src.
        route = self[0][int(self._moves.between(src, dst))]
        moved: tuple[int, ...] = tuple(self._moves.images(src, np.array(route.vertices)).tolist())
        return moved

    def direct(self, src: int, dst: int) -> tuple[int, ...]:
        """The way from a rank to another, if it passes no other rank.

        Raises:
            SynthesisError: it does.
        """
        path = self.vertices(src, dst)
        if not self._topology.rank_of.keys().isdisjoint(path[1:-1]):
            raise SynthesisError(f"{self._topology.name}: rank {src} reaches rank {dst} through others only")
        return path
