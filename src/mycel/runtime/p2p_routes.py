"""Ways of a message: the paths between two ranks over which its parts go, and how much of it goes over each.

A maximum flow from one rank to the other, over switches only, divided into paths: together they carry what any
number of paths could. Where no path avoids other ranks, ordinary routing finds the one way there is. What is left
beside these paths leads through other ranks, which have to pass the message on themselves: ``find_relays``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mycel.brief import brief
from mycel.collectives.maxflow import as_int64, build_rows, push_flow
from mycel.collectives.program import Channel
from mycel.compiled import interpreted_while_small
from mycel.topology.model import Topology

__all__ = ["LEAST_PART_BYTES", "Relay", "Route", "find_relays", "find_routes", "parts_of"]

#: Connections between two ranks, at most: those that carry least are left out.
_MOST_ROUTES = 8
#: Bytes below which a part of a message is not worth a path of its own.
LEAST_PART_BYTES = 1 << 16
#: Ways through other ranks, at most, and ranks on each.
_MOST_RELAYS, _MOST_STOPS = 4, 2
#: A way that carries less than this part of the first route is not worth the processors on it.
_LEAST_RELAYED = 4

Hop = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One path between two ranks.

    Attributes:
        channel: the ranks, and the vertices between them.
        share: units of capacity that the flow gives it.
    """

    channel: Channel
    share: int

    __repr__ = brief


