"""All-reduce by its own linear programme: how to share every link between reducing and spreading.

Each part of the array is added up along an in-tree to some rank, its root, and copied along an out-tree from there.
Which share of the array a rank is the root of is free, and so is how each link is divided between both directions,
which run at the same time. With c1 and c2 the parts of the links that spread and reduce, both balanced at switches,
and x_u the rate at which rank u is a root, trees exist (Edmonds) iff every rank can receive sum x from the roots
within c1 and send sum x to them within c2. So the optimum is the linear programme

    maximise sum x   subject to   c1 + c2 <= b,   x(outside B) <= c1(into B) and c2(out of B) for every set B

which is two phases of ``mycel.collectives.cutting_planes`` with the same roots.

Reduce-scatter and then all-gather is the special case of equal shares and two phases one after the other. It is
optimal on homogeneous fabrics, and loses where some rank is slow: that rank had better be a leaf everywhere, which
sends its own array once and receives the sum once.

References:
    J. Edmonds, "Edge-disjoint branchings", 1973. L. Zhao et al., "ForestColl: Throughput-Optimal Collective
    Communications on Heterogeneous Network Fabrics", arXiv 2402.06787 (all-reduce by a linear programme).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from mycel.collectives.cutting_planes import TOLERANCE, CuttingPlanes, Phase, clip
from mycel.collectives.maxflow import FlowGraph, as_int64
from mycel.collectives.symmetry import find_orbits
from mycel.errors import SynthesisError
from mycel.topology.model import Topology

__all__ = ["Division", "divide_links", "quick_limit"]

_log = logging.getLogger(__name__)

#: Rows times variables, first of one programme and then of all that are solved one after the other, up to which a
#: fabric is treated (not seconds: every rank must come to the same answer). About 3 s and 20 s of one core. The cuts
#: known when the work is used up prove a bound, usually the optimum; to find the parts that meet it takes longer.
_LARGEST = 8_000_000
_WORK = 60_000_000
#: Up to this many ranks no symmetry is looked for.
_SMALL = 32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Division:
    """The best division of the links.

    Attributes:
        limit: upper bound of ``sum x``, which is the array's rate (``algbw``); proved if ``is_proved``.
        binding: links with a positive price in the proof.
        shares: rate of each rank as a root; empty where the composition is optimal, and where no exact optimum was
            found (a large fabric whose parts differ, see ``_WORK``).
        spread: the part of each link that copies, balanced at switches; empty as ``shares``.
        reduce: the part of each link that adds, likewise.
        is_proved: false where the fabric is too large for the programme: ``limit`` is then the composition's rate.
    """

    limit: Fraction
    binding: tuple[int, ...]
    shares: tuple[Fraction, ...] = ()
    spread: tuple[Fraction, ...] = ()
    reduce: tuple[Fraction, ...] = ()
    is_proved: bool = True

    @property
    def algbw(self) -> Fraction:
        """What ``shares`` achieve; equal to ``limit`` in every case known; 0 without shares."""
        return sum(self.shares, Fraction(0))


def quick_limit(topology: Topology) -> Fraction:
    """A rate that no division of the links exceeds, found without a linear programme; often the rate of the best one.

    Of disjoint groups of ranks, all but a root's must receive what is spread from it, and all but the root's must
    send what is added up there, which arrives at another group. So of each element, twice as many copies enter groups
    as there are groups, less two, and all links into groups together limit the rate. Here the groups are single
    ranks, and nodes. It holds where switches neither copy nor add.

    Examples:
        >>> from mycel.topology.builders import star
        >>> star_of_4 = star(num_ranks=4, bandwidth="3 GB/s")
        >>> quick_limit(star_of_4), divide_links(star_of_4, composition=Fraction(2)).limit
        (Fraction(2, 1), Fraction(2, 1))
    """
    ranks = [frozenset([rank]) for rank in topology.ranks]
    return min(_entering(topology, groups) for groups in (ranks, _nodes(topology)) if len(groups) > 1)


def _nodes(topology: Topology) -> list[frozenset[int]]:
    """Vertices of each node that has ranks, its switches included; nothing where a rank's node is unknown."""
    members: dict[str, list[int]] = {}
    for number, vertex in enumerate(topology.vertices):
        if vertex.node:
            members.setdefault(vertex.node, []).append(number)
    groups = [group for group in map(frozenset, members.values()) if not group.isdisjoint(topology.ranks)]
    return groups if frozenset().union(*groups).issuperset(topology.ranks) else []


