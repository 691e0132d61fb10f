"""All-reduce by its own linear programme: how to share every link between reducing and spreading.

Each part of the array is added up along an in-tree to some rank, its root, and copied along an out-tree from there.
Which share of the array a rank is the root of is free, and so is how each link is divided between both directions,
which run at the same time. With c1 and c2 the parts of the links that spread and reduce, both balanced at switches,
and x_u the rate at which rank u is a root, trees exist (Edmonds) iff every rank can receive sum x from the roots
within c1 and send sum x to them within c2. So the optimum is the linear programme

    maximise sum x   subject to   c1 + c2 <= b,   x(outside B) <= c1(into B) and c2(out of B) for every set B

which is two phases of ``mycel.collectives.cutting_planes`` with the same roots.

A large fabric's links and roots fall into classes that colour refinement does not tell apart
(``symmetry.find_classes``), and a class has one unknown. What that programme finds holds: flows over the whole fabric
check it. What it does not allow, the whole fabric might, where links look alike and are not (two equal parts of
unequal size, say). So its dual is not believed: it only gives prices of links, and what these prove of any schedule
by trees is worked out without classes (``tree_prices``). Usually both are equal. Where they are not, the programme of
all links is tried, and what remains between them is said.

Reduce-scatter and then all-gather is the special case of equal shares and two phases one after the other. It is
optimal on homogeneous fabrics, and loses where some rank is slow: that rank had better be a leaf everywhere, which
sends its own array once and receives the sum once.

References:
    J. Edmonds, "Edge-disjoint branchings", 1973. L. Zhao et al., "ForestColl: Throughput-Optimal Collective
    Communications on Heterogeneous Network Fabrics", arXiv 2402.06787 (all-reduce by a linear programme).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from math import gcd, lcm

import numpy as np
import numpy.typing as npt

from mycel.collectives.clusters import clusters
from mycel.collectives.cutting_planes import TOLERANCE, CuttingPlanes, Phase, Solution, clip
from mycel.collectives.maxflow import FlowGraph, as_int64
from mycel.collectives.partition_bound import Groups, groups_at_prices, least_cut, partition_rate, quick_limit
from mycel.collectives.symmetry import find_classes
from mycel.collectives.tree_prices import rate_at_prices
from mycel.collectives.worst_cut import largest_ratio
from mycel.errors import SynthesisError
from mycel.topology.model import Topology

__all__ = ["Division", "divide_links", "limit_of_cuts"]

_log = logging.getLogger(__name__)

#: Rows times variables, first of one programme and then of all that are solved one after the other, up to which a
#: fabric is treated (not seconds: every rank must come to the same answer). About 3 s and 20 s of one core.
_LARGEST = 8_000_000
_WORK = 60_000_000
#: Work after which whole trees are asked for, where no cut so far is below those that are known without a programme.
_FIRST_WORK = 2_000_000
#: Up to this many ranks every link has an unknown of its own.
_SMALL = 32
#: Part of the optimum up to which a large programme is brought; the optimum itself is tried then.
_CLOSE = Fraction(1, 1000)
#: Parts of a unit of capacity to which such an answer is rounded: the first that loses no more than that again.
_GRAINS = (1, 4, 12, 60, 840, 10**4, 10**6)
#: Parts of the largest share to which shares are rounded with it.
_SHARE_PARTS = 60
#: Denominators to which prices are rounded in turn.
_DENOMINATORS = (1, 2, 6, 12, 60, 840, 10**4, 10**6)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Division:
    """How links are divided between adding up and spreading, and what is proved of that.

    Attributes:
        limit: upper bound of ``sum x``, which is the array's rate (``algbw``), over all divisions; proved.
        reached: the best rate known to be reached, by ``shares`` or by the composition; at most ``limit``, and equal
            to it unless the fabric is too large, or its links look alike and are not.
        binding: links with a positive price in the proof.
        groups: groups of vertices that prove the same limit for schedules of every kind (``partition_bound``); empty
            where none were found.
        shares: rate of each rank as a root; empty where nothing better than the composition is known.
        spread: the part of each link that copies, balanced at switches; empty as ``shares``.
        reduce: the part of each link that adds, likewise.
    """

    limit: Fraction
    reached: Fraction
    binding: tuple[int, ...] = ()
    groups: Groups = ()
    shares: tuple[Fraction, ...] = ()
    spread: tuple[Fraction, ...] = ()
    reduce: tuple[Fraction, ...] = ()

    @property
    def algbw(self) -> Fraction:
        """What ``shares`` achieve; 0 without shares."""
        return sum(self.shares, Fraction(0))


def divide_links(
    topology: Topology, *, composition: Division, with_whole_trees: Callable[[Division], Division] | None = None
) -> Division:
    """Solve the programme, exactly.

    Args:
        topology: the fabric.
        composition: reduce-scatter and then all-gather, as a division; if nothing is better, the result only says so.
        with_whole_trees: makes of a limit a division that reaches it, or gives back what it got: asked where the
            programme takes long.

    Raises:
        SynthesisError: the programme was not solved.
    """
    best = replace(limit_of_cuts(topology), reached=composition.algbw)
    attempt = _Attempt(best, with_whole_trees)
    if topology.num_ranks <= _SMALL:
        programme = _programme(topology, with_classes=False)
        return _by_programme(topology, programme, composition, attempt, is_large=False) or best
    for with_classes in (True, False):
        if best.reached < best.limit * (1 - 2 * _CLOSE):
            programme = _programme(topology, with_classes=with_classes)
            found = _by_programme(topology, programme, composition, attempt, is_large=True)
            best = best if found is None else _both(best, found)
            if len(programme.capacity) == len(topology.links):  # nothing looked alike
                break
    return best


def _both(one: Division, two: Division) -> Division:
    """The lower limit, with its proof, and the higher rate, with its parts."""
    proved = two if (two.limit, not two.groups) <= (one.limit, not one.groups) else one
    made = two if two.reached > one.reached else one
    return replace(made, limit=proved.limit, binding=proved.binding, groups=proved.groups)


def limit_of_cuts(topology: Topology) -> Division:
    """The least limit that obvious groups and a least cut prove, with nothing that reaches any rate.

    It holds with switches that copy and add as well.
    """
    limit, groups = quick_limit(topology)
    value, side = least_cut(topology)
    of = {vertex: number for number, group in enumerate(groups) for vertex in group}
    binding = [n for n, link in enumerate(topology.links) if link.dst in of and of.get(link.src) != of[link.dst]]
    if value < limit:
        sides = tuple(frozenset(np.flatnonzero(part).tolist()) for part in (side, ~side))
        limit, groups = value, sides if partition_rate(topology, sides) == value else ()
        binding = [n for n, link in enumerate(topology.links) if side[link.dst] and not side[link.src]]
    return Division(limit=limit, reached=Fraction(0), binding=tuple(binding), groups=groups)


class _Attempt:
    """To reach what cuts prove by whole trees, once, instead of a long programme.

    Args:
        cuts: what they prove, and what is reached without.
        make: as ``divide_links`` has it.
    """

    def __init__(self, cuts: Division, make: Callable[[Division], Division] | None) -> None:
        self.cuts, self.make = cuts, make

    def __call__(self, rate: float) -> Division | None:
        """A division that reaches the cuts' limit, where a programme so far allows it; ``None`` where none does."""
        make, self.make = self.make, None
        if make is None or rate < float(self.cuts.limit) * (1 - TOLERANCE):
            return None
        made = make(self.cuts)
        return made if made.reached == made.limit else None


