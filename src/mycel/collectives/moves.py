"""Moves of a fabric onto itself that take any rank to any other: what is planned for one rank then holds for all.

Nodes that are alike can be numbered round, and so can the ranks of each. Such numberings are found from which rank is
on which node, carried over to the switches, and compared link by link with the fabric, so that nothing here has to be
trusted. A move is known by the rank to which it takes rank 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from mycel.collectives.columns import IntArray
from mycel.topology.model import Topology

__all__ = ["Moves", "find_moves"]

Numbers = int | Sequence[int] | IntArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Moves:
    """A group of moves, one for each rank: move ``r`` takes rank 0 to rank ``r``.

    Attributes:
        generators: of the group; each says where every vertex of the topology goes. They commute.
        orders: how often each is repeated until all is as it was.
        ranks: vertex of each rank.

    ``is_group_of`` says whether they are what is written here; nothing else may be relied on before.
    """

    generators: tuple[IntArray, ...]
    orders: tuple[int, ...]
    ranks: IntArray

    @cached_property
    def _powers(self) -> tuple[IntArray, ...]:
        """Of each generator its powers, shape ``[order, num_vertices]``."""
        tables = []
        for generator, order in zip(self.generators, self.orders, strict=True):
            rows = [np.arange(len(generator), dtype=np.int64)]
            for _ in range(1, order):
                rows.append(generator[rows[-1]])
            tables.append(np.array(rows))
        return tuple(tables)

    @cached_property
    def _rank_at(self) -> IntArray:
        """The rank to which each combination of powers takes rank 0, shape ``orders``."""
        vertices = np.full(self.orders, self.ranks[0], dtype=np.int64)
        for axis, table in enumerate(self._powers):
            shape = [-1 if axis == other else 1 for other in range(len(self.orders))]
            vertices = table[np.arange(len(table)).reshape(shape), vertices]
        rank_of = np.full(max(len(self._powers[0][0]), 1), -1, dtype=np.int64)
        rank_of[self.ranks] = np.arange(len(self.ranks))
        return rank_of[vertices]

    @cached_property
    def _digits(self) -> tuple[IntArray, ...]:
        """Of each rank, the powers that take rank 0 there; an array a generator."""
        digits = np.zeros((len(self.orders), len(self.ranks)), dtype=np.int64)
        digits[:, self._rank_at.reshape(-1)] = np.indices(self.orders).reshape(len(self.orders), -1)
        return tuple(digits)

    def apply(self, move: Numbers, rank: Numbers) -> IntArray:
        """Where moves take ranks."""
        return self._combined(move, rank, 1)

    def between(self, source: Numbers, target: Numbers) -> IntArray:
        """The moves that take ranks to others."""
        return self._combined(target, source, -1)

    def _combined(self, one: Numbers, other: Numbers, sign: int) -> IntArray:
        one, other = np.asarray(one), np.asarray(other)
        parts = zip(self._digits, self.orders, strict=True)
        at = tuple((digits[one] + sign * digits[other]) % order for digits, order in parts)
        found: IntArray = self._rank_at[at]
        return found

    def images(self, move: Numbers, vertices: Numbers) -> IntArray:
        """Where moves take vertices of the topology; both of one shape, or of shapes that broadcast."""
        at, move = np.asarray(vertices), np.asarray(move)
        for digits, table in zip(self._digits, self._powers, strict=True):
            at = table[digits[move], at]
        return at

    def is_group_of(self, topology: Topology) -> bool:
        """Whether each generator takes every link to an equal one and ranks to ranks, they commute, and exactly one
        combination of them takes rank 0 to each rank.
        """
        vertices = np.arange(len(topology.vertices))
        if not np.array_equal(self.ranks, np.array(topology.ranks)) or len(self.generators) != len(self.orders):
            return False
        for generator in self.generators:
            if not np.array_equal(np.sort(generator), vertices) or not _keeps_links(topology, generator):
                return False
        for one in self.generators:
            if any(not np.array_equal(one[other], other[one]) for other in self.generators):
                return False
        for generator, table in zip(self.generators, self._powers, strict=True):
            if not np.array_equal(generator[table[-1]], vertices):
                return False
        reached = np.sort(self._rank_at.reshape(-1))
        return np.array_equal(reached, np.arange(topology.num_ranks))


def _keeps_links(topology: Topology, image: IntArray) -> bool:
    """Whether ranks go to ranks, and links to links of the same capacity and latency."""
    is_rank = np.zeros(len(topology.vertices), dtype=np.bool_)
    is_rank[list(topology.ranks)] = True
    computes = np.array([vertex.computes for vertex in topology.vertices])
    if not np.array_equal(is_rank[image], is_rank) or not np.array_equal(computes[image], computes):
        return False
    src, dst, capacity, latency = _link_columns(topology)
    count = len(topology.vertices)
    here, there = src * count + dst, image[src] * count + image[dst]
    one, two = np.argsort(here), np.argsort(there)
    return (
        np.array_equal(here[one], there[two])
        and np.array_equal(capacity[one], capacity[two])
        and np.array_equal(latency[one], latency[two])
    )


@lru_cache(maxsize=8)
def _link_columns(topology: Topology) -> tuple[IntArray, IntArray, npt.NDArray[np.object_], npt.NDArray[np.float64]]:
    links = topology.links
    return (
        np.array([link.src for link in links], dtype=np.int64),
        np.array([link.dst for link in links], dtype=np.int64),
        np.array([link.capacity for link in links], dtype=object),
        np.array([link.latency_s for link in links], dtype=np.float64),
    )


# -- finding them ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=32)
def find_moves(topology: Topology) -> Moves | None:
    """Moves that number nodes round, and the ranks of each node; ``None`` where nodes are not alike.

    Found where every node has equally many ranks (all on one node, or all on none, will do), and where ranks of a
    node can change places in the order of their numbers.

    Examples:
        >>> from mycel.topology.builders import hosts
        >>> moves = find_moves(hosts(["a", "b", "a", "b"]))
        >>> moves.orders, moves.apply(1, [0, 1, 2, 3]).tolist()  # to the other node
        ((2, 2), [1, 0, 3, 2])
        >>> find_moves(hosts(["a", "b", "a"])) is None
        True
    """
    groups = list(topology.ranks_by_node.values())
    if None in topology.ranks_by_node and len(groups) > 1:
        return None
    if len({len(group) for group in groups}) > 1:
        return None
    places = np.array(groups, dtype=np.int64)  # [node, place]
    generators, orders = [], []
    for axis in (0, 1):
        if places.shape[axis] == 1:
            continue
        image = np.empty(topology.num_ranks, dtype=np.int64)
        image[places] = np.roll(places, -1, axis=axis)
        whole = _with_switches(topology, image)
        if whole is None:
            return None
        generators.append(whole)
        orders.append(places.shape[axis])
    moves = Moves(generators=tuple(generators), orders=tuple(orders), ranks=np.array(topology.ranks, dtype=np.int64))
    return moves if moves.is_group_of(topology) else None


def _with_switches(topology: Topology, image: IntArray) -> IntArray | None:
    """Where every vertex goes if ranks go as ``image`` says; ``None`` where switches find no place.

    A switch goes to one that has the images of its neighbours as neighbours; of several, equals keep their order.
    """
    whole = np.full(len(topology.vertices), -1, dtype=np.int64)
    ranks = np.array(topology.ranks, dtype=np.int64)
    whole[ranks] = ranks[image]
    for switches in _by_distance(topology):
        wanted: dict[frozenset[tuple[int, int, bool]], list[int]] = {}
        known = {v for v in range(len(whole)) if whole[v] >= 0}
        around = _neighbours(topology)
        for switch in switches:
            here = frozenset((v, capacity, out) for v, capacity, out in around[switch] if v in known)
            wanted.setdefault(here, []).append(switch)
        taken: dict[frozenset[tuple[int, int, bool]], Iterator[int]] = {k: iter(v) for k, v in wanted.items()}
        for switch in switches:
            there = frozenset((int(whole[v]), capacity, out) for v, capacity, out in around[switch] if v in known)
            target = next(taken.get(there, iter(())), None)
            if target is None:
                return None
            whole[switch] = target
    return whole if (whole >= 0).all() else None


def _by_distance(topology: Topology) -> list[list[int]]:
    """Switches by how many links they are from the nearest rank, nearest first."""
    around = _neighbours(topology)
    seen, layer, layers = set(topology.ranks), list(topology.ranks), []
    while layer:
        reached = sorted({v for here in layer for v, _, _ in around[here]} - seen)
        seen.update(reached)
        layer = reached
        layers.append(reached)
    return layers[:-1]


@lru_cache(maxsize=8)
def _neighbours(topology: Topology) -> list[list[tuple[int, int, bool]]]:
    """Of each vertex its neighbours, the capacity of each link, and whether that leads out."""
    around: list[list[tuple[int, int, bool]]] = [[] for _ in topology.vertices]
    for link in topology.links:
        around[link.src].append((link.dst, link.capacity, True))
        around[link.dst].append((link.src, link.capacity, False))
    return around
