"""All-reduce by its own linear programme: how to share every link between reducing and spreading.

Each part of the array is added up along an in-tree to some rank, its root, and copied along an out-tree from there.
Which share of the array a rank is the root of is free, and so is how each link is divided between both directions,
which run at the same time. With c1 and c2 the parts of the links that spread and reduce, both balanced at switches,
and x_u the rate at which rank u is a root, trees exist (Edmonds) iff every rank can receive sum x from the roots
within c1 and send sum x to them within c2. So the optimum is the linear programme

    maximise sum x   subject to   c1 + c2 <= b,   x(outside B) <= c1(into B) and c2(out of B) for every set B

with cuts B generated as flows find them violated. As in ``mycel.collectives.balance``, floating point only says
which constraints are tight; those are solved in fractions and checked by exact flows, and the dual solution,
rounded to fractions, is a bound by weak duality however it was rounded.

A large fabric is solved by orbits where it has a symmetry: the mean of a solution and its images is as good, so one
unknown serves for all links, or ranks, that the symmetry takes to each other. Prices of such a programme prove the
same bound for the whole.

Reduce-scatter and then all-gather is the special case of equal shares and two phases one after the other. It is
optimal on homogeneous fabrics, and loses where some rank is slow: that rank had better be a leaf everywhere, which
sends its own array once and receives the sum once.

References:
    J. Edmonds, "Edge-disjoint branchings", 1973. L. Zhao et al., "ForestColl: Throughput-Optimal Collective
    Communications on Heterogeneous Network Fabrics", arXiv 2402.06787 (all-reduce by a linear programme).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import Any

import numpy as np
import numpy.typing as npt

from mycel.collectives.balance import best_price, solve_exactly, unbalanced_switches, vertex_near
from mycel.collectives.maxflow import FlowGraph, IntArray, as_int64, shortfalls
from mycel.collectives.symmetry import find_orbits
from mycel.errors import SynthesisError
from mycel.topology.model import Topology

__all__ = ["Division", "divide_links"]

_log = logging.getLogger(__name__)

_TOLERANCE = 1e-9
#: Rows times variables, first of one programme and then of all that are solved one after the other, up to which a
#: fabric is treated (not seconds: every rank must come to the same answer). About 3 s and 20 s of one core. The cuts
#: known when the work is used up prove a bound, usually the optimum; to find the parts that meet it takes longer.
_LARGEST = 8_000_000
_WORK = 60_000_000
#: Up to this many ranks no symmetry is looked for.
_SMALL = 32

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]


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


def divide_links(topology: Topology, *, composition: Fraction, most_without_symmetry: int = _SMALL) -> Division:
    """Solve the programme, exactly.

    Args:
        topology: the fabric.
        composition: ``algbw`` of reduce-scatter and then all-gather; if nothing is better, the result only says so.
        most_without_symmetry: up to this many ranks, no symmetry is looked for.

    Raises:
        SynthesisError: the programme was not solved.
    """
    programme = _Programme(topology, with_symmetry=topology.num_ranks > most_without_symmetry)
    if 4 * programme.num_roots * programme.num_variables > _LARGEST:
        return Division(limit=composition, binding=(), is_proved=False)
    work = 0
    while True:
        work += len(programme.rows) * programme.num_variables
        values, prices = programme.solve()
        rate = float(values[programme.roots] @ programme.sizes) * programme.scale
        if rate <= float(composition) * (1 + _TOLERANCE):  # the cuts so far already allow no more
            limit, binding = programme.price_bound(prices)
            return Division(limit=max(limit, composition), binding=binding)
        if not programme.add_violated(values):
            break
        if work > _WORK:
            limit, binding = programme.price_bound(prices)
            return Division(limit=limit, binding=binding)
    limit, binding = programme.price_bound(prices)
    try:
        exact = programme.make_exact(values)
    except SynthesisError as error:
        _log.info("%s: %s; the composition is used", topology.name, error)
        return Division(limit=limit, binding=binding)
    spread, reduce, shares = programme.expand(exact)
    return Division(limit=limit, binding=binding, spread=spread, reduce=reduce, shares=shares)


class _Programme:
    """Variables: ``spread`` of each orbit of arcs, ``reduce`` of each, share of each rank of each orbit of ranks."""

    def __init__(self, topology: Topology, *, with_symmetry: bool) -> None:
        self.graphs = (FlowGraph.of(topology), FlowGraph.of(topology, is_reversed=True))
        graph = self.graphs[0]
        whole = [link.capacity for link in topology.links]
        limit = min(
            sum(c for c, v in zip(whole, side.tolist(), strict=True) if v == rank)
            for side in (graph.tail, graph.head)
            for rank in graph.ranks.tolist()
        )
        # A tree crosses a link at most once for each of its edges. Clipping what can never be used keeps the numbers
        # of the programme within a few orders of magnitude of each other.
        clipped = [min(c, 2 * (topology.num_ranks - 1) * limit) for c in whole]
        self.scale = float(max(clipped))
        self.arc_orbit = np.arange(len(whole), dtype=np.int64)
        self.rank_orbit = np.arange(topology.num_ranks, dtype=np.int64)
        if with_symmetry:
            self.arc_orbit, self.rank_orbit = find_orbits(graph, as_int64(clipped))
        first_arcs = np.unique(self.arc_orbit, return_index=True)[1].tolist()
        first_ranks, self.sizes = np.unique(self.rank_orbit, return_index=True, return_counts=True)[1:]
        self.capacity = [clipped[arc] for arc in first_arcs]
        self.num_arcs, self.num_roots = len(first_arcs), len(first_ranks)
        self.roots = slice(2 * self.num_arcs, 2 * self.num_arcs + self.num_roots)
        self.num_variables = self.roots.stop
        self.sinks = graph.ranks[first_ranks]
        self.switches = topology.switches
        balance: dict[tuple[tuple[int, int], ...], dict[int, int]] = {}
        for shift in (0, self.num_arcs):
            for v in self.switches:
                net = self.count(self.arc_orbit[graph.head == v])
                for orbit, number in self.count(self.arc_orbit[graph.tail == v]).items():
                    net[orbit] = net.get(orbit, 0) - number
                row = {shift + orbit: number for orbit, number in net.items() if number}
                if row:
                    balance[tuple(sorted(row.items()))] = row
        self.balance_rows = list(balance.values())
        self.cuts: list[tuple[dict[int, int], dict[int, int]]] = []
        self.rows: list[dict[int, int]] = []
        self.seen: set[tuple[tuple[int, int], ...]] = set()
        for vertex in self.sinks.tolist():
            for phase in (0, 1):
                alone = np.zeros(graph.num_vertices, dtype=np.bool_)
                alone[vertex] = True
                self.add(phase, alone)
                self.add(phase, ~alone)

    @staticmethod
    def count(orbits: IntArray) -> dict[int, int]:
        """How often each occurs."""
        return dict(zip(*(part.tolist() for part in np.unique(orbits, return_counts=True)), strict=True))

    def add(self, phase: int, side: BoolArray) -> bool:
        """Demand that what has its root outside ``side`` enters it (in phase 1, of the fabric turned round)."""
        graph = self.graphs[phase]
        entering = self.count(self.arc_orbit[~side[graph.tail] & side[graph.head]])
        price = {phase * self.num_arcs + orbit: number for orbit, number in entering.items()}
        outside = self.count(self.rank_orbit[~side[graph.ranks]])
        row = {v: -number for v, number in price.items()}
        row |= {self.roots.start + orbit: number for orbit, number in outside.items()}
        key = tuple(sorted(row.items()))
        if key in self.seen:
            return False
        self.seen.add(key)
        self.cuts.append((outside, price))
        self.rows.append(row)
        return True

    def expand(self, values: Sequence[Fraction]) -> tuple[tuple[Fraction, ...], ...]:
        """The values of all arcs in both phases and of all ranks, from those of orbits."""
        arcs = self.arc_orbit.tolist()
        spread = tuple(values[orbit] for orbit in arcs)
        reduce = tuple(values[self.num_arcs + orbit] for orbit in arcs)
        return spread, reduce, tuple(values[self.roots.start + orbit] for orbit in self.rank_orbit.tolist())

    def matrix(self, rows: Sequence[dict[int, int]]) -> Any:
        from scipy.sparse import csr_array

        start = np.cumsum([0, *(len(row) for row in rows)])
        column = np.array([v for row in rows for v in row], dtype=np.int32)
        value = np.array([a for row in rows for a in row.values()], dtype=np.float64)
        return csr_array((value, column, start), shape=(len(rows), self.num_variables))

    def solve(self) -> tuple[FloatArray, tuple[list[float], list[float]]]:
        """Optimum over the cuts known so far (capacities in units of the largest), and the prices."""
        # Half of the import time of the plan side.
        from scipy.optimize import linprog

        objective = np.zeros(self.num_variables)
        objective[self.roots] = -self.sizes
        share = [{arc: 1, self.num_arcs + arc: 1} for arc in range(self.num_arcs)]
        capacity = np.array(self.capacity, dtype=np.float64) / self.scale
        result = linprog(
            objective,
            A_ub=self.matrix([*self.rows, *share]),
            b_ub=np.concatenate([np.zeros(len(self.rows)), capacity]),
            A_eq=self.matrix(self.balance_rows) if self.balance_rows else None,
            b_eq=np.zeros(len(self.balance_rows)) if self.balance_rows else None,
            bounds=(0.0, None),
            method="highs-ds",
            options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
        )
        if result.x is None:
            raise SynthesisError(f"the linear programme that divides the links failed: {result.message}")
        equality = result.eqlin.marginals.tolist() if self.balance_rows else []
        return result.x, (result.ineqlin.marginals[: len(self.rows)].tolist(), equality)

    def add_violated(self, values: FloatArray) -> bool:
        """Add the cuts that the solution violates; whether there were any new ones."""
        grain = 1 << 40
        whole = np.array([max(0, round(v * grain)) for v in values.tolist()], dtype=np.int64)
        demand = as_int64(whole[self.roots][self.rank_orbit].tolist())
        total = int(demand.sum())
        allowed = _TOLERANCE * max(total, grain // 1000)
        added = False
        for phase, graph in enumerate(self.graphs):
            part = as_int64(whole[phase * self.num_arcs : (phase + 1) * self.num_arcs][self.arc_orbit].tolist())
            network = graph.with_source(part, demand)
            deficit, side = shortfalls(graph.num_vertices + 1, *network, graph.num_vertices, self.sinks, total)
            for j in np.flatnonzero(deficit > allowed).tolist():
                added |= self.add(phase, side[j])
                self.add(1 - phase, side[j])  # most fabrics are nearly symmetric: half the rounds
        return added

    def make_exact(self, values: FloatArray) -> list[Fraction]:
        """The vertex of the programme that the floating-point solution is near, verified by exact flows."""
        return vertex_near(lambda tolerance: self.nearest_vertex(values, tolerance), self.verify, _TOLERANCE)

    def nearest_vertex(self, values: FloatArray, tolerance: float) -> list[Fraction]:
        """The solution, in fractions, of the constraints that are tight within a tolerance.

        One more variable, fixed to 1, carries the capacities, so that all equations are homogeneous.
        """
        fixed = {v: Fraction(0) for v in range(self.num_variables) if values[v] <= tolerance}
        one = self.num_variables
        fixed[one] = Fraction(1)
        tight = list(self.balance_rows)
        for arc, c in enumerate(self.capacity):
            if values[arc] + values[self.num_arcs + arc] >= c / self.scale - tolerance:
                tight.append({arc: 1, self.num_arcs + arc: 1, one: -c})
        for row in self.rows:
            total = sum(a * values[v] for v, a in row.items())
            if abs(total) <= 10 * tolerance:
                tight.append(row)
        guess = [Fraction(float(v) * self.scale).limit_denominator(10**4) for v in values] + [Fraction(1)]
        equations = [{v: Fraction(a) for v, a in row.items()} for row in tight]
        return solve_exactly(equations, fixed, guess)[: self.num_variables]

    def verify(self, exact: Sequence[Fraction]) -> None:
        """Check an exact solution against every constraint, by integer flows.

        Raises:
            SynthesisError: it violates one.
        """
        unit = lcm(*(v.denominator for v in exact))
        one, two, shares = ([int(v * unit) for v in part] for part in self.expand(exact))
        limits = [self.capacity[orbit] * unit for orbit in self.arc_orbit.tolist()]
        fits = all(a + b <= limit for a, b, limit in zip(one, two, limits, strict=True))
        if min(*one, *two, *shares) < 0 or not fits:
            raise SynthesisError("the division of the links could not be made exact: a link is overused")
        parts, demand = (one, two), as_int64(shares)
        for graph, part in zip(self.graphs, parts, strict=True):
            if unbalanced_switches(graph, part):
                raise SynthesisError("the division of the links could not be made exact: a switch is unbalanced")
            if graph.check(as_int64(part), demand)[0].any():
                raise SynthesisError("the division of the links could not be made exact: a cut is short")

    def price_bound(self, prices: tuple[list[float], list[float]]) -> tuple[Fraction, tuple[int, ...]]:
        """Exact bound from the dual solution: any prices of cuts and potentials of switches give one."""
        return best_price(prices, self.priced, "divides the links")

    def priced(self, cut: list[Fraction], potential: list[Fraction]) -> tuple[Fraction, tuple[int, ...]] | None:
        """Sum the constraints at these prices: (links at the dearer of their two prices) / (cheapest root)."""
        root = [Fraction(0)] * self.num_roots
        price = [Fraction(0)] * (2 * self.num_arcs)
        for y, (outside, entering) in zip(cut, self.cuts, strict=False):  # cuts added since have no price
            if y:
                for orbit, number in outside.items():
                    root[orbit] += y * number
                for v, number in entering.items():
                    price[v] += y * number
        cheapest = min(cost / size for cost, size in zip(root, self.sizes.tolist(), strict=True))
        if not cheapest:
            return None
        for z, row in zip(potential, self.balance_rows, strict=True):
            if z:
                for v, sign in row.items():
                    price[v] += z * sign
        each = [max(Fraction(0), one, two) for one, two in zip(price, price[self.num_arcs :], strict=False)]
        total = sum((p * c for p, c in zip(each, self.capacity, strict=True)), Fraction(0))
        priced = [bool(p) for p in each]
        return total / cheapest, tuple(arc for arc, orbit in enumerate(self.arc_orbit.tolist()) if priced[orbit])