def _by_programme(
    topology: Topology, programme: CuttingPlanes, composition: Division, attempt: _Attempt, *, is_large: bool
) -> Division | None:
    """What the programme finds and proves; ``None`` where it is too large."""
    if 4 * len(programme.gain) * programme.num_variables > _LARGEST:
        return None
    solution = _optimise(programme, composition, attempt, is_large=is_large)
    if isinstance(solution, Division):
        return solution
    limit, prices = _price_bound(topology, programme, solution)
    best = Division(
        limit=limit,
        reached=composition.algbw,
        binding=tuple(np.flatnonzero(prices).tolist()),
        groups=groups_at_prices(topology, prices, limit),
    )
    if best.limit == best.reached:
        return best
    if solution.is_optimal:
        try:
            return _with_parts(best, programme, programme.make_exact(solution.values))
        except SynthesisError as error:
            _log.info("%s: %s", topology.name, error)
    return _rounded(best, programme, solution.inside) if len(solution.inside) else best


def _optimise(
    programme: CuttingPlanes, composition: Division, attempt: _Attempt, *, is_large: bool
) -> Solution | Division:
    """The programme's solution; or, where it takes long, a division that needs none."""
    enough = float(composition.algbw) * (1 + TOLERANCE)
    inside = _as_values(programme, composition)
    has_inside = is_large and not programme.add_violated(inside.tolist())
    done = 0
    while True:
        work = _WORK - done if attempt.make is None else min(_FIRST_WORK, _WORK - done)
        if has_inside:
            found = programme.approach(inside, enough=enough, close=float(_CLOSE), most_work=work)
            inside = found.inside
        else:
            found = programme.optimise(enough=enough, most_work=work)
        done += work
        if found.is_optimal or found.rate <= enough or done >= _WORK:
            return found
        made = attempt(found.rate)
        if made is not None:
            return made


def _as_values(programme: CuttingPlanes, division: Division) -> npt.NDArray[np.float64]:
    """A division as variables, the mean of each class, a hair's breadth inside."""
    values, count = np.zeros(programme.num_variables), np.zeros(programme.num_variables)
    for phase, part in zip(programme.phases, (division.spread, division.reduce), strict=True):
        for variables, parts in ((phase.first_arc + programme.arc_class, part), (phase.roots, division.shares)):
            np.add.at(values, variables, [float(value) for value in parts])
            np.add.at(count, variables, 1.0)
    return values / count / programme.scale * (1 - TOLERANCE)


