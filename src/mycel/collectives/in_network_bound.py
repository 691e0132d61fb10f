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

Cuts are generated as flows find them violated; floating point only says which constraints are tight (see
``mycel.collectives.allreduce_bound``, which is the case without such switches).

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
from math import lcm
from typing import Any

import numpy as np

from mycel.collectives.balance import best_price, solve_exactly, unbalanced_switches, vertex_near
from mycel.collectives.maxflow import BoolArray, FlowGraph, as_int64
from mycel.errors import SynthesisError
from mycel.topology.model import Topology

__all__ = ["NetworkDivision", "Phase", "divide_with_switches"]

_log = logging.getLogger(__name__)

_TOLERANCE = 1e-9
#: Computing switches up to which each set of them has its phases; the programme has two for each set.
_MOST_SUBSETS = 2
#: Rows times variables, first of one programme and then of all that are solved one after the other, up to which a
#: fabric is treated (see ``allreduce_bound``).
_LARGEST = 8_000_000
_WORK = 60_000_000

Row = dict[int, int]


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
    computing = topology.nodes[topology.num_ranks :]
    if not computing:
        return NetworkDivision(limit=without)
    counts = range(len(computing) + 1) if len(computing) <= _MOST_SUBSETS else (0, len(computing))
    sets = list(chain.from_iterable(combinations(computing, count) for count in counts))
    if _is_too_large(topology, len(sets)):
        return _through_all(topology, computing, without)
    whole = _Programme(topology, [(is_reversed, s) for s in sets for is_reversed in (False, True)])
    solved = whole.optimum()
    if solved is None:
        return _through_all(topology, computing, without)
    if solved[0] <= float(without) * (1 + _TOLERANCE):
        return NetworkDivision(limit=without)
    rate, values, prices = solved
    limit, binding = best_price(prices, whole.priced, "divides the links between phases")
    # Few phases make few trees: first one set for both directions, then those sets that the solution uses.
    used = whole.used_phases(values)
    tries = [[(is_reversed, s) for is_reversed in (False, True)] for s in reversed(sets)]
    tries += [used] if used not in tries else []
    for phases in [*tries, whole.phases]:
        part = whole if phases == whole.phases else _Programme(topology, phases)
        found = solved if part is whole else part.optimum()
        if found is None or found[0] < rate * (1 - 100 * _TOLERANCE):
            continue
        try:
            exact = part.make_exact(found[1])
        except SynthesisError as error:
            _log.info("%s: %s", topology.name, error)
            continue
        result = NetworkDivision(limit=limit, binding=binding, phases=part.as_phases(exact))
        if result.algbw > without:
            return result
    return NetworkDivision(limit=limit, binding=binding)


def _is_too_large(topology: Topology, num_sets: int) -> bool:
    size = len(topology.nodes)
    return 4 * num_sets * size * (2 * len(topology.links) + size) > _LARGEST


def _through_all(topology: Topology, computing: tuple[int, ...], without: Fraction) -> NetworkDivision:
    """What trees that all span every computing switch reach, if that is more than without them; no proof."""
    found = None
    if not _is_too_large(topology, 1):
        programme = _Programme(topology, [(False, computing), (True, computing)])
        found = programme.optimum()
    if found is not None and found[0] > float(without) * (1 + _TOLERANCE):
        try:
            division = NetworkDivision(limit=without, phases=programme.as_phases(programme.make_exact(found[1])))
        except SynthesisError as error:
            _log.info("%s: %s", topology.name, error)
        else:
            return replace(division, limit=division.algbw, is_proved=False)
    return NetworkDivision(limit=without, is_proved=False)


