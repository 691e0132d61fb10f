"""Nodes: shallow trees by construction, for fabrics whose nodes, and the ranks of each, are alike.

Rank (0, 0) reaches the ranks of its own place on the other nodes by a binomial tree of nodes, and each of these the
other ranks of its node. The other ranks' trees are the same, moved (``mycel.collectives.moves``): so a node that
sends to many in one tree sends to few in others, and all links of a kind carry equally much. In steps of log N
instead of N that meets the bound wherever what leaves and enters a node, or a rank, is what binds; which is compared
exactly, by the loads of the links against two cuts. Elsewhere there is no such schedule, and ``forest`` searches for
trees.

One rank's trees are all that is made: planning takes time in proportion to the ranks, not to their square.

References:
    R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", Int. J. High
    Performance Computing Applications 19(1), 2005 (binomial trees). P. Sanders, J. Speck, J. L. Träff, "Two-tree
    algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 35(12), 2009 (two trees of which
    each vertex is a leaf in one).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from mycel.collectives.columns import Columns, Transfer
from mycel.collectives.moves import Moves, find_moves
from mycel.collectives.orbit import Orbit
from mycel.collectives.ordering import in_level_order
from mycel.collectives.routes import Routes
from mycel.collectives.schedule import Chunk, Schedule
from mycel.collectives.spec import Collective
from mycel.errors import SynthesisError
from mycel.topology.model import Topology

__all__ = ["NODES_FROM", "exchange", "synthesize"]

#: Below so many ranks, trees are searched for: there the search is quick, and its trees are good for all fabrics.
NODES_FROM = 33
#: Up to so many ranks a node, one sends to all others; where there are more, a binomial tree asks less of it.
_STAR = 8

Edge = tuple[int, int]


def synthesize(topology: Topology, collective: Collective) -> Schedule | None:
    """A schedule of few steps whose ``algbw`` is the bound's, or ``None`` where there is none of this kind.

    Args:
        topology: the fabric.
        collective: what to move; all_gather, reduce_scatter, all_reduce, broadcast or reduce, in equal blocks.
    """
    moves = find_moves(topology)
    if moves is None or collective.weights is not None or len(topology.compute_vertices) > topology.num_ranks:
        return None
    nodes = [list(ranks) for ranks in topology.ranks_by_node.values()]
    routes = Routes(topology)
    try:
        if collective.root is not None:
            schedule = _from_root(topology, collective, nodes, routes)
        else:
            up, down = _directions(collective)
            tree = [(nodes[a][p], nodes[b][q]) for (a, p), (b, q) in _hierarchical(len(nodes), len(nodes[0]))]
            schedule = _of_rank_0(topology, collective, moves, _strand(0, tree, routes, up=up, down=down))
    except SynthesisError:  # ranks that reach each other through others only
        return None
    return schedule if schedule.algbw == _limit(topology, collective, nodes) else None


def exchange(topology: Topology, collective: Collective, method: str, routes: Routes) -> Schedule | None:
    """Every rank's block straight to, or from, each other rank, all at once; ``None`` where ranks are not alike.

    Args:
        topology: the fabric.
        collective: all_gather, reduce_scatter or all_to_all, in equal blocks.
        method: name to put on it.
        routes: between the ranks.
    """
    moves = find_moves(topology)
    if moves is None or collective.weights is not None or topology.num_ranks < NODES_FROM:
        return None
    own = []
    try:
        for other in range(1, topology.num_ranks):
            src, dst = (other, 0) if collective.reduces else (0, other)
            chunk = other if collective.name == "all_to_all" else 0
            path = routes.direct(src, dst)
            own.append(Transfer(chunk=chunk, src=src, dst=dst, reduce=collective.reduces, path=path))
    except SynthesisError:
        return None
    return _of_rank_0(topology, collective, moves, own, method=method)


def _directions(collective: Collective) -> tuple[bool, bool]:
    """Whether data are added up along the trees, and whether they are spread."""
    return collective.reduces, collective.name not in ("reduce_scatter", "reduce")


def _of_rank_0(
    topology: Topology, collective: Collective, moves: Moves, own: Sequence[Transfer], *, method: str = "forest"
) -> Schedule:
    turns = collective.name == "all_to_all"
    own = in_level_order(own, lambda t: ())
    stops = np.arange(1, topology.num_ranks + 1 if turns else 2, dtype=np.int64)
    orbit = Orbit(moves=moves, columns=Columns.of(own), stops=stops, turns=turns)
    return Schedule.of_orbit(collective=collective, topology=topology, method=method, orbit=orbit)


def _hierarchical(num_nodes: int, per_node: int) -> list[tuple[Edge, Edge]]:
    """Edges of a tree from place 0 of node 0, parents first, between (node, place)."""
    edges = [((parent, 0), (child, 0)) for parent, child in _binomial(num_nodes)]
    inside = [(0, place) for place in range(1, per_node)] if per_node <= _STAR else _binomial(per_node)
    return edges + [((node, p), (node, q)) for p, q in inside for node in range(num_nodes)]


def _binomial(count: int) -> list[Edge]:
    """Edges of a binomial tree from 0, parents first, and of a parent's the one to the largest part first."""
    edges = [(child & (child - 1), child) for child in range(1, count)]
    return sorted(edges, key=lambda edge: (edge[1].bit_count(), -(edge[1] & -edge[1]), edge[1]))


