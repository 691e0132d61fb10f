"""The linear programme under the bounds: what each set of trees gets of every link, its cuts found by flows.

Trees of one kind (a *phase*: those that copy, those that add up, those that span certain switches) need a part ``c``
of the links. They exist iff ``c`` is balanced at the switches that they pass through, which neither copy nor add, and
no set of vertices is short of what has its root outside (Edmonds). So, with a root's rate ``x`` as an unknown, all
phases together are one linear programme:

    maximise   gain of x
    subject to sum of c over the phases <= capacity,   each c balanced at the switches its trees do not span
               x(outside B) <= c(into B)                for every phase and every set B of vertices
               what the caller adds, such as: as much is added up at a root as is spread from there

There are too many sets for all of them. How it goes:

1. Solve with the cuts known so far, in floating point (HiGHS). The solution only says which constraints are tight.
2. Let flows find the sets that this solution violates, and begin again with those; none means that it is optimal.
3. Solve the tight constraints in fractions, and check every constraint of the result by integer flows.
4. Round the prices to fractions. Whatever they were rounded to, they prove a bound, by weak duality.

A large fabric is solved by classes of links, or roots, that look alike: one unknown serves for all of a class. What
it finds is checked on the whole fabric, link by link. Whether it is the most there is, prices of links have to show
there (``mycel.collectives.tree_prices``): its cuts alone prove nothing where links look alike and are not.

A large programme converges by steps between the best point known to be feasible and the optimum of the cuts so far:
cuts that refuse the point half way are deeper than those that refuse the optimum, a vertex.

References:
    J. Edmonds, "Edge-disjoint branchings", 1973. R. E. Gomory, T. C. Hu, "Multi-terminal network flows", 1961
    (programmes whose violated constraints are found by flows). W. Ben-Ameur, J. Neto, "Acceleration of cutting-plane
    and column generation algorithms: applications to network design", Networks 49(1), 2007 (cuts between a point
    inside and one outside).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import inf, lcm
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mycel.collectives.maxflow import BoolArray, FlowGraph, IntArray, as_int64, shortfalls
from mycel.errors import SynthesisError
from mycel.topology.model import Topology

__all__ = ["TOLERANCE", "Cut", "CuttingPlanes", "Phase", "Row", "Solution", "clip", "unbalanced_switches"]

#: Of the floating-point solver, in units of the largest capacity.
TOLERANCE = 1e-9
#: Within which constraints count as tight, tried in turn until the exact solution passes its verification.
_TOLERANCES = (TOLERANCE, 100 * TOLERANCE, TOLERANCE / 100, 1e4 * TOLERANCE)
#: Denominators to which prices are rounded in turn, before the exact bound that they prove is worked out.
_DENOMINATORS = (1, 2, 6, 12, 60, 840, 10**4, 10**6)
#: Rows times variables that are spent on the optimum itself, beside what a point close to it took.
_MORE_WORK = 5_000_000
#: Part of a solution that is left out before it is rounded.
_ROOM = 1e-6
#: Of a variable that no tight constraint determines.
_FREE_DENOMINATOR = 10**6
#: More variables than so many are counted by numpy.
_MANY = 64

#: Coefficients by variable.
Row = dict[int, int]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Phase:
    """Trees that share a part of the links.

    Attributes:
        graph: the fabric in their direction, arcs in the order of its links; its ``ranks`` are what they span.
        first_arc: variable of the first arc's part; the others follow.
        roots: variable of the rate of each vertex that they span, as a root; shape ``[spanned]``.
        weights: how often that rate counts for this root; shape ``[spanned]``.
    """

    graph: FlowGraph
    first_arc: int
    roots: IntArray
    weights: IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cut:
    """What enters a set of vertices is at least what has its root outside.

    Attributes:
        entering: variables of the links into it, each with how many links it stands for.
        outside: variables of the roots outside, each with how often it counts.
    """

    entering: Row
    outside: Row


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solution:
    """Of the programme with the cuts known so far.

    Attributes:
        rate: what it gains.
        values: of all variables, in units of the largest capacity.
        cut_prices: dual value of each cut, not positive.
        potentials: dual value of each balance.
        link_prices: dual value of each link's capacity, or class of links', not negative; of several phases.
        is_optimal: no cut is violated, known or not.
        inside: values of all variables that violate no cut, and are the best such found; empty if none was given.
    """

    rate: float
    values: npt.NDArray[np.float64]
    cut_prices: tuple[float, ...]
    potentials: tuple[float, ...]
    link_prices: npt.NDArray[np.float64]
    is_optimal: bool = False
    inside: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))


class CuttingPlanes:
    """The programme, and the cuts found so far.

    Args:
        phases: which trees share the links.
        capacity: of each link, or of a link of each class.
        gain: what each variable counts for, by variable.
        purpose: what the programme does, for messages: "balances switches".
        equal: further rows that must be zero, each the sum of some roots less that of others.
        arc_class: class of each link; each is its own by default.
        sinks: vertices whose cuts are looked for; by default all that a phase spans.
        is_mirrored: two phases, one the other turned round: what one violates is demanded of both, since most
            fabrics are nearly symmetric. It saves half of the rounds.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        capacity: Sequence[int],
        gain: Row,
        purpose: str,
        *,
        equal: Sequence[Row] = (),
        arc_class: IntArray | None = None,
        sinks: IntArray | None = None,
        is_mirrored: bool = False,
    ) -> None:
        self.phases, self.capacity, self.gain, self.purpose = tuple(phases), list(capacity), gain, purpose
        self.meetings, self.is_mirrored = list(equal), is_mirrored
        self.arc_class = np.arange(len(capacity), dtype=np.int64) if arc_class is None else arc_class
        self.sinks = [phase.graph.ranks if sinks is None else sinks for phase in phases]
        self.scale = float(max(capacity))
        self.first_arcs = [phase.first_arc for phase in phases]
        self.num_variables = 1 + max(
            *(first + len(capacity) - 1 for first in self.first_arcs), *(int(phase.roots.max()) for phase in phases)
        )
        #: How many roots, by weight, each variable stands for.
        self.mass = np.max(
            [np.bincount(p.roots, weights=p.weights, minlength=self.num_variables) for p in phases], axis=0
        )
        self.balances = self._balances()
        self.cuts: list[Cut] = []
        self._rows: list[Row] = []
        self._seen: set[tuple[tuple[tuple[int, int], ...], ...]] = set()

    def _balances(self) -> list[Row]:
        """For each phase and switch that its trees pass through: what enters it, less what leaves it."""
        rows: dict[tuple[tuple[int, int], ...], Row] = {}
        classes = self.arc_class.tolist()
        for phase in self.phases:
            spanned = set(phase.graph.ranks.tolist())
            net: list[Row] = [{} for _ in range(phase.graph.num_vertices)]
            for ends, sign in ((phase.graph.head, 1), (phase.graph.tail, -1)):
                for vertex, number in zip(ends.tolist(), classes, strict=True):
                    variable = phase.first_arc + number
                    net[vertex][variable] = net[vertex].get(variable, 0) + sign
            for vertex, row in enumerate(net):
                items = tuple(sorted(item for item in row.items() if item[1]))
                if vertex not in spanned and items:
                    rows[items] = dict(items)  # classes give some switches the same row
        return list(rows.values())

    # -- cuts -----------------------------------------------------------------------------------------------------

    def add_single(self, phase: int, vertices: Iterable[int], *, both_sides: bool = True) -> None:
        """The cuts around single vertices, to begin with; on request also those around all others."""
        for vertex in vertices:
            alone = np.zeros(self.phases[phase].graph.num_vertices, dtype=np.bool_)
            alone[vertex] = True
            self.add(phase, alone)
            if both_sides:
                self.add(phase, ~alone)

    def add(self, number: int, side: BoolArray) -> bool:
        """Demand that what has its root outside ``side`` enters it, in one phase; whether that is new."""
        phase, graph = self.phases[number], self.phases[number].graph
        out = ~side[graph.ranks]
        if out.all():  # a set without a vertex that is spanned needs nothing
            return False
        entering = _count(phase.first_arc + self.arc_class[~side[graph.tail] & side[graph.head]])
        outside = _count(phase.roots[out], phase.weights[out])
        key = (tuple(entering.items()), tuple(outside.items()))
        if not outside or key in self._seen:
            return False
        self._seen.add(key)
        self.cuts.append(Cut(entering=entering, outside=outside))
        self._rows.append({v: -count for v, count in entering.items()} | outside)
        return True

    def add_violated(self, values: Sequence[float], *, grain: int = 1 << 40, tolerance: float = TOLERANCE) -> bool:
        """Add the cuts that values violate; whether there were any new ones.

        Args:
            values: of all variables.
            grain: what they are multiplied with, and then rounded to whole numbers for the flows.
            tolerance: part of all that is demanded which may be missing.
        """
        allowed = tolerance * grain * max(float(self.mass @ np.asarray(values)), 1e-3)
        added = False
        for number, phase in enumerate(self.phases):
            part, rates = self.of_phase(values, phase)
            flow = as_int64(np.maximum(0.0, np.rint(np.array(part) * grain)).astype(int).tolist())
            demand = as_int64(np.maximum(0.0, np.rint(np.array(rates) * phase.weights * grain)).astype(int).tolist())
            network, source = phase.graph.with_source(flow, demand), phase.graph.num_vertices
            deficit, side = shortfalls(source + 1, *network, source, self.sinks[number], int(demand.sum()))
            for j in np.flatnonzero(deficit > allowed).tolist():
                added |= self.add(number, side[j])
                if self.is_mirrored:
                    self.add(1 - number, side[j])
        return added

    # -- the optimum, in floating point ---------------------------------------------------------------------------

    def optimise(self, *, enough: float = -inf, most_work: float = inf, most_rounds: float = inf) -> Solution:
        """Solve and add cuts until none is violated.

        Args:
            enough: a rate at which to stop: the cuts so far allow no more than that.
            most_work: rows times variables, summed over the rounds, after which to stop. (Not seconds: every rank
                must come to the same answer.)
            most_rounds: the same for rounds.

        Raises:
            SynthesisError: a linear programme was not solved.
        """
        work, rounds = 0, 0
        while True:
            work, rounds = work + len(self.cuts) * self.num_variables, rounds + 1
            found = self.solve()
            if found.rate <= enough:
                return found
            if not self.add_violated(found.values.tolist()):
                return replace(found, is_optimal=True)
            if work > most_work or rounds >= most_rounds:
                return found

    def approach(
        self, inside: npt.NDArray[np.float64], *, enough: float, close: float, most_work: float = inf
    ) -> Solution:
        """Solve and add cuts, from a point that violates none, until the best such is close to the optimum.

        Args:
            inside: values of all variables that violate no cut.
            enough: a rate at which to stop: the cuts so far allow no more than that.
            close: part of the optimum that the point inside may lack. From then on the optimum itself is tried.
            most_work: as for ``optimise``.

        Raises:
            SynthesisError: a linear programme was not solved.
        """
        work = 0
        while True:
            work += len(self.cuts) * self.num_variables
            found = self.solve()
            while self.rate(inside) < found.rate * (1 - close):
                middle = (inside + found.values) / 2
                if self.add_violated(middle.tolist()):
                    break
                inside = middle
            else:
                most_work = min(most_work, 2 * work + _MORE_WORK)  # the first time, which leaves the least
                if not self.add_violated(found.values.tolist()):
                    return replace(found, inside=inside, is_optimal=True)
            if found.rate <= enough or work > most_work:
                return replace(found, inside=inside)

    def rate(self, values: npt.NDArray[np.float64]) -> float:
        """What values gain."""
        return self.scale * sum(gain * float(values[variable]) for variable, gain in self.gain.items())

    def solve(self) -> Solution:
        """The optimum over the cuts known so far."""
        # Half of the import time of the plan side.
        from scipy.optimize import linprog

        objective = np.zeros(self.num_variables)
        for variable, gain in self.gain.items():
            objective[variable] = -gain
        limits = np.array(self.capacity, dtype=np.float64) / self.scale
        rows, most, upper = self._rows, np.zeros(len(self._rows)), np.full(self.num_variables, inf)
        if len(self.phases) == 1:
            upper[self.first_arcs[0] : self.first_arcs[0] + len(limits)] = limits
        else:
            rows, most = [*rows, *map(self.shared, range(len(limits)))], np.concatenate([most, limits])
        equal = [*self.balances, *self.meetings]
        result = linprog(
            objective,
            A_ub=self.matrix(rows),
            b_ub=most,
            A_eq=self.matrix(equal) if equal else None,
            b_eq=np.zeros(len(equal)) if equal else None,
            bounds=np.column_stack([np.zeros(self.num_variables), upper]),
            method="highs-ds",
            options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
        )
        if result.x is None:
            raise SynthesisError(f"the linear programme that {self.purpose} failed: {result.message}")
        return Solution(
            rate=-float(objective @ result.x) * self.scale,
            values=result.x,
            cut_prices=tuple(result.ineqlin.marginals[: len(self._rows)].tolist()),
            potentials=tuple(result.eqlin.marginals[: len(self.balances)].tolist()) if equal else (),
            link_prices=np.maximum(0.0, -result.ineqlin.marginals[len(self._rows) :]),
        )

    def shared(self, arc: int) -> Row:
        """What all phases have of a link."""
        return {first + arc: 1 for first in self.first_arcs}

    def matrix(self, rows: Sequence[Row]) -> Any:
        """Rows as a sparse matrix."""
        from scipy.sparse import csr_array

        start = np.cumsum([0, *(len(row) for row in rows)])
        column = np.array([v for row in rows for v in row], dtype=np.int32)
        value = np.array([a for row in rows for a in row.values()], dtype=np.float64)
        return csr_array((value, column, start), shape=(len(rows), self.num_variables))

    # -- exactly --------------------------------------------------------------------------------------------------

    def make_exact(self, values: npt.NDArray[np.float64]) -> list[Fraction]:
        """The vertex of the programme that a floating-point solution is near, verified by exact flows.

        Raises:
            SynthesisError: no tolerance led to one.
        """
        problem: SynthesisError | None = None
        for tolerance in _TOLERANCES:
            exact = self._nearest_vertex(values, tolerance)
            try:
                self.verify(exact)
            except SynthesisError as error:
                problem = error
            else:
                return exact
        assert problem is not None
        raise problem

    def _nearest_vertex(self, values: npt.NDArray[np.float64], tolerance: float) -> list[Fraction]:
        """The solution, in fractions, of the constraints that are tight within a tolerance.

        One more variable, fixed to 1, carries the capacities, so that all equations are homogeneous.
        """
        one = self.num_variables
        fixed = {v: Fraction(0) for v in np.flatnonzero(values <= tolerance).tolist()} | {one: Fraction(1)}
        tight = [*self.balances, *self.meetings]
        for arc, c in enumerate(self.capacity):
            if sum(values[first + arc] for first in self.first_arcs) >= c / self.scale - tolerance:
                tight.append({**self.shared(arc), one: -c})
        left = np.abs(self.matrix(self._rows) @ values)
        tight += [self._rows[row] for row in np.flatnonzero(left <= 10 * tolerance).tolist()]
        guess = [Fraction(v * self.scale).limit_denominator(_FREE_DENOMINATOR) for v in values.tolist()]
        equations = [{v: Fraction(a) for v, a in row.items()} for row in tight]
        return _solve_exactly(equations, fixed, [*guess, Fraction(1)])[:one]

    def balanced_near(self, values: npt.NDArray[np.float64], grain: int) -> list[Fraction] | None:
        """Parts of links near a solution, in few fractions and balanced at switches; ``None`` where they do not fit.

        Args:
            values: of all variables; a hair less is taken, so that rounding has room.
            grain: how many parts of a unit of capacity there are.
        """
        one = self.num_variables
        guess = [Fraction(int(v * self.scale * grain * (1 - _ROOM)), grain) for v in values.tolist()]
        balances = [{v: Fraction(a) for v, a in row.items()} for row in self.balances]
        exact = _solve_exactly(balances, {one: Fraction(1)}, [*guess, Fraction(1)])[:one]
        loads = (sum(exact[first + arc] for first in self.first_arcs) for arc in range(len(self.capacity)))
        fits = min(exact) >= 0 and all(load <= c for load, c in zip(loads, self.capacity, strict=True))
        return exact if fits else None

    def verify(self, exact: Sequence[Fraction]) -> None:
        """Check an exact solution against every constraint, by integer flows.

        Raises:
            SynthesisError: it violates one.
        """
        unit = lcm(*(v.denominator for v in exact))
        whole = [int(v * unit) for v in exact]
        loads = (sum(whole[first + arc] for first in self.first_arcs) for arc in range(len(self.capacity)))
        problem = None
        if min(whole) < 0 or any(load > c * unit for load, c in zip(loads, self.capacity, strict=True)):
            problem = "a link is overused"
        elif not sum(gain * whole[v] for v, gain in self.gain.items()):
            problem = "nothing is carried"
        elif any(sum(a * whole[v] for v, a in row.items()) for row in self.meetings):
            problem = "shares of a root differ"
        for phase in () if problem else self.phases:
            part, rates = self.of_phase(whole, phase)
            demand = [x * w for x, w in zip(rates, phase.weights.tolist(), strict=True)]
            if unbalanced_switches(phase.graph, part):
                problem = "a switch is unbalanced"
            elif phase.graph.check(as_int64(part), as_int64(demand))[0].any():
                problem = "a cut is short"
        if problem:
            raise SynthesisError(f"the linear programme that {self.purpose} could not be made exact: {problem}")

    def of_phase(self, values: Sequence[T], phase: Phase) -> tuple[tuple[T, ...], tuple[T, ...]]:
        """What a phase has of every link, and the rate of every root, of all variables' values."""
        part = tuple(values[v] for v in (phase.first_arc + self.arc_class).tolist())
        return part, tuple(values[v] for v in phase.roots.tolist())

    # -- the bound that prices prove ------------------------------------------------------------------------------

    def price_bound(self, solution: Solution) -> tuple[Fraction, tuple[int, ...]]:
        """The lowest rate that the prices prove to be the most, over several roundings of them to fractions.

        Returns:
            The rate, and the links that have a price.

        Raises:
            SynthesisError: no rounding proves anything.
        """
        top = max((-y for y in solution.cut_prices), default=0.0)
        best: tuple[Fraction, tuple[int, ...]] | None = None
        for denominator in _DENOMINATORS if top else ():
            cut = [Fraction(max(0.0, -y) / top).limit_denominator(denominator) for y in solution.cut_prices]
            potential = [Fraction(z / top).limit_denominator(denominator) for z in solution.potentials]
            found = self._priced(cut, potential)
            if found is not None and (best is None or found[0] < best[0]):
                best = found
        if best is None:
            raise SynthesisError(f"the linear programme that {self.purpose} gave no dual solution")
        arcs = np.isin(self.arc_class, best[1])
        return best[0], tuple(np.flatnonzero(arcs).tolist())

    def _priced(
        self, cut: Sequence[Fraction], potential: Sequence[Fraction]
    ) -> tuple[Fraction, tuple[int, ...]] | None:
        """Sum the constraints at these prices: (links at the dearest of their prices) / (what a unit gained pays).

        What the cuts pay the second roots of a meeting may be credited to the first: at most the least of it, since
        how they share it is free.
        """
        price = [Fraction(0)] * self.num_variables
        paid = [Fraction(0)] * self.num_variables
        for y, constraint in zip(cut, self.cuts, strict=False):  # cuts added since have no price
            if y:
                for v, number in constraint.outside.items():
                    paid[v] += y * number
                for v, number in constraint.entering.items():
                    price[v] += y * number
        for z, row in zip(potential, self.balances, strict=True):
            if z:
                for v, sign in row.items():
                    price[v] += z * sign
        for row in self.meetings:
            credit = min((paid[v] for v, sign in row.items() if sign < 0), default=Fraction(0))
            for v, sign in row.items():
                paid[v] += credit if sign > 0 else 0
        least = min(paid[v] / gain for v, gain in self.gain.items())
        if least <= 0:
            return None
        each = [max(Fraction(0), *(price[v] for v in self.shared(arc))) for arc in range(len(self.capacity))]
        total = sum((p * c for p, c in zip(each, self.capacity, strict=True)), Fraction(0))
        return total / least, tuple(arc for arc, p in enumerate(each) if p)


