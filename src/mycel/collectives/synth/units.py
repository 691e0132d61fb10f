"""Whole units: the part of every link that a given number of trees needs, by integer programmes.

A forest of few trees uses links in whole units. At a scale U (units a link of capacity 1 carries), it must hold for
whole numbers c of each link, at most the whole part of U times its capacity:

    c is balanced at every switch,    demand(outside B) <= c(into B) for every set B with a rank in it,

and this suffices: switches split off and trees are packed in whole units (see ``splitting`` and ``packing``). For
all_reduce there are two such c, one on the fabric turned round, which share the links; its demands, the units of the
array that each rank is the root of, are unknowns as well and have a given sum.

The least U is found by bisection over the values at which some whole part changes. Each is decided by CP-SAT, which
calculates in integers, with those sets B that its answers, or the linear relaxation's, were found to violate: an
answer that no set refuses is a packing, and sets without an answer are a proof that there is none.

References:
    J. Edmonds, "Edge-disjoint branchings", 1973. J. Bang-Jensen, A. Frank, B. Jackson, "Preserving and increasing
    local edge-connectivity in mixed graphs", SIAM J. Discrete Mathematics 8(2), 1995 (splitting in whole units).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from typing import Any, Literal

import numpy as np

from mycel.collectives.cp_sat import cp_sat, solve
from mycel.collectives.cutting_planes import CuttingPlanes, Phase, Row
from mycel.collectives.maxflow import FlowGraph, IntArray, as_int64

__all__ = ["UnitQuestions", "Units", "Verdict", "least_scale"]

Verdict = Literal["yes", "no", "unknown"]

#: What CP-SAT may spend on one question and a search may spend on all, in its own deterministic seconds: every rank
#: must come to the same answer.
_EFFORT = 4.0
_TOTAL_EFFORT = 20.0
#: Links times ranks, of each direction, up to which questions are asked at all.
_LARGEST = 100_000
_TOLERANCE = 1e-7


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Units:
    """Whole units that hold a forest, or two.

    Attributes:
        demand: units that each rank roots.
        parts: units of each link, one array for each direction; balanced at switches.
    """

    demand: IntArray
    parts: tuple[IntArray, ...]


class UnitQuestions:
    """Questions about one fabric at different scales; the sets found for one serve the next."""

    def __init__(self, graphs: Sequence[FlowGraph], *, demand: Sequence[int] | None, total: int) -> None:
        """Set it up.

        Args:
            graphs: the fabric in each direction, its arcs in one order: one graph, or two that share the links.
            demand: of each rank; ``None`` where it is free.
            total: its sum.
        """
        self.demand = None if demand is None else list(demand)
        self.total = total
        self.num_arcs, self.num_ranks = len(graphs[0].tail), len(graphs[0].ranks)
        self.first_root = self.num_arcs * len(graphs)
        self.roots = range(self.first_root, self.first_root + self.num_ranks)
        self.effort = 0.0
        roots = np.array(self.roots, dtype=np.int64)
        once = np.ones_like(roots)
        phases = [
            Phase(graph=graph, first_arc=i * self.num_arcs, roots=roots, weights=once)
            for i, graph in enumerate(graphs)
        ]
        # Any answer will do: the linear relaxation takes as much of the links as there is.
        self.planes = CuttingPlanes(
            phases, [1] * self.num_arcs, dict.fromkeys(range(self.first_root), 1), "counts units"
        )
        for vertex in graphs[0].ranks.tolist():
            for phase in range(len(graphs)):
                self.planes.add_single(phase, [vertex])

    def ask(self, capacity: IntArray) -> tuple[Verdict, Units | None]:
        """Whether units within these capacities hold the forests, and which."""
        if self.first_root * self.num_ranks > _LARGEST:
            return "unknown", None
        self.relax(capacity)
        while True:
            verdict, values = self.decide(capacity.tolist())
            if values is None:
                return verdict, None
            if not self.planes.add_violated(values, grain=1, tolerance=0.0):
                parts = tuple(
                    np.array(self.planes.of_phase(values, phase)[0], dtype=np.int64) for phase in self.planes.phases
                )
                return "yes", Units(demand=np.array(values[self.first_root :], dtype=np.int64), parts=parts)

    def rows(self) -> Iterator[Row]:
        """Of each set, what enters it and the roots inside, which must be the total: with one sum given, a cut."""
        for cut in self.planes.cuts:
            yield cut.entering | {root: 1 for root in self.roots if root not in cut.outside}

    def relax(self, capacity: IntArray) -> None:
        """Collect the sets that the linear relaxation needs."""
        from scipy.optimize import linprog

        planes = self.planes
        upper = [*np.tile(capacity, len(planes.phases)).tolist(), *([self.total] * self.num_ranks)]
        lower = [0] * len(upper)
        if self.demand is not None:
            lower[self.first_root :] = upper[self.first_root :] = self.demand
        equal = [*planes.balances, dict.fromkeys(self.roots, 1)]
        shared = [planes.shared(arc) for arc in range(self.num_arcs)] if len(planes.phases) > 1 else []
        while True:
            result = linprog(
                [-1.0] * self.first_root + [0.0] * self.num_ranks,
                A_ub=planes.matrix([*({v: -a for v, a in row.items()} for row in self.rows()), *shared]),
                b_ub=[-self.total] * len(planes.cuts) + capacity.tolist()[: len(shared)],
                A_eq=planes.matrix(equal),
                b_eq=[0] * len(planes.balances) + [self.total],
                bounds=list(zip(lower, upper, strict=True)),
                method="highs-ds",
            )
            if result.x is None or not planes.add_violated(result.x.tolist(), grain=1 << 30, tolerance=_TOLERANCE):
                return

    def decide(self, capacity: Sequence[int]) -> tuple[Verdict, list[int] | None]:
        """An answer in whole numbers that satisfies the sets known so far."""
        cp_model, planes = cp_sat("a forest for a given k"), self.planes
        model = cp_model.CpModel()
        variables = [model.new_int_var(0, most, "") for _ in planes.phases for most in capacity]
        if self.demand is None:
            variables += [model.new_int_var(0, self.total, "") for _ in self.roots]
        else:
            variables += [model.new_constant(value) for value in self.demand]

        def total_of(row: Row) -> Any:
            return cp_model.LinearExpr.weighted_sum([variables[v] for v in row], list(row.values()))

        for row in planes.balances:
            model.add(total_of(row) == 0)
        for row in self.rows():
            model.add(total_of(row) >= self.total)
        if len(planes.phases) > 1:
            for arc, c in enumerate(capacity):
                model.add(total_of(planes.shared(arc)) <= c)
        model.add(total_of(dict.fromkeys(self.roots, 1)) == self.total)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.max_deterministic_time = max(0.01, min(_EFFORT, _TOTAL_EFFORT - self.effort))
        status = solve(solver, model)
        self.effort += solver.response_proto.deterministic_time
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return "yes", [solver.value(v) for v in variables]
        return ("no" if status == cp_model.INFEASIBLE else "unknown"), None


def least_scale(
    ask: Callable[[IntArray], tuple[Verdict, Units | None]],
    capacity: Sequence[int],
    *,
    low: Fraction,
    high: Fraction,
) -> tuple[Units | None, bool]:
    """Units within the whole parts of the capacities at the least scale for which there are any.

    Args:
        ask: says whether whole units of each link hold the forests, as ``UnitQuestions.ask``.
        capacity: of each link.
        low: no smaller scale will do.
        high: a scale that will do.

    Returns:
        The units, ``None`` where no scale below ``high`` was found to do; and whether that is proved (it is not where
        a question took more effort than may be spent).
    """
    sizes = sorted(set(capacity))
    best, found, is_proved = high, None, True
    low = min(Fraction(ceil(low * b), b) for b in sizes)
    while low < best:
        # Whole parts stay the same from here to the next scale at which one changes.
        scale = max(low, *(Fraction(floor((low + best) / 2 * b), b) for b in sizes))
        verdict, units = ask(as_int64([floor(scale * b) for b in capacity]))
        if units is not None:
            best, found = scale, units
            continue
        is_proved = is_proved and verdict == "no"
        low = min(Fraction(floor(scale * b) + 1, b) for b in sizes)
    return found, is_proved