def _price_bound(topology: Topology, programme: CuttingPlanes, solution: Solution) -> tuple[Fraction, list[int]]:
    """The lowest rate that prices of links prove to be the most, over several roundings of them.

    Raises:
        SynthesisError: no rounding proves anything.
    """
    sizes = np.bincount(programme.arc_class)
    each = (solution.link_prices / sizes)[programme.arc_class]
    best: tuple[Fraction, list[int]] | None = None
    for denominator in _DENOMINATORS if each.max() > 0 else ():
        prices = np.rint(each / each.max() * denominator).astype(int).tolist()
        limit = rate_at_prices(topology, prices)
        if limit is not None and (best is None or limit < best[0]):
            best = limit, prices
            if limit <= solution.rate * (1 + TOLERANCE):
                break
    if best is None:
        raise SynthesisError("the linear programme that divides the links gave no dual solution")
    return best


def _with_parts(best: Division, programme: CuttingPlanes, exact: Sequence[Fraction]) -> Division:
    (spread, shares), (reduce, _) = (programme.of_phase(exact, phase) for phase in programme.phases)
    rate = sum(shares, Fraction(0))
    if rate <= best.reached:
        return best
    return replace(best, reached=rate, shares=shares, spread=spread, reduce=reduce)


def _rounded(best: Division, programme: CuttingPlanes, inside: npt.NDArray[np.float64]) -> Division:
    """A division near values that violate no cut: parts of links in few fractions, and the rate that flows find."""
    wanted = programme.rate(inside) * float(1 - _CLOSE)
    for grain in _GRAINS:
        exact = programme.balanced_near(inside, grain)
        if exact is None:
            continue
        found = _with_parts(best, programme, _at_best_rate(programme, exact, inside))
        if found.reached > best.reached:
            best = found
        if best.reached >= wanted:
            break
    return best


def _at_best_rate(
    programme: CuttingPlanes, exact: Sequence[Fraction], inside: npt.NDArray[np.float64]
) -> list[Fraction]:
    """Values with shares in the proportions of those inside, as large as the parts of links carry; else zero."""
    roots = programme.phases[0].roots
    parts = np.rint(inside[roots] / inside[roots].max() * _SHARE_PARTS).astype(int)
    weights = (parts // gcd(*parts.tolist())).tolist()
    unit = lcm(*(value.denominator for value in exact))
    values = [value if number not in programme.gain else Fraction(0) for number, value in enumerate(exact)]
    try:
        worst = max(
            largest_ratio(phase.graph, [int(c * unit) for c in programme.of_phase(exact, phase)[0]], weights)[0]
            for phase in programme.phases
        )
    except ZeroDivisionError:  # rounding cut a rank off
        return values
    for root, weight in zip(roots.tolist(), weights, strict=True):
        values[root] = weight / worst / unit
    return values


def _programme(topology: Topology, *, with_classes: bool) -> CuttingPlanes:
    """Variables: ``spread`` of each class of arcs, ``reduce`` of each, share of each rank of each class of ranks."""
    graphs = (FlowGraph.of(topology), FlowGraph.of(topology, is_reversed=True))
    clipped = clip(topology, most_edges=topology.num_ranks - 1)
    arc_class = np.arange(len(clipped), dtype=np.int64)
    rank_class = np.arange(topology.num_ranks, dtype=np.int64)
    if with_classes:
        arc_class, rank_class = find_classes(graphs[0], as_int64(clipped))
    first_arcs = np.unique(arc_class, return_index=True)[1].tolist()
    first_ranks, sizes = np.unique(rank_class, return_index=True, return_counts=True)[1:]
    num_arcs = len(first_arcs)
    roots = 2 * num_arcs + rank_class
    once = np.ones_like(roots)
    programme = CuttingPlanes(
        [Phase(graph=graph, first_arc=i * num_arcs, roots=roots, weights=once) for i, graph in enumerate(graphs)],
        [clipped[arc] for arc in first_arcs],
        {2 * num_arcs + number: size for number, size in enumerate(sizes.tolist())},
        "divides the links",
        arc_class=arc_class,
        sinks=graphs[0].ranks[first_ranks],
        is_mirrored=True,
    )
    for vertex in programme.sinks[0].tolist():
        for phase in (0, 1):
            programme.add_single(phase, [vertex])
    sides = [least_cut(topology)[1]]
    if topology.num_ranks > _SMALL:  # which cuts flows come upon first depends on how a fabric is numbered
        sides += clusters(graphs[0], as_int64(clipped))
    for phase, side in product((0, 1), sides):
        programme.add(phase, side)
        programme.add(phase, ~side)
    return programme