def clip(topology: Topology, *, most_edges: int) -> list[int]:
    """Each link's capacity, without what trees of so many edges can never use.

    A tree crosses a link at most once for each of its edges, and no rate is above what every rank can send and
    receive, twice. Clipping keeps the numbers of the programme within a few orders of magnitude of each other.
    """
    sent, received = ([0] * len(topology.vertices) for _ in range(2))
    for link in topology.links:
        sent[link.src] += link.capacity
        received[link.dst] += link.capacity
    least = min(side[rank] for side in (sent, received) for rank in topology.ranks)
    return [min(link.capacity, 2 * most_edges * least) for link in topology.links]


def unbalanced_switches(graph: FlowGraph, capacity: Sequence[int]) -> list[int]:
    """Switches whose capacities in and out differ."""
    excess = [0] * graph.num_vertices
    for tail, head, c in zip(graph.tail.tolist(), graph.head.tolist(), capacity, strict=True):
        excess[head] += c
        excess[tail] -= c
    ranks = set(graph.ranks.tolist())
    return [v for v in range(graph.num_vertices) if v not in ranks and excess[v]]


def _count(variables: IntArray, weights: IntArray | None = None) -> Row:
    """How often each occurs, or its weights' sum where that is not zero; ascending."""
    found: Row = {}
    if len(variables) > _MANY:
        each, place, counts = np.unique(variables, return_inverse=True, return_counts=True)
        if weights is not None:
            counts = np.zeros(len(each), dtype=np.int64)
            np.add.at(counts, place, weights)
        return {variable: number for variable, number in zip(each.tolist(), counts.tolist(), strict=True) if number}
    numbers = [1] * len(variables) if weights is None else weights.tolist()
    for variable, number in zip(variables.tolist(), numbers, strict=True):  # few: quicker than numpy's
        if number:
            found[variable] = found.get(variable, 0) + number
    return dict(sorted(found.items()))


