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
from dataclasses import replace
from fractions import Fraction
from math import ceil, gcd, lcm

import numpy as np

from mycel.collectives.allreduce_bound import Division
from mycel.collectives.bound import Optimum, find_division, find_optimum, root_weights
from mycel.collectives.in_network_bound import NetworkDivision, divide_with_switches
from mycel.collectives.maxflow import FlowGraph, IntArray, as_int64
from mycel.collectives.partition_bound import quick_limit
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import Collective
from mycel.collectives.synth.array_forest import Forest, grow_forest
from mycel.collectives.synth.emission import emit
from mycel.collectives.synth.logical_arcs import LogicalArcs, path_lengths
from mycel.collectives.synth.nodes import NODES_FROM
from mycel.collectives.synth.nodes import synthesize as synthesize_by_nodes
from mycel.collectives.synth.packing import pack_shallow
from mycel.collectives.synth.speculative import pack_speculatively
from mycel.collectives.synth.splitting import remove_switches, trim_to_balance
from mycel.collectives.synth.units import UnitQuestions, Units, Verdict, least_scale
from mycel.compiled import compiled
from mycel.errors import UsageError
from mycel.topology.model import LOCALHOST, Topology

__all__ = ["FEW_RANKS", "build_forest", "divided", "grow_carefully", "grow_trees", "scale", "synthesize"]

_log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]

#: Up to this many ranks, trees are packed arc by arc: few fat links, and the best of several packings.
FEW_RANKS = 32


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
    # What processes of one machine hand to each other costs a look, or a sleep, rather than its bytes.
    if k is None and (topology.num_ranks >= NODES_FROM or set(topology.ranks_by_node) == {LOCALHOST}):
        shallow = synthesize_by_nodes(topology, collective)
        if shallow is not None:
            return shallow
    adds = len(topology.compute_vertices) > topology.num_ranks
    if collective.name == "all_reduce" and k is None and not adds and topology.num_ranks > FEW_RANKS:
        division, composition = find_division(topology)
        if division.algbw > composition:  # large forests take long: none is grown to be thrown away
            return _synthesize_divided(topology, collective, division, progress)
    weights = root_weights(collective)
    ways = [True] if collective.reduces else []
    if collective.name in ("all_gather", "all_reduce", "broadcast"):
        ways.append(False)
    forests = [build_forest(topology, weights, is_reversed=turned, k=k, progress=progress) for turned in ways]
    schedule = emit(topology, collective, weights, [(forest, 1) for forest in forests])
    if collective.name == "all_reduce":
        # Equal shares have fewer trees; and two phases that load different links may reach the optimum by chance.
        # Where it is plain that they do, the linear programme is spared: its solver alone takes long to import.
        if k is None and not adds and schedule.algbw >= quick_limit(topology)[0]:
            return schedule
        division, _ = find_division(topology)
        if k is None:
            network = divide_with_switches(topology, without=max(schedule.algbw, division.algbw))
            if network.phases:
                return _synthesize_in_network(topology, collective, network, progress)
        if k is None and schedule.algbw < division.algbw:
            return _synthesize_divided(topology, collective, division, progress)
        if k is not None:
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
        forests.append((grow_trees(topology, best, part, units.demand, progress), 1))
    return emit(topology, composition.collective, weights, forests)


def _synthesize_divided(
    topology: Topology, collective: Collective, division: Division, progress: Progress | None
) -> Schedule:
    """All-reduce with the shares of a division, each direction within its part of the links."""
    directions = divided(topology, division)
    forests = [(grow_trees(topology, best, *scale(best), progress), 1) for best in directions]
    return emit(topology, collective, directions[0].weights, forests)


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
    grown: list[tuple[Forest, Fraction]] = []
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
        grown.append(
            (grow_trees(fabric, best, capacity, demand, progress), int(demand.sum()) / sum(shares, Fraction(0)))
        )
    # Each phase counts in units of its own; all together in the largest that divides those of each.
    common = Fraction(lcm(*(units.numerator for _, units in grown)))
    forests = [(forest, int(common / units)) for forest, units in grown]
    weights = [0] * len(topology.compute_vertices)
    for forest, factor in forests:
        for root, multiplicity in zip(forest.roots.tolist(), forest.multiplicities.tolist(), strict=True):
            if not forest.is_reversed:
                weights[topology.compute_index[forest.topology.ranks[root]]] += multiplicity * factor
    return emit(topology, collective, weights, forests)


# -- from fabric to trees -------------------------------------------------------------------------------------


