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
from math import gcd, lcm

from mycel.arguments import whole_number
from mycel.collectives.allreduce_bound import Division
from mycel.collectives.bound import Optimum, find_division, find_optimum, root_weights
from mycel.collectives.in_network_bound import NetworkDivision, divide_with_switches
from mycel.collectives.maxflow import FlowGraph
from mycel.collectives.partition_bound import quick_limit
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import Collective, check_ranks
from mycel.collectives.synth.array_forest import Forest
from mycel.collectives.synth.both_ways import grow_both_ways
from mycel.collectives.synth.emission import emit
from mycel.collectives.synth.growing import depth_of, grow_shallow, grow_trees
from mycel.collectives.synth.nodes import NODES_FROM
from mycel.collectives.synth.nodes import synthesize as synthesize_by_nodes
from mycel.collectives.synth.scales import fewest, least_for, scale, scales_within
from mycel.collectives.synth.sized import SHARES, fastest
from mycel.collectives.synth.units import UnitQuestions, least_scale
from mycel.cost import link_costs
from mycel.errors import UsageError
from mycel.topology.model import LOCALHOST, Topology

__all__ = [
    "FEW_RANKS",
    "build_forest",
    "by_construction",
    "divided",
    "for_sizes",
    "grow_divided",
    "grow_optimum",
    "share_of",
    "synthesize",
]

_log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]

#: Up to this many ranks, the composition is grown first: trees are packed arc by arc, in little time.
FEW_RANKS = 32
_WHOLE = Fraction(1)


def synthesize(
    topology: Topology,
    collective: Collective,
    *,
    k: int | None = None,
    within: float | None = None,
    num_bytes: int | None = None,
    links: str | None = None,
    progress: Progress | None = None,
) -> Schedule:
    """A schedule whose ``algbw`` is the bound's (or, for a given k, the best that k trees a root reach).

    Args:
        topology: the fabric.
        collective: what to move, over all of the fabric's ranks.
        k: trees a root; the fewest that were found to meet the bound exactly if not given. For all_reduce, units a
            rank: the array is cut into k units for each rank, of which any rank may be the root of any number.
        within: share of what is reached without it that is enough, such as 0.95: the shallowest schedule found that
            reaches it.
        num_bytes: size of the array: of forests at the bound and some way below it, the one that is simulated to be
            fastest there.
        links: with ``num_bytes``, class of all links, instead of those of the topology, as for
            ``mycel.cost.link_costs``.
        progress: called with what is being done, how much of it is done, and how much there is.

    Raises:
        UsageError: the collective is over another number of ranks, ``k`` or ``num_bytes`` is not positive, ``within``
            is not above 0 and up to 1, or more than one of them is given; ``links`` without ``num_bytes``, or an
            unknown class.
        SynthesisError: see ``mycel.collectives.bound.bound``.
    """
    check_ranks(topology, collective)
    if k is not None and whole_number(k, "k, trees a root") < 1:
        raise UsageError(f"k={k} trees a root; at least 1 is needed")
    if sum(given is not None for given in (k, within, num_bytes)) > 1:
        raise UsageError("k trees a root, the shallowest within a share, or the fastest at a size: give one of them")
    if links is not None and num_bytes is None:
        raise UsageError(f"links={links!r} says what messages cost, which counts at a size only: give num_bytes too")
    if num_bytes is not None:
        if num_bytes < 1:
            raise UsageError(f"num_bytes={num_bytes}: a size is at least a byte")
        link_costs(topology, links=links)  # an unknown class is said before forests are grown
        return fastest(for_sizes(topology, collective, progress=progress), num_bytes, links=links)
    share = share_of(within)
    if k is None:
        shallow = by_construction(topology, collective)
        if shallow is not None:
            return shallow
    adds = len(topology.compute_vertices) > topology.num_ranks
    if collective.name == "all_reduce" and k is None and not adds and topology.num_ranks > FEW_RANKS:
        division, composition = find_division(topology)
        if division.algbw > composition:  # large forests take long: none is grown to be thrown away
            return _synthesize_divided(topology, collective, division, share, progress)
    weights = root_weights(collective)
    ways = [True] if collective.reduces else []
    if collective.name in ("all_gather", "all_reduce", "broadcast"):
        ways.append(False)
    forests = [
        build_forest(topology, weights, is_reversed=turned, k=k, within=share, progress=progress) for turned in ways
    ]
    schedule = emit(topology, collective, weights, [(forest, 1) for forest in forests])
    if collective.name == "all_reduce":
        # Equal shares have fewer trees; and two phases that load different links may reach the optimum by chance.
        # Where it is plain that they do, the linear programme is spared: its solver alone takes long to import.
        if k is None and not adds and schedule.algbw >= share * quick_limit(topology)[0]:
            return schedule
        division, _ = find_division(topology)
        if k is None:
            network = divide_with_switches(topology, without=max(schedule.algbw, division.algbw))
            if network.phases:
                return _synthesize_in_network(topology, collective, network, progress)
        if k is None and schedule.algbw < share * division.algbw:
            return _synthesize_divided(topology, collective, division, share, progress)
        if k is not None:
            return _synthesize_units(topology, schedule, k * topology.num_ranks, division.limit, progress)
    return schedule


