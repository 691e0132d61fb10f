"""Switches that receive more than they can send on, or the reverse: which part of each link is of use.

A switch forwards and neither copies nor adds, so what enters it leaves it. Where its links in and out do not add
up to the same capacity, the cut bound can promise what no schedule delivers. The exact optimum is a linear
programme: capacities ``c <= b``, balanced at every switch, that make the cut bound over ``c`` as good as possible.
It is solved with cuts generated as they are violated, in floating point (HiGHS); the answer is then made exact in
rationals and checked by exact flows, and optimality is proved by a cut of ``b`` or by the rounded dual, whose
value is a bound by weak duality no matter how it was rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, lcm

import numpy as np
import numpy.typing as npt

from mycel.collectives.maxflow import FlowGraph, as_int64
from mycel.errors import SynthesisError

__all__ = ["Balanced", "balance", "best_price", "solve_exactly", "unbalanced_switches", "vertex_near"]

#: Denominators to which dual prices are rounded in turn, before the exact bound they prove is worked out.
_DENOMINATORS = (1, 2, 6, 12, 60, 840, 10**4, 10**6)

_TOLERANCE = 1e-9
_ROUNDS = 500


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Balanced:
    """Balanced capacities and the rate they allow.

    Attributes:
        x: units a second each unit of weight can be sent at, over ``capacities``; exact and verified by flows.
        capacities: of each arc, balanced at every switch.
        x_limit: proved upper bound of ``x`` over all balanced capacities; equal to ``x`` in every case known.
        binding: arcs with a positive price in the dual solution behind ``x_limit``.
    """

    x: Fraction
    capacities: tuple[Fraction, ...]
    x_limit: Fraction
    binding: tuple[int, ...]


def unbalanced_switches(graph: FlowGraph, capacity: Sequence[int]) -> list[int]:
    """Switches whose capacities in and out differ."""
    excess = [0] * graph.num_vertices
    for tail, head, c in zip(graph.tail.tolist(), graph.head.tolist(), capacity, strict=True):
        excess[head] += c
        excess[tail] -= c
    ranks = set(graph.ranks.tolist())
    return [v for v in range(graph.num_vertices) if v not in ranks and excess[v]]


def balance(graph: FlowGraph, capacity: Sequence[int], weights: Sequence[int], *, x_cut: Fraction) -> Balanced:
    """The best capacities that are balanced at switches.

    Args:
        graph: the fabric, oriented so that data spreads along its arcs.
        capacity: of each arc.
        weights: share of each rank as a root, integers, not all zero.
        x_cut: an upper bound of the rate, from the cuts of ``capacity``.

    Raises:
        SynthesisError: no balanced part of the capacities connects the ranks, or the floating-point optimum could
            not be made exact.
    """
    # A forest of rate x crosses a link at most once for each edge of each tree. Clipping what can never be used keeps
    # the numbers of the programme within a few orders of magnitude of each other.
    useful = ceil((len(weights) - 1) * sum(weights) * x_cut)
    programme = _Programme(graph, [min(c, useful) for c in capacity], weights)
    for _ in range(_ROUNDS):
        values, prices = programme.solve()
        if not programme.add_violated(values):
            break
    else:
        raise SynthesisError(f"balancing the switches took more than {_ROUNDS} rounds of cuts")
    if values[-1] <= _TOLERANCE:
        raise SynthesisError("no part of the links that is balanced at every switch connects all ranks")
    x, capacities = programme.make_exact(values)
    x_limit, binding = programme.price_bound(prices)
    return Balanced(x=x, capacities=tuple(capacities), x_limit=x_limit, binding=binding)


class _Programme:
    """maximise x, subject to x (W - w(B)) <= c(arcs into B) for cuts B, balance at switches, 0 <= c <= b."""

    def __init__(self, graph: FlowGraph, capacity: Sequence[int], weights: Sequence[int]) -> None:
        self.graph = graph
        self.capacity = list(capacity)
        self.weights = list(weights)
        self.num_arcs = len(self.capacity)
        self.scale = float(max(self.capacity))
        ranks = set(graph.ranks.tolist())
        self.switches = [v for v in range(graph.num_vertices) if v not in ranks]
        self.balance_rows = np.zeros((len(self.switches), self.num_arcs + 1))
        for row, v in enumerate(self.switches):
            self.balance_rows[row, :-1] = (graph.head == v).astype(float) - (graph.tail == v).astype(float)
        self.sides: list[npt.NDArray[np.bool_]] = []
        self.rows: list[npt.NDArray[np.float64]] = []
        self.seen: set[bytes] = set()
        for rank, vertex in enumerate(graph.ranks.tolist()):
            if self.weights[rank] < sum(self.weights):
                side = np.zeros(graph.num_vertices, dtype=np.bool_)
                side[vertex] = True
                self.add(side)

    def add(self, side: npt.NDArray[np.bool_]) -> bool:
        key = side.tobytes()
        if key in self.seen:
            return False
        self.seen.add(key)
        self.sides.append(side.copy())
        self.rows.append(np.append(-self.entering(side).astype(float), self.missing(side)))
        return True

    def entering(self, side: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        return ~side[self.graph.tail] & side[self.graph.head]

    def missing(self, side: npt.NDArray[np.bool_]) -> int:
        """Weight of the roots outside the set."""
        inside = side[self.graph.ranks].tolist()
        return sum(w for w, i in zip(self.weights, inside, strict=True) if not i)

    def solve(self) -> tuple[npt.NDArray[np.float64], tuple[list[float], list[float]]]:
        """Optimum over the cuts known so far (capacities in units of the largest), and its prices."""
        # Half of the import time of the plan side, and needed for unbalanced switches only.
        from scipy.optimize import linprog

        objective = np.zeros(self.num_arcs + 1)
        objective[-1] = -1.0
        result = linprog(
            objective,
            A_ub=np.array(self.rows),
            b_ub=np.zeros(len(self.rows)),
            A_eq=self.balance_rows if self.switches else None,
            b_eq=np.zeros(len(self.switches)) if self.switches else None,
            bounds=[(0.0, c / self.scale) for c in self.capacity] + [(0.0, None)],
            method="highs-ds",
            options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
        )
        if result.x is None:
            raise SynthesisError(f"the linear programme that balances switches failed: {result.message}")
        equality = result.eqlin.marginals.tolist() if self.switches else []
        return result.x, (result.ineqlin.marginals.tolist(), equality)

    def add_violated(self, values: npt.NDArray[np.float64]) -> bool:
        """Add the cuts that the solution violates; whether there were any new ones."""
        grain = 1 << 40
        capacity = as_int64([max(0, round(v * grain)) for v in values[:-1]])
        demand = as_int64([round(float(values[-1]) * w * grain) for w in self.weights])
        deficit, side = self.graph.check(capacity, demand)
        allowed = _TOLERANCE * grain * max(float(values[-1]) * sum(self.weights), 1e-3)
        added = [self.add(side[j]) for j in np.flatnonzero(deficit > allowed).tolist()]
        return any(added)

    def make_exact(self, values: npt.NDArray[np.float64]) -> tuple[Fraction, list[Fraction]]:
        """The vertex of the programme that the floating-point solution is near, verified by exact flows."""
        problem: SynthesisError | None = None
        for tolerance in (_TOLERANCE, 100 * _TOLERANCE, _TOLERANCE / 100, 1e4 * _TOLERANCE):
            x, capacities = self.nearest_vertex(values, tolerance)
            try:
                self.verify(x, capacities)
            except SynthesisError as error:
                problem = error
            else:
                return x, capacities
        assert problem is not None
        raise problem

    def nearest_vertex(self, values: npt.NDArray[np.float64], tolerance: float) -> tuple[Fraction, list[Fraction]]:
        """The solution, in fractions, of the constraints that are tight within a tolerance."""
        fixed: dict[int, Fraction] = {}
        for arc, c in enumerate(self.capacity):
            if values[arc] <= tolerance:
                fixed[arc] = Fraction(0)
            elif values[arc] >= c / self.scale - tolerance:
                fixed[arc] = Fraction(c)
        equations = [
            {arc: Fraction(int(row[arc])) for arc in np.flatnonzero(row).tolist()} for row in self.balance_rows
        ]
        for side, row in zip(self.sides, self.rows, strict=True):
            if abs(float(row @ values)) <= 10 * tolerance * max(1.0, self.missing(side)):
                tight = {arc: Fraction(-1) for arc in np.flatnonzero(self.entering(side)).tolist()}
                tight[self.num_arcs] = Fraction(self.missing(side))
                equations.append(tight)
        guess = [Fraction(float(v) * self.scale).limit_denominator(10**6) for v in values]
        solution = solve_exactly(equations, fixed, guess)
        return solution[-1], solution[:-1]

    def verify(self, x: Fraction, capacities: Sequence[Fraction]) -> None:
        unit = lcm(x.denominator, *(c.denominator for c in capacities))
        whole = [int(c * unit) for c in capacities]
        in_range = all(0 <= c <= b for c, b in zip(capacities, self.capacity, strict=True)) and x > 0
        if not in_range or unbalanced_switches(self.graph, whole):
            raise SynthesisError("the balanced capacities could not be made exact")
        demand = as_int64([int(x * unit) * w for w in self.weights])
        if self.graph.check(as_int64(whole), demand)[0].any():
            raise SynthesisError("the balanced capacities could not be made exact: a cut is short")

    def price_bound(self, prices: tuple[list[float], list[float]]) -> tuple[Fraction, tuple[int, ...]]:
        """Exact bound from the dual solution: cut prices y >= 0 and any switch potentials give one."""
        return best_price(prices, self._price, "balances switches")

    def _price(self, cut: list[Fraction], potential: list[Fraction]) -> tuple[Fraction, tuple[int, ...]] | None:
        weight = sum((y * self.missing(side) for y, side in zip(cut, self.sides, strict=True)), Fraction(0))
        if not weight:
            return None
        entering = [Fraction(0)] * self.num_arcs
        for y, side in zip(cut, self.sides, strict=True):
            if y:
                for arc in np.flatnonzero(self.entering(side)).tolist():
                    entering[arc] += y
        level = dict(zip(self.switches, potential, strict=True))
        bounds: list[tuple[Fraction, tuple[int, ...]]] = []
        for sign in (1, -1):  # solvers differ in the sign they give equality multipliers; both are valid bounds
            arcs = zip(self.graph.tail.tolist(), self.graph.head.tolist(), entering, strict=True)
            price = [e + sign * (level.get(h, Fraction(0)) - level.get(t, Fraction(0))) for t, h, e in arcs]
            total = sum((p * c for p, c in zip(price, self.capacity, strict=True) if p > 0), Fraction(0))
            bounds.append((total / weight, tuple(arc for arc, p in enumerate(price) if p > 0)))
        return min(bounds)


def solve_exactly(
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


def best_price(
    prices: tuple[list[float], list[float]],
    priced: Callable[[list[Fraction], list[Fraction]], tuple[Fraction, tuple[int, ...]] | None],
    purpose: str,
) -> tuple[Fraction, tuple[int, ...]]:
    """The lowest bound that a dual solution proves, over several roundings of it to fractions.

    Args:
        prices: dual values of the cuts (not positive) and of the switches' balance, as the solver gives them.
        priced: from exact cut prices and switch potentials to the bound they prove and the arcs that bind.
        purpose: what the programme does, for the message.

    Raises:
        SynthesisError: no rounding proves anything.
    """
    top = max((-y for y in prices[0]), default=0.0)
    best: tuple[Fraction, tuple[int, ...]] | None = None
    for denominator in _DENOMINATORS:
        cut_price = [Fraction(max(0.0, -y) / top).limit_denominator(denominator) for y in prices[0]]
        potential = [Fraction(z / top).limit_denominator(denominator) for z in prices[1]]
        found = priced(cut_price, potential)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    if best is None:
        raise SynthesisError(f"the linear programme that {purpose} gave no dual solution")
    return best


def vertex_near(
    nearest: Callable[[float], list[Fraction]], verify: Callable[[list[Fraction]], None], tolerance: float
) -> list[Fraction]:
    """The first exact solution that passes its verification, of those that different tolerances lead to.

    Args:
        nearest: the solution of the constraints that are tight within a tolerance.
        verify: raises ``SynthesisError`` for one that is wrong.
        tolerance: of the floating-point solver; coarser and finer ones are tried after it.

    Raises:
        SynthesisError: no tolerance led to one.
    """
    problem: SynthesisError | None = None
    for allowed in (tolerance, 100 * tolerance, tolerance / 100, 1e4 * tolerance):
        exact = nearest(allowed)
        try:
            verify(exact)
        except SynthesisError as error:
            problem = error
        else:
            return exact
    assert problem is not None
    raise problem