def build_forest(
    topology: Topology,
    weights: Sequence[int],
    *,
    is_reversed: bool,
    k: int | None = None,
    progress: Progress | None = None,
) -> Forest:
    """Out-trees on the fabric (turned round on request): rank ``r`` roots ``weights[r]`` shares of k units each.

    Raises:
        SynthesisError: see ``mycel.collectives.bound.bound``.
    """
    best = find_optimum(topology, weights, is_reversed=is_reversed)
    capacity, demand = scale(best) if k is None else _scale_to_k(best, topology, k)
    return grow_trees(topology, best, capacity, demand, progress)


def grow_trees(
    topology: Topology, best: Optimum, capacity: IntArray, demand: IntArray, progress: Progress | None
) -> Forest:
    """Trees within capacities that are balanced at switches and serve every rank."""
    if topology.num_ranks > FEW_RANKS:
        forest = grow_forest(topology, best, capacity, demand, progress=progress)
        if forest is not None:
            return forest
    return grow_carefully(topology, best, capacity, demand, progress)


def grow_carefully(
    topology: Topology, best: Optimum, capacity: IntArray, demand: IntArray, progress: Progress | None
) -> Forest:
    """The same on fabrics of any kind: switches are removed pair by pair, and trees packed arc by arc."""
    n = topology.num_ranks
    nodes = {v: vertex.node for v, vertex in enumerate(topology.vertices)}
    arcs = remove_switches(best.graph, capacity, demand, nodes=nodes, is_reversed=best.is_reversed, progress=progress)
    # Trees are packed into wide links, one from a rank to another, and then divided among the paths of each.
    is_first = np.ones(len(arcs.tail), dtype=np.bool_)
    is_first[1:] = (np.diff(arcs.tail) != 0) | (np.diff(arcs.head) != 0)
    first = np.flatnonzero(is_first)
    wide = LogicalArcs(
        tail=arcs.tail[first], head=arcs.head[first], capacity=np.add.reduceat(arcs.capacity, first), paths=()
    )
    lengths = np.maximum.reduceat(path_lengths(topology, arcs.paths, is_reversed=best.is_reversed), first)
    trees = None
    if n > FEW_RANKS:
        trees = pack_speculatively(n, wide, lengths, demand, progress=progress)
    if trees is None:
        trees = pack_shallow(n, wide, lengths, demand, progress=progress)
    trees = sorted(trees, key=lambda tree: tree.root)
    rows, multiplicities, roots = [], [], []
    left, bounds = arcs.capacity.copy(), np.append(first, len(arcs.tail))
    for tree in trees:
        rest = tree.multiplicity
        while rest:
            part, row = _take_paths(tree.arcs, bounds, left, rest)
            rows.append(row)
            multiplicities.append(part)
            roots.append(tree.root)
            rest -= part
    return Forest(
        topology=topology,
        is_reversed=best.is_reversed,
        weights=best.weights,
        arcs=arcs,
        roots=np.array(roots, dtype=np.int64),
        multiplicities=np.array(multiplicities, dtype=np.int64),
        trees=np.array(rows, dtype=np.int32),
        order=1,
    )


@compiled
def _take_paths(tree: IntArray, bounds: IntArray, left: IntArray, rest: int) -> tuple[int, IntArray]:
    """Of each wide link of a tree, the narrowest path that has ``rest`` left, or else the widest.

    Args:
        tree: wide links.
        bounds: where the paths of each wide link begin, and after them the end.
        left: capacity of each path; what is taken is taken off.
        rest: most that is taken.

    Returns:
        How much was taken, and the paths.
    """
    chosen = np.empty(len(tree), dtype=np.int64)
    part = rest
    for i in range(len(tree)):
        fitting, widest = -1, int(bounds[tree[i]])
        for path in range(bounds[tree[i]], bounds[tree[i] + 1]):
            if left[path] >= rest and (fitting < 0 or left[path] < left[fitting]):
                fitting = path
            if left[path] > left[widest]:
                widest = path
        chosen[i] = fitting if fitting >= 0 else widest
        part = min(part, int(left[chosen[i]]))
    for taken in chosen:
        left[taken] -= part
    return part, chosen


def scale(best: Optimum) -> tuple[IntArray, IntArray]:
    """Smallest scale at which capacities and demands are whole numbers."""
    x = 1 / best.inverse_x_achieved
    values = [*best.capacities, *(x * w for w in best.weights)]
    unit = lcm(*(v.denominator for v in values))
    whole = [v.numerator * (unit // v.denominator) for v in values]
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