def _strand(
    chunk: int, tree: Sequence[Edge], routes: Routes, *, up: bool, down: bool, first: int = 0
) -> list[Transfer]:
    """A chunk added up along a tree, and spread along it; ``first`` is the number of its first transfer."""
    transfers: list[Transfer] = []
    into: dict[int, list[int]] = {}
    ways = [(True, dst, src) for src, dst in reversed(tree)] if up else []
    ways += [(False, src, dst) for src, dst in tree] if down else []
    for reduce, src, dst in ways:
        number, after = first + len(transfers), tuple(into.get(src, ()))
        path = routes.direct(src, dst)
        transfers.append(Transfer(chunk=chunk, src=src, dst=dst, reduce=reduce, path=path, after=after))
        into[dst] = [*into.get(dst, ()), number] if reduce else [number]
    return transfers


# -- one root ---------------------------------------------------------------------------------------------------


def _from_root(topology: Topology, collective: Collective, nodes: list[list[int]], routes: Routes) -> Schedule:
    """The array in parts, each through a node's rank of another place, half of them along either of two trees.

    A node is inner in one of the trees at most, so that what it passes on is the array, once.
    """
    root, n = collective.root or 0, topology.num_ranks
    if len(nodes) == 1:
        nodes = [[rank] for rank in nodes[0]]
    home = next(number for number, ranks in enumerate(nodes) if root in ranks)
    others = [nodes[(home + shift) % len(nodes)] for shift in range(1, len(nodes))]
    own = nodes[home]
    place_of_root = own.index(root)
    up, down = collective.reduces, not collective.reduces
    transfers: list[Transfer] = []
    chunk = 0
    for place in range(len(own)):
        for edges in _two_trees(len(others)):
            tree = [(root, own[place])] if place != place_of_root else []
            tree += [(own[place] if a < 0 else others[a][place], others[b][place]) for a, b in edges]
            for ranks in (own, *others):
                tree += [(ranks[place], rank) for rank in ranks if rank not in (ranks[place], root)]
            transfers += _strand(chunk, tree, routes, up=up, down=down, first=len(transfers))
            chunk += 1
    return Schedule(
        collective=collective,
        topology=topology,
        method="forest",
        num_units=chunk,
        chunks=tuple(Chunk(start=start, stop=start + 1) for start in range(chunk)),
        transfers=in_level_order(transfers, lambda t: ((t.dst - t.src) % n, t.src)),
    )


def _two_trees(count: int) -> tuple[list[Edge], list[Edge]]:
    """Edges of two trees over ``0 .. count-1`` below a root -1, parents first; no vertex is inner in both.

    The first is the one in which odd numbers (counted from 1) are leaves; the second is the first, moved on by one,
    or mirrored where their number is even.
    """
    tree = [(-1 if parent == 0 else parent - 1, child - 1) for parent, child in _in_order(count)]
    image = [(v + 1) % count if count % 2 else count - 1 - v for v in range(count)]
    return tree, [(parent if parent < 0 else image[parent], image[child]) for parent, child in tree]


def _in_order(count: int) -> list[Edge]:
    """A tree over ``1 .. count`` below a root 0, parents first: a number's children have one low bit less."""
    edges: list[Edge] = []
    waiting = [(0, 1, count)]  # a parent, and the numbers below it
    while waiting:
        parent, low, high = waiting.pop(0)
        if low > high:
            continue
        bit = 1 << (high - low + 1).bit_length() - 1
        middle = min(low + bit - 1, high)
        edges.append((parent, middle))
        waiting += [(middle, low, middle - 1), (middle, middle + 1, high)]
    return edges


# -- what no schedule can beat ------------------------------------------------------------------------------------


def _limit(topology: Topology, collective: Collective, nodes: list[list[int]]) -> Fraction:
    """An upper bound of ``algbw``, from what enters and leaves a rank, and a node.

    Each part that is added up and spread must leave each node but one, and enter each but one; as nodes are alike,
    the links of all together are the limit. The same is true of ranks.
    """
    parts: list[list[int]] = [[vertex] for vertex in topology.ranks]
    limits = [_cut_limit(topology, collective, parts)]
    if len(nodes) > 1:
        switches = {
            name: [v for v, x in enumerate(topology.vertices) if x.node == name] for name in topology.ranks_by_node
        }
        limits.append(_cut_limit(topology, collective, list(switches.values())))
    return min(limits)


def _cut_limit(topology: Topology, collective: Collective, parts: list[list[int]]) -> Fraction:
    inside = set(parts[0])
    into = sum(link.capacity for link in topology.links if link.src not in inside and link.dst in inside)
    out = sum(link.capacity for link in topology.links if link.src in inside and link.dst not in inside)
    count, least = len(parts), min(into, out)
    up, down = _directions(collective)
    if collective.root is not None:  # the whole array leaves, or enters, the root's part, and passes each other
        return Fraction(least)
    return Fraction(least * count, (up + down) * (count - 1))