def _entering(topology: Topology, groups: list[frozenset[int]]) -> Fraction:
    of = {vertex: number for number, group in enumerate(groups) for vertex in group}
    entering = sum(link.capacity for link in topology.links if link.dst in of and of.get(link.src) != of[link.dst])
    return Fraction(entering, 2 * (len(groups) - 1))


def divide_links(topology: Topology, *, composition: Fraction, most_without_symmetry: int = _SMALL) -> Division:
    """Solve the programme, exactly.

    Args:
        topology: the fabric.
        composition: ``algbw`` of reduce-scatter and then all-gather; if nothing is better, the result only says so.
        most_without_symmetry: up to this many ranks, no symmetry is looked for.

    Raises:
        SynthesisError: the programme was not solved.
    """
    programme = _programme(topology, with_symmetry=topology.num_ranks > most_without_symmetry)
    if 4 * len(programme.gain) * programme.num_variables > _LARGEST:
        return Division(limit=composition, binding=(), is_proved=False)
    enough = float(composition) * (1 + TOLERANCE)
    solution = programme.optimise(enough=enough, most_work=_WORK)
    limit, binding = programme.price_bound(solution)
    if solution.rate <= enough:  # the cuts so far already allow no more
        return Division(limit=max(limit, composition), binding=binding)
    if not solution.is_optimal:
        return Division(limit=limit, binding=binding)
    try:
        exact = programme.make_exact(solution.values)
    except SynthesisError as error:
        _log.info("%s: %s; the composition is used", topology.name, error)
        return Division(limit=limit, binding=binding)
    (spread, shares), (reduce, _) = (programme.of_phase(exact, phase) for phase in programme.phases)
    return Division(limit=limit, binding=binding, spread=spread, reduce=reduce, shares=shares)


def _programme(topology: Topology, *, with_symmetry: bool) -> CuttingPlanes:
    """Variables: ``spread`` of each orbit of arcs, ``reduce`` of each, share of each rank of each orbit of ranks."""
    graphs = (FlowGraph.of(topology), FlowGraph.of(topology, is_reversed=True))
    clipped = clip(topology, most_edges=topology.num_ranks - 1)
    arc_orbit = np.arange(len(clipped), dtype=np.int64)
    rank_orbit = np.arange(topology.num_ranks, dtype=np.int64)
    if with_symmetry:
        arc_orbit, rank_orbit = find_orbits(graphs[0], as_int64(clipped))
    first_arcs = np.unique(arc_orbit, return_index=True)[1].tolist()
    first_ranks, sizes = np.unique(rank_orbit, return_index=True, return_counts=True)[1:]
    num_arcs = len(first_arcs)
    roots = 2 * num_arcs + rank_orbit
    once = np.ones_like(roots)
    programme = CuttingPlanes(
        [Phase(graph=graph, first_arc=i * num_arcs, roots=roots, weights=once) for i, graph in enumerate(graphs)],
        [clipped[arc] for arc in first_arcs],
        {2 * num_arcs + orbit: size for orbit, size in enumerate(sizes.tolist())},
        "divides the links",
        arc_orbit=arc_orbit,
        sinks=graphs[0].ranks[first_ranks],
        is_mirrored=True,
    )
    for vertex in programme.sinks[0].tolist():
        for phase in (0, 1):
            programme.add_single(phase, [vertex])
    return programme
