"""Forest: spanning trees that meet the bound exactly, on any fabric with switches.

The steps, each checked by exact flows: scale the capacities so that every rank roots a whole number k of trees;
remove switches by edge splitting; pack spanning out-trees; divide trees until each of their edges is one physical
path; say it as a schedule. A collective that reduces runs on the fabric turned round, its trees turned back.
All-reduce reduces every chunk up one tree and copies it down another; where reduce-scatter and all-gather one after
the other are not optimal, both forests are built from the parts of the links that each of them is best given. Where
switches can copy and add, and that helps, they are not removed but spanned (``mycel.collectives.in_network_bound``).

References:
    L. Zhao et al., "ForestColl: Throughput-Optimal Collective Communications on Heterogeneous Network Fabrics",
    arXiv 2402.06787. J. Edmonds, "Edge-disjoint branchings", 1973.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from math import ceil, gcd, lcm

import numpy as np

from mycel.collectives.allreduce_bound import Division
from mycel.collectives.bound import Optimum, find_division, find_optimum, root_weights
from mycel.collectives.in_network_bound import NetworkDivision, divide_with_switches
from mycel.collectives.maxflow import FlowGraph, IntArray, as_int64
from mycel.collectives.schedule import Chunk, Schedule, Transfer
from mycel.collectives.spec import Collective
from mycel.collectives.synth.array_forest import Forest, grow_forest
from mycel.collectives.synth.bulk import LogicalArcs, path_lengths
from mycel.collectives.synth.in_network import root_at_switch, without_idle_switches
from mycel.collectives.synth.ordering import in_level_order
from mycel.collectives.synth.packing import Tree, pack_large, pack_shallow
from mycel.collectives.synth.splitting import LogicalGraph, remove_switches, trim_to_balance
from mycel.collectives.synth.units import UnitQuestions, Units, Verdict, least_scale
from mycel.errors import UsageError
from mycel.topology.model import Topology

__all__ = ["RoutedTree", "build_forest", "divided", "grow_trees", "scale", "synthesize"]

_log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
Path = tuple[int, ...]

#: Up to this many ranks, trees are packed arc by arc: few fat links, and the best of several packings.
_SMALL = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedTree:
    """A spanning out-tree in which each edge is one physical path.

    Attributes:
        root: a rank.
        multiplicity: units of the root's share that use it.
        edges: ``(src, dst, path)`` in the order of growth, as data spreads from the root.
    """

    root: int
    multiplicity: int
    edges: tuple[tuple[int, int, Path], ...]

    def reversed(self) -> RoutedTree:
        """The in-tree: edges turned round, leaves first."""
        edges = tuple((dst, src, path[::-1]) for src, dst, path in reversed(self.edges))
        return RoutedTree(root=self.root, multiplicity=self.multiplicity, edges=edges)


def synthesize(
    topology: Topology, collective: Collective, *, k: int | None = None, progress: Progress | None = None
) -> Schedule:
    """A schedule whose ``algbw`` is the bound's (or, for a given k, the best that k trees a root reach).

    Args:
        topology: the fabric.
        collective: what to move, over all of the fabric's ranks.
        k: trees a root; the fewest that meet the bound exactly if not given. For all_reduce, units a rank: the array
            is cut into k units for each rank, of which any rank may be the root of any number.
        progress: called with what is being done, how much of it is done, and how much there is.

    Raises:
        UsageError: the collective is over another number of ranks, or ``k`` is not positive.
        SynthesisError: see ``mycel.collectives.bound.bound``.
    """
    if collective.num_ranks != topology.num_ranks:
        raise UsageError(
            f"{collective.name} over {collective.num_ranks} ranks, but {topology.name} has {topology.num_ranks}"
        )
    if k is not None and k < 1:
        raise UsageError(f"k={k} trees a root; at least 1 is needed")
    weights = root_weights(collective)
    up = down = None
    if collective.reduces:
        forest = build_forest(topology, weights, is_reversed=True, k=k, progress=progress)
        up = [tree.reversed() for tree in forest]
    if collective.name in ("all_gather", "all_reduce", "broadcast"):
        down = build_forest(topology, weights, is_reversed=False, k=k, progress=progress)
    schedule = _emit(topology, collective, weights, up, down)
    if collective.name == "all_reduce":
        # Equal shares have fewer trees; and two phases that load different links may reach the optimum by chance.
        division, _ = find_division(topology)
        if k is None:
            network = divide_with_switches(topology, without=max(schedule.algbw, division.algbw))
            if network.phases:
                return _synthesize_in_network(topology, collective, network, progress)
        if k is None and schedule.algbw < division.algbw:
            return _synthesize_divided(topology, collective, division, progress)
        if k is not None and division.is_proved:
            return _synthesize_units(topology, schedule, k * topology.num_ranks, division.limit, progress)
    return schedule


def _synthesize_units(
    topology: Topology, composition: Schedule, total: int, limit: Fraction, progress: Progress | None
) -> Schedule:
    """All-reduce of an array of so many units in the least time; the composition where nothing is faster.

    Which rank is the root of how many units is free, and so is how each link is divided.
    """
    graphs = [FlowGraph.of(topology), FlowGraph.of(topology, is_reversed=True)]
    questions = UnitQuestions(graphs, demand=None, total=total)
    capacity = [link.capacity for link in topology.links]
    units, is_proved = least_scale(questions.ask, capacity, low=total / limit, high=total / composition.algbw)
    if not is_proved:
        _log.info("%s: a better all_reduce of %d units may exist", topology.name, total)
    if units is None:
        return composition
    weights = tuple(units.demand.tolist())
    forests = []
    for graph, part in zip(graphs, units.parts, strict=True):
        best = Optimum(
            graph=graph,
            is_reversed=graph is graphs[1],
            weights=weights,
            inverse_x=total / limit,
            capacities=tuple(map(Fraction, part.tolist())),
            inverse_x_achieved=Fraction(1),
            arcs=(),
            by_dual=True,
        )
        forests.append(grow_trees(topology, best, part, units.demand, progress))
    down, up = forests
    return _emit(topology, composition.collective, weights, [tree.reversed() for tree in up], down)


def _synthesize_divided(
    topology: Topology, collective: Collective, division: Division, progress: Progress | None
) -> Schedule:
    """All-reduce with the shares of a division, each direction within its part of the links."""
    directions = divided(topology, division)
    down, up = (grow_trees(topology, best, *scale(best), progress) for best in directions)
    return _emit(topology, collective, directions[0].weights, [tree.reversed() for tree in up], down)


def divided(topology: Topology, division: Division) -> tuple[Optimum, Optimum]:
    """What both directions of an all-reduce have: how its copies spread, and how they are added up, turned round."""
    unit = lcm(*(share.denominator for share in division.shares))
    whole = [int(share * unit) for share in division.shares]
    rate = Fraction(gcd(*whole), unit)  # of one unit of weight
    spread, reduce = (
        Optimum(
            graph=FlowGraph.of(topology, is_reversed=is_reversed),
            is_reversed=is_reversed,
            weights=tuple(w // gcd(*whole) for w in whole),
            inverse_x=1 / rate,
            capacities=part,
            inverse_x_achieved=1 / rate,
            arcs=(),
            by_dual=True,
        )
        for is_reversed, part in ((False, division.spread), (True, division.reduce))
    )
    return spread, reduce


def _synthesize_in_network(
    topology: Topology, collective: Collective, division: NetworkDivision, progress: Progress | None
) -> Schedule:
    """All-reduce through switches that copy and add: in each phase, those that it spans are packed as ranks are."""
    forests: list[tuple[bool, Fraction, list[RoutedTree]]] = []
    for phase in division.phases:
        fabric = topology.with_vertices(
            replace(vertex, kind="rank", computes=False) if number in phase.switches else vertex
            for number, vertex in enumerate(topology.vertices)
        )
        shares = [phase.shares[vertex] for vertex in fabric.ranks]
        unit = lcm(*(share.denominator for share in shares))
        whole = [int(share * unit) for share in shares]
        inverse = Fraction(unit, gcd(*whole))
        best = Optimum(
            graph=FlowGraph.of(fabric, is_reversed=phase.is_reversed),
            is_reversed=phase.is_reversed,
            weights=tuple(w // gcd(*whole) for w in whole),
            inverse_x=inverse,
            capacities=phase.part,
            inverse_x_achieved=inverse,
            arcs=(),
            by_dual=True,
        )
        capacity, demand = scale(best)
        node = [topology.node_of[vertex] for vertex in fabric.ranks]
        trees = [
            replace(
                tree,
                root=node[tree.root],
                edges=without_idle_switches(
                    tuple((node[src], node[dst], path) for src, dst, path in tree.edges), topology.num_ranks
                ),
            )
            for tree in grow_trees(fabric, best, capacity, demand, progress)
        ]
        forests.append((phase.is_reversed, int(demand.sum()) / sum(shares, Fraction(0)), trees))
    # Each phase counts in units of its own; all together in the largest that divides those of each.
    common = Fraction(lcm(*(units.numerator for _, units, _ in forests)))
    up, down = (
        [
            replace(tree, multiplicity=int(tree.multiplicity * (common / units)))
            for phase_reversed, units, trees in forests
            if phase_reversed == is_reversed
            for tree in trees
        ]
        for is_reversed in (True, False)
    )
    weights = [sum(tree.multiplicity for tree in down if tree.root == node) for node in range(len(topology.nodes))]
    return _emit(topology, collective, weights, [tree.reversed() for tree in up], down)


# -- from fabric to trees -------------------------------------------------------------------------------------


def build_forest(
    topology: Topology,
    weights: Sequence[int],
    *,
    is_reversed: bool,
    k: int | None = None,
    progress: Progress | None = None,
) -> list[RoutedTree]:
    """Out-trees on the fabric (turned round on request): rank ``r`` roots ``weights[r]`` shares of k units each.

    Raises:
        SynthesisError: see ``mycel.collectives.bound.bound``.
    """
    best = find_optimum(topology, weights, is_reversed=is_reversed)
    capacity, demand = scale(best) if k is None else _scale_to_k(best, topology, k)
    return grow_trees(topology, best, capacity, demand, progress)


def grow_trees(
    topology: Topology, best: Optimum, capacity: IntArray, demand: IntArray, progress: Progress | None
) -> list[RoutedTree]:
    """Trees within capacities that are balanced at switches and serve every rank."""
    if topology.num_ranks > _SMALL:
        forest = grow_forest(topology, best, capacity, demand, progress=progress)
        if forest is not None:
            return _as_objects(forest)
    boxes = {v: vertex.box for v, vertex in enumerate(topology.vertices)}
    logical = remove_switches(
        best.graph, capacity, demand, boxes=boxes, is_reversed=best.is_reversed, progress=progress
    )
    rank_of = topology.rank_of
    keys = sorted(logical.arcs)
    paths = [path for key in keys for path, _ in logical.arcs[key]]
    length_of = dict(zip(paths, path_lengths(topology, paths, is_reversed=best.is_reversed).tolist(), strict=True))
    arcs = LogicalArcs(
        tail=np.array([rank_of[t] for t, _ in keys], dtype=np.int64),
        head=np.array([rank_of[h] for _, h in keys], dtype=np.int64),
        capacity=np.array([sum(size for _, size in logical.arcs[key]) for key in keys], dtype=np.int64),
        paths=(),
    )
    lengths = np.array([max(length_of[path] for path, _ in logical.arcs[key]) for key in keys], dtype=np.int64)
    trees = None
    if topology.num_ranks > _SMALL:
        trees = pack_large(topology.num_ranks, arcs, lengths, demand, progress=progress)
    if trees is None:
        trees = pack_shallow(
            *(topology.num_ranks, arcs.tail, arcs.head, arcs.capacity, demand), lengths=lengths, progress=progress
        )
    return _route(trees, logical, topology.ranks)


def _as_objects(forest: Forest) -> list[RoutedTree]:
    arcs = forest.arcs
    links = list(zip(arcs.tail.tolist(), arcs.head.tolist(), arcs.paths, strict=True))
    rows = sorted(range(forest.num_trees), key=lambda i: (int(forest.roots[i]), i))
    return [
        RoutedTree(
            root=int(forest.roots[i]),
            multiplicity=int(forest.multiplicities[i]),
            edges=tuple(links[a] for a in forest.trees[i].tolist()),
        )
        for i in rows
    ]


def scale(best: Optimum) -> tuple[IntArray, IntArray]:
    """Smallest scale at which capacities and demands are whole numbers."""
    x = 1 / best.inverse_x_achieved
    values = [*best.capacities, *(x * w for w in best.weights)]
    unit = lcm(*(v.denominator for v in values))
    whole = [int(v * unit) for v in values]
    divisor = gcd(*whole)
    whole = [v // divisor for v in whole]
    as_int64(whole)
    count = len(best.capacities)
    return as_int64(whole[:count]), as_int64(whole[count:])


def _scale_to_k(best: Optimum, topology: Topology, k: int) -> tuple[IntArray, IntArray]:
    """Least scale U at which the whole parts of U * capacity hold k trees a unit of weight, and what they use.

    Taking capacity away from unbalanced switches step by step is quick and may miss what is there; where it fails,
    an integer programme decides.
    """
    demand = as_int64([k * w for w in best.weights])
    optimal_capacity, optimal_demand = scale(best)
    own_k = int(optimal_demand.sum()) // sum(best.weights)
    copies = ceil(Fraction(k, own_k))  # copies * own_k >= k trees fit, balanced
    questions = UnitQuestions([best.graph], demand=demand.tolist(), total=int(demand.sum()))

    def ask(whole: IntArray) -> tuple[Verdict, Units | None]:
        if best.graph.check(whole, demand)[0].any():
            return "no", None
        trimmed = trim_to_balance(best.graph, whole, demand)
        return questions.ask(whole) if trimmed is None else ("yes", Units(demand=demand, parts=(trimmed,)))

    capacity = [link.capacity for link in topology.links]
    low, high = k * best.inverse_x, copies * own_k * best.inverse_x_achieved
    units, is_proved = least_scale(ask, capacity, low=low, high=high)
    if not is_proved:
        _log.info("%s: better forests of %d trees a root may exist", topology.name, k)
    return (optimal_capacity * copies if units is None else units.parts[0]), demand


def _route(trees: Sequence[Tree], logical: LogicalGraph, vertex: Sequence[int]) -> list[RoutedTree]:
    """Divide trees so that each edge of each follows one physical path, within the paths' amounts."""
    left = {key: list(paths) for key, paths in logical.arcs.items()}
    routed: list[RoutedTree] = []
    for tree in trees:
        rest = tree.multiplicity
        while rest:
            chosen: list[int] = []
            for src, dst in tree.edges:
                paths = left[vertex[src], vertex[dst]]
                fitting = [i for i, (_, size) in enumerate(paths) if size >= rest]
                if fitting:
                    chosen.append(min(fitting, key=lambda i: paths[i][1]))
                else:
                    chosen.append(max(range(len(paths)), key=lambda i: paths[i][1]))
            keys = [(vertex[src], vertex[dst]) for src, dst in tree.edges]
            part = min([rest, *(left[key][i][1] for key, i in zip(keys, chosen, strict=True))])
            edges = []
            for (src, dst), key, i in zip(tree.edges, keys, chosen, strict=True):
                path, size = left[key][i]
                edges.append((src, dst, path))
                if size == part:
                    del left[key][i]
                else:
                    left[key][i] = (path, size - part)
            routed.append(RoutedTree(root=tree.root, multiplicity=part, edges=tuple(edges)))
            rest -= part
    return routed


