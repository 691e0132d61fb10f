"""All-reduce where switches copy and add: which trees go through which switches, and how they divide the links.

A switch that only forwards is passed through; one that computes (``Vertex.computes``) may instead be a vertex of a
tree, where branches are added up or copied, or even its root. Not every tree needs to use it so: reaching a switch
costs capacity. Trees are therefore sorted by the set of computing switches that they span. For each direction and
each such set S there is a *phase* with its own part of every link: a forest that spans the ranks and S, balanced at
all switches outside S, which exists iff no cut between its vertices is short (Edmonds). With x[p, u] the rate of the
trees of phase p whose root is u, all phases together are one linear programme:

    maximise   sum of x[p, u] over the phases p that spread
    subject to sum of c_p <= b;   each c_p balanced at switches outside S_p
               x_p(outside B) <= c_p(into B)        for every phase p and set B (reducing: out of B)
               for every u:   sum of x[p, u] over spreading phases = the same over reducing phases

The last line says that what is added up at a root is spread from there. Leaves that are switches do nothing, so every
pair of trees belongs to some pair of phases, and the optimum over all sets S is that over all pairs of trees. Up to
``_MOST_SUBSETS`` computing switches all sets are tried; beyond, only none of them and all of them.

It is solved as ``mycel.collectives.cutting_planes`` says; ``allreduce_bound`` is the case without such switches.

References:
    J. Edmonds, "Edge-disjoint branchings", 1973. L. Zhao et al., "ForestColl: Throughput-Optimal Collective
    Communications on Heterogeneous Network Fabrics", arXiv 2402.06787 (switches with multicast and aggregation are
    spanned instead of removed). R. L. Graham et al., "Scalable Hierarchical Aggregation Protocol (SHArP)", COMHPC
    2016 (reduction in InfiniBand switches).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, combinations

import numpy as np

from mycel.collectives.cutting_planes import TOLERANCE, CuttingPlanes, Row, Solution, clip
from mycel.collectives.cutting_planes import Phase as Trees
from mycel.collectives.maxflow import FlowGraph
from mycel.errors import SynthesisError
from mycel.topology.model import Topology

__all__ = ["NetworkDivision", "Phase", "divide_with_switches"]

_log = logging.getLogger(__name__)

#: Computing switches up to which each set of them has its phases; the programme has two for each set.
_MOST_SUBSETS = 2
#: Rows times variables, first of one programme and then of all that are solved one after the other, up to which a
#: fabric is treated (see ``allreduce_bound``).
_LARGEST = 8_000_000
_WORK = 60_000_000

#: Trees of a phase: whether they add up towards their roots, and the computing switches that they span.
Kind = tuple[bool, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Phase:
    """Trees of one direction that span the same switches.

    Attributes:
        is_reversed: whether they add up towards their roots; otherwise they copy from them.
        switches: vertices of the computing switches that they span.
        part: of each link, what they may use; balanced at all other switches.
        shares: rate of each vertex that they span as a root, by vertex.
    """

    is_reversed: bool
    switches: tuple[int, ...]
    part: tuple[Fraction, ...]
    shares: dict[int, Fraction]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NetworkDivision:
    """The best division of the links between phases.

    Attributes:
        limit: proved upper bound of the array's rate (``algbw``) over all pairs of trees of the phases tried, if
            ``is_proved``.
        binding: links with a positive price in the proof; empty where the computing switches gain nothing.
        phases: what to use; their rates add up to ``algbw``. Empty where nothing is gained, and where no exact
            optimum was found.
        is_proved: false where the fabric is too large for the programme: ``limit`` is then what is reached, with all
            computing switches in every tree or with switches that only forward, whichever is better.
    """

    limit: Fraction
    binding: tuple[int, ...] = ()
    phases: tuple[Phase, ...] = ()
    is_proved: bool = True

    @property
    def algbw(self) -> Fraction:
        """What the phases achieve; equal to ``limit`` in every case known."""
        return sum((sum(p.shares.values(), Fraction(0)) for p in self.phases if not p.is_reversed), Fraction(0))


def divide_with_switches(topology: Topology, *, without: Fraction) -> NetworkDivision:
    """Solve the programme, exactly.

    Args:
        topology: a fabric, usually with switches that compute.
        without: ``algbw`` of all_reduce on the same fabric when its switches only forward.

    Raises:
        SynthesisError: a linear programme was not solved.
    """
    computing = topology.compute_vertices[topology.num_ranks :]
    if not computing:
        return NetworkDivision(limit=without)
    counts = range(len(computing) + 1) if len(computing) <= _MOST_SUBSETS else (0, len(computing))
    sets = list(chain.from_iterable(combinations(computing, count) for count in counts))
    if _is_too_large(topology, len(sets)):
        return _through_all(topology, computing, without)
    kinds = [(is_reversed, s) for s in sets for is_reversed in (False, True)]
    whole = _programme(topology, kinds)
    solved = whole.optimise(most_work=_WORK)
    if not solved.is_optimal:
        return _through_all(topology, computing, without)
    if solved.rate <= float(without) * (1 + TOLERANCE):
        return NetworkDivision(limit=without)
    limit, binding = whole.price_bound(solved)
    # Few phases make few trees: first one set for both directions, then those sets that the solution uses.
    used = [kind for kind, trees in zip(kinds, whole.phases, strict=True) if _is_used(trees, solved)]
    tries = [[(is_reversed, s) for is_reversed in (False, True)] for s in reversed(sets)]
    tries += [used] if used not in tries else []
    for chosen in [*tries, kinds]:
        part = whole if chosen == kinds else _programme(topology, chosen)
        found = solved if part is whole else part.optimise(most_work=_WORK)
        if not found.is_optimal or found.rate < solved.rate * (1 - 100 * TOLERANCE):
            continue
        try:
            phases = _as_phases(part, chosen, found)
        except SynthesisError as error:
            _log.info("%s: %s", topology.name, error)
            continue
        result = NetworkDivision(limit=limit, binding=binding, phases=phases)
        if result.algbw > without:
            return result
    return NetworkDivision(limit=limit, binding=binding)


def _is_too_large(topology: Topology, num_sets: int) -> bool:
    size = len(topology.compute_vertices)
    return 4 * num_sets * size * (2 * len(topology.links) + size) > _LARGEST


def _through_all(topology: Topology, computing: tuple[int, ...], without: Fraction) -> NetworkDivision:
    """What trees that all span every computing switch reach, if that is more than without them; no proof."""
    if not _is_too_large(topology, 1):
        kinds = [(False, computing), (True, computing)]
        programme = _programme(topology, kinds)
        found = programme.optimise(most_work=_WORK)
        if found.is_optimal and found.rate > float(without) * (1 + TOLERANCE):
            try:
                division = NetworkDivision(limit=without, phases=_as_phases(programme, kinds, found))
            except SynthesisError as error:
                _log.info("%s: %s", topology.name, error)
            else:
                return replace(division, limit=division.algbw, is_proved=False)
    return NetworkDivision(limit=without, is_proved=False)


def _programme(topology: Topology, kinds: Sequence[Kind]) -> CuttingPlanes:
    """Variables: phase by phase, the part of each arc and the share of each root."""
    num_arcs, size = len(topology.links), 0
    phases: list[Trees] = []
    meetings: dict[int, Row] = {vertex: {} for vertex in topology.compute_vertices}
    gain: Row = {}
    for is_reversed, switches in kinds:
        spanned = sorted((*topology.ranks, *switches))
        roots = size + num_arcs + np.arange(len(spanned), dtype=np.int64)
        graph = replace(FlowGraph.of(topology, is_reversed=is_reversed), ranks=np.array(spanned, dtype=np.int64))
        phases.append(Trees(graph=graph, first_arc=size, roots=roots, weights=np.ones_like(roots)))
        for vertex, root in zip(spanned, roots.tolist(), strict=True):
            meetings[vertex][root] = -1 if is_reversed else 1
            if not is_reversed:
                gain[root] = 1
        size += num_arcs + len(spanned)
    programme = CuttingPlanes(
        phases,
        clip(topology, most_edges=len(topology.compute_vertices)),
        gain,
        "divides the links between phases",
        equal=list(meetings.values()),
    )
    for number, trees in enumerate(phases):
        programme.add_single(number, trees.graph.ranks.tolist())
    return programme


def _is_used(trees: Trees, solved: Solution) -> bool:
    """Whether trees have a share of the rate."""
    return float(solved.values[trees.roots].sum()) > 1e3 * TOLERANCE


def _as_phases(programme: CuttingPlanes, kinds: Sequence[Kind], found: Solution) -> tuple[Phase, ...]:
    """An exact solution by phases, without those that carry nothing.

    Raises:
        SynthesisError: it could not be made exact.
    """
    exact = programme.make_exact(found.values)
    phases = []
    for (is_reversed, switches), trees in zip(kinds, programme.phases, strict=True):
        part, rates = programme.of_phase(exact, trees)
        if any(rates):
            shares = dict(zip(trees.graph.ranks.tolist(), rates, strict=True))
            phases.append(Phase(is_reversed=is_reversed, switches=switches, part=part, shares=shares))
    return tuple(phases)