def for_sizes(
    topology: Topology, collective: Collective, *, progress: Progress | None = None
) -> tuple[Schedule, ...]:
    """Forests at the bound and some way below it, each shallower than those before: one is the fastest at a size.

    Args:
        topology: the fabric.
        collective: what to move, over all of the fabric's ranks.
        progress: as for ``synthesize``.
    """
    found = [synthesize(topology, collective, progress=progress)]
    for share in SHARES[1:]:
        other = synthesize(topology, collective, within=share, progress=progress)
        if other.depth < found[-1].depth:
            found.append(other)
    return tuple(found)


def by_construction(topology: Topology, collective: Collective) -> Schedule | None:
    """The optimal schedule of few steps that needs no search, where ranks are alike; ``None`` elsewhere.

    Args:
        topology: the fabric.
        collective: what to move, over all of the fabric's ranks.
    """
    # What processes of one machine hand to each other costs a look, or a sleep, rather than its bytes.
    if topology.num_ranks < NODES_FROM and set(topology.ranks_by_node) != {LOCALHOST}:
        return None
    return synthesize_by_nodes(topology, collective)


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
    topology: Topology, collective: Collective, division: Division, within: Fraction, progress: Progress | None
) -> Schedule:
    """All-reduce with the shares of a division, each direction within its part of the links."""
    forests = grow_divided(topology, division, within=within, progress=progress)
    return emit(topology, collective, forests[0].weights, [(forest, 1) for forest in forests])


def grow_divided(
    topology: Topology,
    division: Division,
    *,
    within: Fraction = _WHOLE,
    with_symmetry: bool = True,
    progress: Progress | None = None,
) -> tuple[Forest, Forest]:
    """Two forests of a division of links, one that spreads and one, turned round, along which is added up.

    Args:
        topology: the fabric.
        division: how its links are divided, with shares.
        within: as for ``build_forest``.
        with_symmetry: as for ``build_forest``.
        progress: as for ``build_forest``.
    """
    same = grow_both_ways(topology, division, within=within, progress=progress)
    if same is not None:
        return same
    spread, reduce = (
        grow_optimum(topology, best, within=within, with_symmetry=with_symmetry, progress=progress)
        for best in divided(topology, division)
    )
    return spread, reduce


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


def share_of(within: float | None) -> Fraction:
    """A share of the bound as it was written.

    Raises:
        UsageError: it is not above 0 and up to 1.
    """
    if within is None:
        return _WHOLE
    if not 0 < within <= 1:
        raise UsageError(f"within={within}: a share of the bound is above 0 and at most 1, such as 0.95")
    return Fraction(str(within))


# -- from fabric to trees -------------------------------------------------------------------------------------


def build_forest(
    topology: Topology,
    weights: Sequence[int],
    *,
    is_reversed: bool,
    k: int | None = None,
    within: Fraction = _WHOLE,
    with_symmetry: bool = True,
    progress: Progress | None = None,
) -> Forest:
    """Out-trees on the fabric (turned round on request): rank ``r`` roots ``weights[r]`` shares of k units each.

    Args:
        topology: the fabric.
        weights: share of each rank as a root.
        is_reversed: turn every link round first (collectives that reduce).
        k: trees a unit of weight; the fewest that were found to meet the bound if not given.
        within: share of the bound that is enough; below 1, the shallowest forest found that reaches it.
        with_symmetry: look for a symmetry, and grow one tree of each of its orbits where there is one.
        progress: called with what is being done, how much of it is done, and how much there is.

    Raises:
        SynthesisError: see ``mycel.collectives.bound.bound``.
    """
    best = find_optimum(topology, weights, is_reversed=is_reversed)
    return grow_optimum(topology, best, k=k, within=within, with_symmetry=with_symmetry, progress=progress)


def grow_optimum(
    topology: Topology,
    best: Optimum,
    *,
    k: int | None = None,
    within: Fraction = _WHOLE,
    with_symmetry: bool = True,
    progress: Progress | None = None,
) -> Forest:
    """Out-trees for a solved bound; arguments as ``build_forest``."""
    if k is not None:
        return grow_trees(topology, best, *least_for(best, topology, k), progress, with_symmetry=with_symmetry)
    capacity, demand = fewest(best)
    forest = grow_trees(topology, best, capacity, demand, progress, with_symmetry=with_symmetry)
    if within == _WHOLE:
        return forest
    candidates = [grow_shallow(topology, best, *units, progress) for units in scales_within(best, within)]
    return min((forest, *candidates), key=lambda each: (depth_of(each), each.num_trees))