def _solve_exactly(
    equations: list[dict[int, Fraction]], fixed: dict[int, Fraction], guess: list[Fraction]
) -> list[Fraction]:
    """Gauss-Jordan elimination of homogeneous equations; variables that stay free keep their guess."""
    pivots: dict[int, tuple[dict[int, Fraction], Fraction]] = {}
    for equation in equations:
        row = {v: a for v, a in equation.items() if v not in fixed}
        constant = -sum((a * fixed[v] for v, a in equation.items() if v in fixed), Fraction(0))
        for variable in [v for v in row if v in pivots]:
            constant = _subtract(row, constant, row[variable], pivots[variable])
        if not row:
            continue  # redundant, or contradictory by the tolerance that chose it: verification decides
        pivot = max(row)
        factor = row[pivot]
        done = ({v: a / factor for v, a in row.items()}, constant / factor)
        for other, (their_row, their_constant) in pivots.items():
            if pivot in their_row:
                pivots[other] = (their_row, _subtract(their_row, their_constant, their_row[pivot], done))
        pivots[pivot] = done
    solution = [fixed.get(v, guess[v]) for v in range(len(guess))]
    for pivot, (row, constant) in pivots.items():
        solution[pivot] = constant - sum((a * solution[v] for v, a in row.items() if v != pivot), Fraction(0))
    return solution


def _subtract(
    row: dict[int, Fraction], constant: Fraction, factor: Fraction, other: tuple[dict[int, Fraction], Fraction]
) -> Fraction:
    """``row -= factor * other`` in place; the new constant."""
    for v, a in other[0].items():
        value = row.get(v, Fraction(0)) - factor * a
        if value:
            row[v] = value
        else:
            row.pop(v, None)
    return constant - factor * other[1]