class _Programme:
    """Variables: phase by phase, the part of each arc and the share of each root.

    Args:
        topology: the fabric.
        phases: direction and spanned switches of each.
    """

    def __init__(self, topology: Topology, phases: Sequence[tuple[bool, tuple[int, ...]]]) -> None:
        self.phases = list(phases)
        self.num_arcs = len(topology.links)
        self.capacity = [link.capacity for link in topology.links]
        roots = [tuple(sorted((*topology.ranks, *switches))) for _, switches in phases]
        graphs = [FlowGraph.of(topology, is_reversed=is_reversed) for is_reversed, _ in phases]
        self.graphs = [
            FlowGraph(
                num_vertices=graph.num_vertices,
                ranks=np.array(mine, dtype=np.int64),
                tail=graph.tail,
                head=graph.head,
            )
            for graph, mine in zip(graphs, roots, strict=True)
        ]
        self.first_arc: list[int] = []
        self.first_root: list[int] = []
        size = 0
        for mine in roots:
            self.first_arc.append(size)
            self.first_root.append(size + self.num_arcs)
            size += self.num_arcs + len(mine)
        self.num_variables = size
        # A tree crosses a link at most once for each of its edges, and no rate is above what some rank can receive.
        graph = graphs[0]
        least = min(
            sum(c for c, v in zip(self.capacity, side.tolist(), strict=True) if v == rank)
            for side in (graph.tail, graph.head)
            for rank in topology.ranks
        )
        self.capacity = [min(c, 2 * len(topology.nodes) * least) for c in self.capacity]
        self.scale = float(max(self.capacity))
        self.balance_rows: list[Row] = []
        self.balance_of: list[int] = []
        for phase, (graph, mine) in enumerate(zip(self.graphs, roots, strict=True)):
            for vertex in set(topology.switches) - set(mine):
                arcs = np.flatnonzero((graph.head == vertex) | (graph.tail == vertex)).tolist()
                base = self.first_arc[phase]
                self.balance_rows.append({base + arc: 1 if graph.head[arc] == vertex else -1 for arc in arcs})
                self.balance_of.append(phase)
        self.meeting_rows: list[Row] = []
        for vertex in topology.nodes:
            row: Row = {}
            for phase, (is_reversed, _) in enumerate(self.phases):
                if vertex in roots[phase]:
                    row[self.first_root[phase] + roots[phase].index(vertex)] = -1 if is_reversed else 1
            self.meeting_rows.append(row)
        self.cuts: list[tuple[int, BoolArray]] = []
        self.rows: list[Row] = []
        self.seen: set[tuple[int, bytes]] = set()
        for phase, mine in enumerate(roots):
            for vertex in mine:
                alone = np.zeros(graph.num_vertices, dtype=np.bool_)
                alone[vertex] = True
                self.add(phase, alone)
                self.add(phase, ~alone)

    # -- rows -----------------------------------------------------------------------------------------------------

    def add(self, phase: int, side: BoolArray) -> bool:
        """Demand that what has its root outside ``side`` enters it; whether that is new."""
        key = (phase, side.tobytes())
        if key in self.seen:
            return False
        self.seen.add(key)
        row = {self.first_arc[phase] + arc: -1 for arc in self.entering(phase, side)}
        row |= {self.first_root[phase] + root: 1 for root in self.outside(phase, side)}
        self.cuts.append((phase, side.copy()))
        self.rows.append(row)
        return True

    def entering(self, phase: int, side: BoolArray) -> list[int]:
        graph = self.graphs[phase]
        entering: list[int] = np.flatnonzero(~side[graph.tail] & side[graph.head]).tolist()
        return entering

    def outside(self, phase: int, side: BoolArray) -> list[int]:
        """Roots outside the set, by position."""
        roots: list[int] = np.flatnonzero(~side[self.graphs[phase].ranks]).tolist()
        return roots

    def roots(self, phase: int) -> slice:
        return slice(self.first_root[phase], self.first_root[phase] + len(self.graphs[phase].ranks))

    def arcs(self, phase: int) -> slice:
        return slice(self.first_arc[phase], self.first_arc[phase] + self.num_arcs)

    # -- solving --------------------------------------------------------------------------------------------------

    def optimum(self) -> tuple[float, list[float], tuple[list[float], list[float]]] | None:
        """Rate, values in units of ``scale``, and prices of cuts and balances; ``None`` if it takes too much work."""
        work = 0
        while True:
            work += len(self.rows) * self.num_variables
            if work > _WORK:
                return None
            values, prices = self.solve()
            if not self.add_violated(values):
                spread = [
                    sum(values[self.roots(p)]) for p, (is_reversed, _) in enumerate(self.phases) if not is_reversed
                ]
                return sum(spread) * self.scale, values, prices

    def solve(self) -> tuple[list[float], tuple[list[float], list[float]]]:
        # Half of the import time of the plan side.
        from scipy.optimize import linprog

        objective = np.zeros(self.num_variables)
        for phase, (is_reversed, _) in enumerate(self.phases):
            objective[self.roots(phase)] = 0.0 if is_reversed else -1.0
        share = [{first + arc: 1 for first in self.first_arc} for arc in range(self.num_arcs)]
        capacity = np.array(self.capacity, dtype=np.float64) / self.scale
        equal = [*self.balance_rows, *self.meeting_rows]
        result = linprog(
            objective,
            A_ub=self.matrix([*self.rows, *share]),
            b_ub=np.concatenate([np.zeros(len(self.rows)), capacity]),
            A_eq=self.matrix(equal),
            b_eq=np.zeros(len(equal)),
            bounds=(0.0, None),
            method="highs-ds",
            options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
        )
        if result.x is None:
            raise SynthesisError(f"the linear programme that divides links between phases failed: {result.message}")
        balance = result.eqlin.marginals[: len(self.balance_rows)].tolist()
        return result.x.tolist(), (result.ineqlin.marginals[: len(self.rows)].tolist(), balance)

    def matrix(self, rows: Sequence[Row]) -> Any:
        from scipy.sparse import csr_array

        start = np.cumsum([0, *(len(row) for row in rows)])
        column = np.array([v for row in rows for v in row], dtype=np.int32)
        value = np.array([a for row in rows for a in row.values()], dtype=np.float64)
        return csr_array((value, column, start), shape=(len(rows), self.num_variables))

    def add_violated(self, values: Sequence[float]) -> bool:
        """Add the cuts that the solution violates; whether there were any new ones."""
        grain = 1 << 40
        total = sum(sum(values[self.roots(phase)]) for phase in range(len(self.phases)))
        added = False
        for phase, graph in enumerate(self.graphs):
            part, demand = (
                as_int64([max(0, round(v * grain)) for v in values[which]])
                for which in (self.arcs(phase), self.roots(phase))
            )
            deficit, side = graph.check(part, demand)
            for j in np.flatnonzero(deficit > _TOLERANCE * grain * max(total, 1e-3)).tolist():
                added |= self.add(phase, side[j])
        return added

    def used_phases(self, values: Sequence[float]) -> list[tuple[bool, tuple[int, ...]]]:
        """Phases with a share of the rate."""
        return [p for i, p in enumerate(self.phases) if sum(values[self.roots(i)]) > 1e3 * _TOLERANCE]

    # -- exactly --------------------------------------------------------------------------------------------------

    def make_exact(self, values: Sequence[float]) -> list[Fraction]:
        """The vertex of the programme that the floating-point solution is near, verified by exact flows.

        Raises:
            SynthesisError: no tolerance led to one.
        """
        return vertex_near(lambda tolerance: self.nearest_vertex(values, tolerance), self.verify, _TOLERANCE)

    def nearest_vertex(self, values: Sequence[float], tolerance: float) -> list[Fraction]:
        """The solution, in fractions, of the constraints that are tight within a tolerance."""
        fixed = {v: Fraction(0) for v in range(self.num_variables) if values[v] <= tolerance}
        one = self.num_variables
        fixed[one] = Fraction(1)
        tight = [*self.balance_rows, *self.meeting_rows]
        for arc, c in enumerate(self.capacity):
            if sum(values[first + arc] for first in self.first_arc) >= c / self.scale - tolerance:
                tight.append({**{first + arc: 1 for first in self.first_arc}, one: -c})
        tight += [row for row in self.rows if abs(sum(a * values[v] for v, a in row.items())) <= 10 * tolerance]
        guess = [Fraction(v * self.scale).limit_denominator(10**4) for v in values] + [Fraction(1)]
        equations = [{v: Fraction(a) for v, a in row.items()} for row in tight]
        return solve_exactly(equations, fixed, guess)[: self.num_variables]

    def verify(self, exact: Sequence[Fraction]) -> None:
        """Check an exact solution against every constraint, by integer flows.

        Raises:
            SynthesisError: it violates one.
        """
        unit = lcm(*(v.denominator for v in exact))
        whole = [int(v * unit) for v in exact]
        loads = zip(*(whole[self.arcs(phase)] for phase in range(len(self.phases))), strict=True)
        fits = all(sum(load) <= c * unit for load, c in zip(loads, self.capacity, strict=True))
        if min(whole) < 0 or not fits:
            raise SynthesisError("the division between phases could not be made exact: a link is overused")
        if any(sum(a * whole[v] for v, a in row.items()) for row in self.meeting_rows):
            raise SynthesisError("the division between phases could not be made exact: shares of a root differ")
        for phase, graph in enumerate(self.graphs):
            part = whole[self.arcs(phase)]
            if unbalanced_switches(graph, part):
                raise SynthesisError("the division between phases could not be made exact: a switch is unbalanced")
            if graph.check(as_int64(part), as_int64(whole[self.roots(phase)]))[0].any():
                raise SynthesisError("the division between phases could not be made exact: a cut is short")

    def as_phases(self, exact: Sequence[Fraction]) -> tuple[Phase, ...]:
        """An exact solution by phases, without those that carry nothing."""
        found = []
        for phase, (is_reversed, switches) in enumerate(self.phases):
            shares = dict(zip(self.graphs[phase].ranks.tolist(), exact[self.roots(phase)], strict=True))
            if any(shares.values()):
                part = tuple(exact[self.arcs(phase)])
                found.append(Phase(is_reversed=is_reversed, switches=switches, part=part, shares=shares))
        return tuple(found)

    def priced(self, cut: list[Fraction], potential: list[Fraction]) -> tuple[Fraction, tuple[int, ...]] | None:
        """The bound that prices of cuts and potentials of switches prove, and the links that it prices.

        What the cuts of a reducing phase pay a root may be credited to the same root of the spreading phases: at
        most the least of what the reducing phases pay it.
        """
        root = [dict.fromkeys(graph.ranks.tolist(), Fraction(0)) for graph in self.graphs]
        price = [[Fraction(0)] * self.num_arcs for _ in self.phases]
        for y, (phase, side) in zip(cut, self.cuts, strict=False):  # cuts added since have no price
            if y:
                for vertex in self.graphs[phase].ranks[~side[self.graphs[phase].ranks]].tolist():
                    root[phase][vertex] += y
                for arc in self.entering(phase, side):
                    price[phase][arc] += y
        for z, row, phase in zip(potential, self.balance_rows, self.balance_of, strict=True):
            if z:
                for v, sign in row.items():
                    price[phase][v - self.first_arc[phase]] += z * sign
        credit: dict[int, Fraction] = {}
        for (is_reversed, _), paid in zip(self.phases, root, strict=True):
            for vertex, y in paid.items() if is_reversed else ():
                credit[vertex] = min(credit.get(vertex, y), y)
        least = min(
            y + credit[vertex]
            for (is_reversed, _), paid in zip(self.phases, root, strict=True)
            for vertex, y in (paid.items() if not is_reversed else ())
        )
        if least <= 0:
            return None
        each = [max(Fraction(0), *prices) for prices in zip(*price, strict=True)]
        total = sum((p * c for p, c in zip(each, self.capacity, strict=True)), Fraction(0))
        return total / least, tuple(arc for arc, p in enumerate(each) if p)
