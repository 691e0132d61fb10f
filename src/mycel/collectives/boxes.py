"""Boxes: groups of ranks that fast links join, alike in size, with ways from each place to the same place elsewhere.

Boxes are the fabric's nodes where it names them. Where it does not, they are what hangs together over all links but
the narrowest ones. Ranks of a box get places so that those of one place reach each other without passing a rank: on
rails, the rank at rail 3 of one box and that at rail 3 of another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mycel.collectives.cheapest_ways import search_ways
from mycel.collectives.maxflow import FlowGraph, IntArray
from mycel.topology.model import Topology

__all__ = ["Boxes", "find_boxes"]

_Path = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Boxes:
    """Boxes of a fabric.

    Attributes:
        ranks: of each box, by place; shape ``[boxes, places]``.
        box_of, place_of: of each rank, shape ``[ranks]``.
        width: least capacity on the ways between boxes.
        paths: vertices of the way between two ranks of a box, or of one place, by those ranks.
    """

    ranks: IntArray
    box_of: IntArray
    place_of: IntArray
    width: int
    paths: dict[tuple[int, int], _Path]

    @property
    def num_places(self) -> int:
        """Ranks of a box."""
        return int(self.ranks.shape[1])


@lru_cache(maxsize=8)
def find_boxes(topology: Topology) -> Boxes | None:
    """The boxes of a fabric; ``None`` where there are none, or some ranks of a place do not reach each other."""
    groups = _named(topology) or _by_width(topology)
    if groups is None:
        return None
    ways = _Ways(topology)
    n = topology.num_ranks
    box_of = np.empty(n, dtype=np.int64)
    for number, group in enumerate(groups):
        box_of[group] = number
    rails = _rails(ways.far, box_of)
    ranks = np.array([sorted(group, key=lambda rank: (rails[rank], rank)) for group in groups], dtype=np.int64)
    place_of = np.empty(n, dtype=np.int64)
    place_of[ranks] = np.arange(ranks.shape[1])
    pairs = [
        (a, b)
        for a in range(n)
        for b in range(n)
        if a != b and (box_of[a] == box_of[b] or place_of[a] == place_of[b])
    ]
    paths = {pair: path for pair in pairs if (path := ways.path(*pair)) is not None}
    if len(paths) < len(pairs):
        return None
    capacity = topology.capacity
    width = min(
        min(capacity[hop] for hop in pairwise(path)) for (a, b), path in paths.items() if box_of[a] != box_of[b]
    )
    return Boxes(ranks=ranks, box_of=box_of, place_of=place_of, width=width, paths=paths)


def _named(topology: Topology) -> list[list[int]] | None:
    """Ranks by the node that they are on."""
    nodes = topology.ranks_by_node
    return _equal([list(ranks) for ranks in nodes.values()]) if None not in nodes else None


def _by_width(topology: Topology) -> list[list[int]] | None:
    """Ranks by what hangs together over links wider than some width, the least that parts them."""
    for width in sorted({link.capacity for link in topology.links})[:-1]:
        part = list(range(len(topology.vertices)))

        def first(vertex: int, part: list[int] = part) -> int:
            while part[vertex] != vertex:
                part[vertex] = vertex = part[part[vertex]]
            return vertex

        for link in topology.links:
            if link.capacity > width:
                part[first(link.src)] = first(link.dst)
        groups: dict[int, list[int]] = {}
        for rank, vertex in enumerate(topology.ranks):
            groups.setdefault(first(vertex), []).append(rank)
        if len(groups) > 1:
            return _equal(list(groups.values()))
    return None


def _equal(groups: list[list[int]]) -> list[list[int]] | None:
    sizes = {len(group) for group in groups}
    return groups if len(groups) > 1 and len(sizes) == 1 and sizes != {1} else None


def _rails(far: npt.NDArray[np.float64], box_of: IntArray) -> IntArray:
    """Numbers of ranks such that those have the same that are nearest to each other across boxes."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    apart = np.where(box_of[:, None] == box_of, np.inf, far)
    near = csr_array(apart <= apart.min(axis=1)[:, None])
    rails: IntArray = connected_components(near, directed=False)[1].astype(np.int64)
    return rails


class _Ways:
    """Ways between ranks that pass no other rank: of fewest links, of those the widest."""

    def __init__(self, topology: Topology) -> None:
        graph = FlowGraph.of(topology)
        n, count = topology.num_ranks, graph.num_vertices
        capacity = np.array([link.capacity for link in topology.links], dtype=np.float64)
        order = np.argsort(graph.tail, kind="stable")
        begin = np.searchsorted(graph.tail[order], np.arange(count + 1))
        self._past_a_rank = 2.0 * (count + 1)
        weights = 1 + 0.5 * (1 - capacity / capacity.max()) / count
        weights += np.isin(graph.head, graph.ranks) * self._past_a_rank
        self._graph, self._last = graph, np.empty((n, count), dtype=np.int64)
        self.far = np.empty((n, n))
        row = np.empty(count)
        for rank, vertex in enumerate(graph.ranks.tolist()):
            search_ways(begin, order, graph.head, weights, vertex, row, self._last[rank])
            self.far[rank] = row[graph.ranks]

    def path(self, src: int, dst: int) -> _Path | None:
        """Its vertices, or ``None`` where it passes a rank."""
        if self.far[src, dst] >= 2 * self._past_a_rank:
            return None
        graph, found = self._graph, [int(self._graph.ranks[dst])]
        while found[-1] != graph.ranks[src]:
            found.append(int(graph.tail[self._last[src, found[-1]]]))
        return tuple(reversed(found))
