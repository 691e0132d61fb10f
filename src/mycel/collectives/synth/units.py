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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from typing import Any, Literal

import numpy as np

from mycel.collectives.maxflow import BoolArray, FlowGraph, IntArray, as_int64
from mycel.collectives.synth.cp_sat import cp_sat, solve

__all__ = ["UnitProgramme", "Units", "Verdict", "least_scale"]

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


class UnitProgramme:
    """Questions about one fabric at different scales; the sets found for one serve the next."""

    def __init__(self, graphs: Sequence[FlowGraph], *, demand: Sequence[int] | None, total: int) -> None:
        """Set it up.

        Args:
            graphs: the fabric in each direction, its arcs in one order: one graph, or two that share the links.
            demand: of each rank; ``None`` where it is free.
            total: its sum.
        """
        self.graphs = tuple(graphs)
        self.demand = None if demand is None else list(demand)
        self.total = total
        self.num_arcs = len(graphs[0].tail)
        self.num_ranks = len(graphs[0].ranks)
        self.first_root = self.num_arcs * len(self.graphs)
        self.num_variables = self.first_root + self.num_ranks
        self.effort = 0.0
        self.seen: set[tuple[int, bytes]] = set()
        #: Of each set: coefficients of variables whose sum must be at least the number.
        self.rows: list[tuple[dict[int, int], int]] = []
        ranks = set(graphs[0].ranks.tolist())
        switches = [v for v in range(graphs[0].num_vertices) if v not in ranks]
        self.balance = [
            {
                phase * self.num_arcs + a: 1 if graph.head[a] == v else -1
                for a in np.flatnonzero((graph.head == v) | (graph.tail == v)).tolist()
            }
            for phase, graph in enumerate(self.graphs)
            for v in switches
        ]
        for vertex in graphs[0].ranks.tolist():
            alone = np.zeros(graphs[0].num_vertices, dtype=np.bool_)
            alone[vertex] = True
            for phase in range(len(self.graphs)):
                self.add(phase, alone)
                self.add(phase, ~alone)

    def add(self, phase: int, side: BoolArray) -> bool:
        """Demand that what is rooted outside a set enters it; whether that is new."""
        key = (phase, side.tobytes())
        if key in self.seen:
            return False
        self.seen.add(key)
        graph = self.graphs[phase]
        entering = np.flatnonzero(~side[graph.tail] & side[graph.head]).tolist()
        row = {phase * self.num_arcs + a: 1 for a in entering}
        inside = np.flatnonzero(side[graph.ranks]).tolist()
        if inside:
            self.rows.append((row | {self.first_root + r: 1 for r in inside}, self.total))
        return bool(inside)

    def add_violated(self, values: Sequence[float], grain: int) -> bool:
        """Add the sets that an answer violates; whether there were any new ones."""
        whole = [max(0, round(v * grain)) for v in values]
        demand = as_int64(whole[self.first_root :])
        allowed = 0 if grain == 1 else _TOLERANCE * float(demand.sum())
        added = False
        for phase, graph in enumerate(self.graphs):
            part = as_int64(whole[phase * self.num_arcs : (phase + 1) * self.num_arcs])
            deficit, side = graph.check(part, demand)
            for j in np.flatnonzero(deficit > allowed).tolist():
                added |= self.add(phase, side[j])
        return added

    def ask(self, capacity: IntArray) -> tuple[Verdict, Units | None]:
        """Whether units within these capacities hold the forests, and which."""
        if len(self.graphs) * self.num_arcs * self.num_ranks > _LARGEST:
            return "unknown", None
        limits = np.tile(capacity, len(self.graphs))
        self.relax(limits, capacity)
        while True:
            verdict, values = self.decide(limits, capacity)
            if values is None:
                return verdict, None
            if not self.add_violated(values, 1):
                parts = tuple(
                    np.array(values[p * self.num_arcs : (p + 1) * self.num_arcs], dtype=np.int64)
                    for p in range(len(self.graphs))
                )
                return "yes", Units(demand=np.array(values[self.first_root :], dtype=np.int64), parts=parts)

    def relax(self, limits: IntArray, capacity: IntArray) -> None:
        """Collect the sets that the linear relaxation needs."""
        from scipy.optimize import linprog

        upper = [*limits.tolist(), *([self.total] * self.num_ranks)]
        lower = [0] * self.num_variables
        if self.demand is not None:
            lower[self.first_root :] = upper[self.first_root :] = self.demand
        equal = [*((row, 0) for row in self.balance), (self.roots_row(), self.total)]
        while True:
            at_most = [({v: -a for v, a in row.items()}, -least) for row, least in self.rows]
            if len(self.graphs) > 1:
                at_most += [(self.link_row(a), int(c)) for a, c in enumerate(capacity.tolist())]
            result = linprog(
                np.concatenate([np.full(self.first_root, -1.0), np.zeros(self.num_ranks)]),
                A_ub=self.matrix([row for row, _ in at_most]),
                b_ub=[most for _, most in at_most],
                A_eq=self.matrix([row for row, _ in equal]),
                b_eq=[value for _, value in equal],
                bounds=list(zip(lower, upper, strict=True)),
                method="highs-ds",
            )
            if result.x is None or not self.add_violated(result.x.tolist(), 1 << 30):
                return

    def decide(self, limits: IntArray, capacity: IntArray) -> tuple[Verdict, list[int] | None]:
        """An answer in whole numbers that satisfies the sets known so far."""
        cp_model = cp_sat("a forest for a given k")
        model = cp_model.CpModel()
        variables = [model.new_int_var(0, most, "") for most in limits.tolist()]
        if self.demand is None:
            variables += [model.new_int_var(0, self.total, "") for _ in range(self.num_ranks)]
        else:
            variables += [model.new_constant(value) for value in self.demand]

        def total_of(row: dict[int, int]) -> Any:
            return cp_model.LinearExpr.weighted_sum([variables[v] for v in row], list(row.values()))

        for row in self.balance:
            model.add(total_of(row) == 0)
        for row, least in self.rows:
            model.add(total_of(row) >= least)
        if len(self.graphs) > 1:
            for a, c in enumerate(capacity.tolist()):
                model.add(total_of(self.link_row(a)) <= c)
        model.add(total_of(self.roots_row()) == self.total)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.max_deterministic_time = max(0.01, min(_EFFORT, _TOTAL_EFFORT - self.effort))
        status = solve(solver, model)
        self.effort += solver.response_proto.deterministic_time
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return "yes", [solver.value(v) for v in variables]
        return ("no" if status == cp_model.INFEASIBLE else "unknown"), None

    def link_row(self, arc: int) -> dict[int, int]:
        """Both directions of a link."""
        return {phase * self.num_arcs + arc: 1 for phase in range(len(self.graphs))}

    def roots_row(self) -> dict[int, int]:
        """All demands."""
        return {self.first_root + rank: 1 for rank in range(self.num_ranks)}

    def matrix(self, rows: Sequence[dict[int, int]]) -> Any:
        from scipy.sparse import csr_array

        start = np.cumsum([0, *(len(row) for row in rows)])
        column = np.array([v for row in rows for v in row], dtype=np.int32)
        value = np.array([a for row in rows for a in row.values()], dtype=np.float64)
        return csr_array((value, column, start), shape=(len(rows), self.num_variables))


def least_scale(
    ask: Callable[[IntArray], tuple[Verdict, Units | None]],
    capacity: Sequence[int],
    *,
    low: Fraction,
    high: Fraction,
) -> tuple[Units | None, bool]:
    """Units within the whole parts of the capacities at the least scale for which there are any.

    Args:
        ask: says whether whole units of each link hold the forests, as ``UnitProgramme.ask``.
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