def find_routes(topology: Topology, src: int, dst: int, address_of: Callable[[Channel], str]) -> tuple[Route, ...]:
    """Paths from one rank to another which together carry most; the quickest to answer comes first.

    Args:
        topology: the fabric.
        src, dst: ranks.
        address_of: at which address ``dst`` is reached over a path. Paths with the same one cannot be told apart by
            packets, and count as one.
    """
    ends = (topology.ranks[src], topology.ranks[dst])
    apart = set(topology.ranks) - set(ends)
    direct = {hop: n for hop, n in topology.capacity.items() if not apart & set(hop)}
    paths = _divide(_flow(topology, direct, ends), ends)
    if not paths:
        path = _shortest(topology.capacity, ends)
        paths = [(path, min(topology.capacity[hop] for hop in pairwise(path)))]
    paths.sort(key=lambda found: (sum(topology.latency_s[hop] for hop in pairwise(found[0])), len(found[0]), found))
    routes: dict[str, Route] = {}
    for path, share in paths:
        route = Route(channel=Channel(src=src, dst=dst, path=path), share=share)
        routes.setdefault(address_of(route.channel), route)
    first, *others = routes.values()
    others.sort(key=lambda route: -route.share)
    return (first, *others[: _MOST_ROUTES - 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Relay:
    """A way between two ranks through others, which pass on what comes.

    Attributes:
        channels: from rank to rank.
    """

    channels: tuple[Channel, ...]

    @property
    def stops(self) -> tuple[int, ...]:
        """Ranks after the first, the destination included."""
        return tuple(channel.dst for channel in self.channels)

    __repr__ = brief


def find_relays(topology: Topology, routes: tuple[Route, ...]) -> tuple[Relay, ...]:
    """Ways through other ranks that share no link with the routes between two ranks, or with each other.

    Args:
        topology: the fabric.
        routes: paths between the two, as ``find_routes`` gives them.

    Examples:
        >>> from mycel.topology.builders import torus
        >>> fabric = torus(dims=(2, 4))
        >>> [relay.stops for relay in find_relays(fabric, find_routes(fabric, 0, 1, str))]
        [(3, 2, 1), (4, 5, 1)]
    """
    left = dict(topology.capacity)
    for route in routes:
        for hop in pairwise(route.channel.path):
            left[hop] -= route.share
    first = routes[0]
    ends = (first.channel.path[0], first.channel.path[-1])
    rank_at = {vertex: rank for rank, vertex in enumerate(topology.ranks)}
    relays: list[Relay] = []
    while len(relays) < _MOST_RELAYS and (path := _shortest(left, ends)):
        units = min(left[hop] for hop in pairwise(path))
        for hop in pairwise(path):
            left[hop] -= units
        at = [place for place, vertex in enumerate(path) if vertex in rank_at]
        if 0 < len(at) - 2 <= _MOST_STOPS and units * _LEAST_RELAYED >= first.share:
            legs = [path[begin : end + 1] for begin, end in pairwise(at)]
            channels = [Channel(src=rank_at[leg[0]], dst=rank_at[leg[-1]], path=leg) for leg in legs]
            relays.append(Relay(channels=tuple(channels)))
    return tuple(relays)


def parts_of(num_bytes: int, routes: tuple[Route, ...]) -> list[tuple[int, int]]:
    """First byte and end of the part of a message that goes over each route: all are through at the same time.

    Routes whose part would be short get nothing, so a short message goes over the first alone.

    Examples:
        >>> wide, narrow = (Route(channel=Channel(src=0, dst=1, path=(0, 1)), share=n) for n in (3, 1))
        >>> parts_of(1 << 20, (wide, narrow))
        [(0, 786432), (786432, 1048576)]
        >>> parts_of(1 << 10, (wide, narrow))
        [(0, 1024), (1024, 1024)]
    """
    total = sum(route.share for route in routes)
    used = [number == 0 or num_bytes * r.share >= LEAST_PART_BYTES * total for number, r in enumerate(routes)]
    total = sum(route.share for route, is_used in zip(routes, used, strict=True) if is_used)
    parts, given, begin = [], 0, 0
    for route, is_used in zip(routes, used, strict=True):
        given += route.share if is_used else 0
        end = num_bytes * given // total
        parts.append((begin, end))
        begin = end
    return parts


def _flow(topology: Topology, capacity: dict[Hop, int], ends: Hop) -> dict[Hop, int]:
    """A maximum flow from the first to the last vertex, by hop."""
    if not capacity:
        return {}
    arcs = list(capacity)
    tail, head = (np.array([arc[end] for arc in arcs], dtype=np.int64) for end in (0, 1))
    num_vertices = len(topology.vertices)
    start, slot, reached = interpreted_while_small(build_rows, len(arcs))(num_vertices, tail, head)
    residual = np.zeros(2 * len(arcs), dtype=np.int64)
    residual[::2] = as_int64(list(capacity.values()))
    is_source = np.zeros(num_vertices, dtype=np.bool_)
    is_source[ends[0]] = True
    distance = np.empty(num_vertices, dtype=np.int64)
    work = np.empty((3, num_vertices + 1), dtype=np.int64)
    limit = int(residual.sum())
    push = interpreted_while_small(push_flow, len(arcs))
    push(start, slot, reached, residual, is_source, ends[1], limit, distance, work)
    return {arc: int(units) for arc, units in zip(arcs, residual[1::2], strict=True) if units}


def _divide(flow: dict[Hop, int], ends: Hop) -> list[tuple[tuple[int, ...], int]]:
    """A flow as paths, with the units that each carries."""
    found: list[tuple[tuple[int, ...], int]] = []
    while path := _shortest(flow, ends):
        units = min(flow[hop] for hop in pairwise(path))
        found.append((path, units))
        for hop in pairwise(path):
            flow[hop] -= units
    return found


def _shortest(capacity: dict[Hop, int], ends: Hop) -> tuple[int, ...]:
    """Vertices of a shortest path over hops with capacity; none: there is no path."""
    following: dict[int, list[int]] = {}
    for (tail, head), units in sorted(capacity.items()):
        if units > 0:
            following.setdefault(tail, []).append(head)
    before = {ends[0]: ends[0]}
    queue = deque([ends[0]])
    while queue and ends[1] not in before:
        vertex = queue.popleft()
        for other in following.get(vertex, ()):
            if other not in before:
                before[other] = vertex
                queue.append(other)
    if ends[1] not in before:
        return ()
    path = [ends[1]]
    while path[-1] != ends[0]:
        path.append(before[path[-1]])
    return tuple(reversed(path))