# -- from trees to a schedule ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A run of units with the tree that reduces it and the tree that spreads it."""

    start: int
    stop: int
    up: tuple[tuple[int, int, Path], ...]
    down: tuple[tuple[int, int, Path], ...]


def _emit(
    topology: Topology,
    collective: Collective,
    weights: Sequence[int],
    up: list[RoutedTree] | None,
    down: list[RoutedTree] | None,
) -> Schedule:
    pieces = _pieces(len(weights), weights, up, down)
    if up is not None and down is not None:
        pieces = [_at_switch(piece, topology.num_ranks) for piece in pieces]
    divisor = gcd(*(piece.stop - piece.start for piece in pieces))
    transfers: list[Transfer] = []
    for chunk, piece in enumerate(pieces):
        first = len(transfers)
        into: dict[int, list[int]] = {}
        for src, dst, path in piece.up:
            after = tuple(into.get(src, ()))
            into.setdefault(dst, []).append(len(transfers))
            transfers.append(Transfer(chunk=chunk, src=src, dst=dst, reduce=True, path=path, after=after))
        has_reduced = len(transfers) > first
        for position, (src, dst, path) in enumerate(piece.down):
            if position == 0 and not has_reduced:
                into = {src: []}
            after = tuple(into.get(src, ()))
            into[dst] = [len(transfers)]
            transfers.append(Transfer(chunk=chunk, src=src, dst=dst, reduce=False, path=path, after=after))
    return Schedule(
        collective=collective,
        topology=topology,
        method="forest",
        num_units=pieces[-1].stop // divisor,
        chunks=tuple(Chunk(start=p.start // divisor, stop=p.stop // divisor) for p in pieces),
        transfers=in_level_order(transfers, lambda t: (t.chunk,)),
    )


def _at_switch(piece: _Piece, num_ranks: int) -> _Piece:
    up, down = root_at_switch(piece.up, piece.down, num_ranks)
    return replace(piece, up=up, down=down)


def _pieces(
    num_roots: int, weights: Sequence[int], up: list[RoutedTree] | None, down: list[RoutedTree] | None
) -> list[_Piece]:
    """Each root's share cut at the boundaries of its trees in both directions; equal neighbours merged."""
    forests = [forest for forest in (up, down) if forest is not None]
    unit = [sum(tree.multiplicity for tree in forest) // sum(weights) for forest in forests]
    common = lcm(*unit)
    pieces: list[_Piece] = []
    start = 0
    for root in range(num_roots):
        runs: list[list[tuple[int, tuple[tuple[int, int, Path], ...]]]] = []
        for forest, trees_a_share in zip(forests, unit, strict=True):
            stretch, reached, run = common // trees_a_share, 0, []
            for tree in forest:
                if tree.root == root:
                    reached += tree.multiplicity * stretch
                    run.append((reached, tree.edges))
            runs.append(run)
        cuts = sorted({0, *(stop for run in runs for stop, _ in run)})
        for low, high in pairwise(cuts):
            edges = [next(e for stop, e in run if stop > low) for run in runs]
            by_direction = iter(edges)
            up_edges = next(by_direction) if up is not None else ()
            down_edges = next(by_direction) if down is not None else ()
            previous = pieces[-1] if pieces and low > 0 else None
            if previous is not None and (previous.up, previous.down) == (up_edges, down_edges):
                pieces[-1] = _Piece(start=previous.start, stop=start + high, up=up_edges, down=down_edges)
            else:
                pieces.append(_Piece(start=start + low, stop=start + high, up=up_edges, down=down_edges))
        start += cuts[-1]
    return pieces
