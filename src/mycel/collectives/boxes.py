"""Boxes: groups of ranks that fast links join, alike in size, with ways from each place to the same place elsewhere.

Boxes are the fabric's nodes where it names them. Where it does not, they are what hangs together over all links but
the narrow ones, and what is narrow shows where widths jump most: a cable between leaf and spine may be narrower than
those of the ranks, but links inside boxes are many times as wide. Ranks of a box get places so that those of one
place reach each other without passing a rank: on rails, the rank at rail 3 of one box and that at rail 3 of another.
Where several ways between them are equally short and wide (spines, two interfaces a rank), all of these count.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mycel.collectives.cheapest_ways import find_leaves, search_ways
from mycel.collectives.maxflow import FlowGraph, IntArray
from mycel.topology.model import Topology

__all__ = ["Boxes", "find_boxes"]

_Path = tuple[int, ...]

#: Ways between two ranks that are told apart; of more, so many are taken, others for each pair.
MOST_WAYS = 8
#: Ways that are listed to choose these from.
_MOST_LISTED = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Boxes:
    """Boxes of a fabric.

    Attributes:
        ranks: of each box, by place; shape ``[boxes, places]``.
        box_of, place_of: of each rank, shape ``[ranks]``.
        paths: vertices of each way between two ranks of a box (one way), or of one place (up to ``MOST_WAYS``).
        first_path: number of the first of them from each rank to each, the others follow; -1 where there is none.
            Shape ``[ranks, ranks]``.
        num_ways: between two boxes, at each place; 1 from a box to itself. Shape ``[boxes, boxes]``.
    """

    ranks: IntArray
    box_of: IntArray
    place_of: IntArray
    paths: tuple[_Path, ...]
    first_path: IntArray
    num_ways: IntArray

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
    ranks = _in_places(ways.far, groups)
    place_of = np.empty(n, dtype=np.int64)
    place_of[ranks] = np.arange(ranks.shape[1])
    paths: list[_Path] = []
    first_path = np.full((n, n), -1, dtype=np.int64)
    num_ways = np.full((len(groups), len(groups)), MOST_WAYS, dtype=np.int64)
    np.fill_diagonal(num_ways, 1)
    for src in range(n):
        targets = np.flatnonzero((box_of == box_of[src]) | (place_of == place_of[src]))
        for dst in targets[targets != src].tolist():
            pair = box_of[src], box_of[dst]
            turn = int(sum(pair) + place_of[src])
            found = ways.paths(src, dst, most=MOST_WAYS if pair[0] != pair[1] else 1, turn=turn)
            if not found:
                return None
            first_path[src, dst] = len(paths)
            num_ways[pair] = min(num_ways[pair], len(found))
            paths += found
    return Boxes(
        ranks=ranks,
        box_of=box_of,
        place_of=place_of,
        paths=tuple(paths),
        first_path=first_path,
        num_ways=num_ways,
    )


def _named(topology: Topology) -> list[list[int]] | None:
    """Ranks by the node that they are on."""
    nodes = topology.ranks_by_node
    return _equal([list(ranks) for ranks in nodes.values()]) if None not in nodes else None


def _by_width(topology: Topology) -> list[list[int]] | None:
    """Ranks by what hangs together over links wider than some width: that after which widths jump most."""
    widths = sorted({link.capacity for link in topology.links})
    jumps = sorted(pairwise(widths), key=lambda ends: Fraction(ends[0], ends[1]))
    for width, _ in jumps:
        groups = _equal(_joined(topology, width))
        if groups is not None:
            return groups
    return None


def _joined(topology: Topology, width: int) -> list[list[int]]:
    """Ranks by what hangs together over links wider than this."""
    part = list(range(len(topology.vertices)))

    def first(vertex: int) -> int:
        while part[vertex] != vertex:
            part[vertex] = vertex = part[part[vertex]]
        return vertex

    for link in topology.links:
        if link.capacity > width:
            part[first(link.src)] = first(link.dst)
    groups: dict[int, list[int]] = {}
    for rank, vertex in enumerate(topology.ranks):
        groups.setdefault(first(vertex), []).append(rank)
    return list(groups.values())


def _equal(groups: list[list[int]]) -> list[list[int]] | None:
    sizes = {len(group) for group in groups}
    return groups if len(groups) > 1 and len(sizes) == 1 and sizes != {1} else None


def _in_places(far: npt.NDArray[np.float64], groups: list[list[int]]) -> IntArray:
    """Ranks of each box in such an order that those of one place are near to each other.

    A box is matched to the nearest one that has its order already: ranks behind one leaf come to the same place, and
    boxes behind other leaves follow, by whatever joins these.
    """
    from scipy.optimize import linear_sum_assignment

    members = np.array(groups, dtype=np.int64)
    apart = np.where(np.isfinite(far), far, 2 * far[np.isfinite(far)].max() + 1)
    between = apart[members[:, None, :, None], members[None, :, None, :]].min(axis=(2, 3))
    nearest = np.zeros(len(groups), dtype=np.int64)
    waiting = list(range(1, len(groups)))
    while waiting:
        box = min(waiting, key=lambda box: (between[nearest[box], box], box))
        rows, columns = linear_sum_assignment(apart[np.ix_(members[nearest[box]], members[box])])
        members[box] = members[box][columns[np.argsort(rows)]]
        waiting.remove(box)
        for other in waiting:
            if between[box, other] < between[nearest[other], other]:
                nearest[other] = box
    return members


class _Ways:
    """Ways between ranks that pass no other rank: of fewest links, of those the widest."""

    def __init__(self, topology: Topology) -> None:
        graph = FlowGraph.of(topology)
        n, count = topology.num_ranks, graph.num_vertices
        capacity = np.array([link.capacity for link in topology.links], dtype=np.float64)
        self._order = np.argsort(graph.tail, kind="stable")
        self._begin = np.searchsorted(graph.tail[self._order], np.arange(count + 1))
        self._is_leaf = find_leaves(graph.tail, graph.head, count)
        self._past_a_rank = 2.0 * (count + 1)
        weights = 1 + 0.5 * (1 - capacity / capacity.max()) / count
        weights += np.isin(graph.head, graph.ranks) * self._past_a_rank
        self._graph, self._weights = graph, weights
        self.far = np.empty((n, n))
        self._row, self._last, self._start = np.empty(count), np.empty(count, dtype=np.int64), -1
        self._before: dict[int, list[int]] = {}  # of each vertex, those before it on ways from the start
        for rank in range(n):
            self.far[rank] = self._search(rank)[graph.ranks]

    def _search(self, src: int) -> npt.NDArray[np.float64]:
        """How far all vertices are from a rank; kept until another one is asked for."""
        if src != self._start:
            graph = self._graph
            ends = self._begin, self._order, graph.head, self._is_leaf
            search_ways(*ends, self._weights, graph.ranks[src], self._row, self._last)
            self._start = src
            is_on_way = self._row[graph.tail] + self._weights == self._row[graph.head]
            self._before = {}
            for tail, head in zip(graph.tail[is_on_way].tolist(), graph.head[is_on_way].tolist(), strict=True):
                self._before.setdefault(head, []).append(tail)
        return self._row

    def paths(self, src: int, dst: int, *, most: int, turn: int) -> tuple[_Path, ...]:
        """Vertices of up to so many ways, other ones for each ``turn``; none where they pass a rank."""
        if self.far[src, dst] >= 2 * self._past_a_rank:
            return ()
        self._search(src)
        start = int(self._graph.ranks[src])
        whole: list[_Path] = []
        begun: list[_Path] = [(int(self._graph.ranks[dst]),)]
        while begun and len(whole) < (_MOST_LISTED if most > 1 else 1):
            path = begun.pop()
            if path[0] == start:
                whole.append(path)
                continue
            begun += [(vertex, *path) for vertex in self._before[path[0]]]
        count = min(most, len(whole))
        return tuple(whole[(turn + i * len(whole) // count) % len(whole)] for i in range(count))
