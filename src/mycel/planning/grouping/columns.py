"""What no division is below when groups are filled as wholes: prices of sequences by column generation.

Within a time ``T`` a group of a kind holds certain sets of sequences. Give each sequence a price ``p``; a group of
kind ``k`` then holds at most what the knapsack ``K_k(p)`` is worth, in which times and tokens are the weights. Where
``sum_i p_i > sum_k count_k K_k(p)`` no distribution over the division ends within ``T``, whichever the prices, and
the same prices often rule out other divisions. Good prices are duals of a linear programme over sets that were found
so far (columns), to which knapsacks add those that are worth more than a group costs. Unlike a bound by rank-time it
sees that two sequences of three fifths of a group do not fit into one.

References:
    P. Gilmore, R. Gomory, "A linear programming approach to the cutting-stock problem", Operations Research 9 (1961).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from mycel.pipeline.search.solving import Clock
from mycel.planning.grouping.batch import Batch, Floats, Ints
from mycel.planning.grouping.knapsack import fullest
from mycel.planning.grouping.plan import SequencePlan

__all__ = ["Columns"]

#: Places that a knapsack looks at; parts of a group in its table. By more where the first find nothing.
_PLACES, _CELLS, _LONGER = 20_000, 1 << 12, 10
#: Part of a group's worth below which nothing is gained.
_SLACK = 1e-7


@dataclass(kw_only=True)
class Columns:
    """Sets of sequences that groups may hold, and what they prove.

    Attributes:
        batch: all sequences of a step of one micro-batch.
    """

    batch: Batch
    _found: list[tuple[int, Ints, float]] = field(default_factory=list, init=False, repr=False)
    _seen: set[tuple[int, bytes]] = field(default_factory=set, init=False, repr=False)

    @cached_property
    def _items(self) -> tuple[Ints, Ints, Floats]:
        """Different lengths, how many sequences have each, and its microseconds on each kind."""
        tokens, first, many = np.unique(self.batch.tokens, return_index=True, return_counts=True)
        return tokens[::-1].copy(), many[::-1].astype(np.int64), self.batch.work[first][::-1].copy()

    def add(self, plan: SequencePlan) -> None:
        """The sets of a plan.

        Args:
            plan: of one micro-batch.
        """
        instance = self.batch.instance
        tokens, _, _ = self._items
        costs = {(c.size if c.ranks is None else frozenset(c.ranks)): c for c in instance.candidates}
        for group in plan.groups:
            candidate = costs.get(frozenset(group.ranks)) or costs[len(group.ranks)]
            kind = instance.kinds.index((candidate.size, float(candidate.comm_us_per_token)))
            held = Counter(instance.lengths[k] for k in group.sequences)
            self._keep(kind, np.array([held[int(each)] for each in tokens], dtype=np.int64))

    def _keep(self, kind: int, column: Ints) -> bool:
        key = (kind, column.tobytes())
        if key in self._seen:
            return False
        self._seen.add(key)
        self._found.append((kind, column.copy(), float(column @ self._items[2][:, kind])))
        return True

    def spread(self, counts: Ints, most: float) -> float:
        """Microseconds that no distribution over a division is below where sequences may be cut: a linear programme.

        Args:
            counts: groups of each kind.
            most: microseconds; sequences are on no kind where one alone takes longer.
        """
        from scipy.optimize import linprog
        from scipy.sparse import csr_array

        tokens, many, work = self._items
        kinds = np.flatnonzero(counts)
        rooms = self.batch.rooms[kinds]
        allowed = (work[:, kinds] <= most) & (tokens[:, None] <= rooms)
        item, kind = np.nonzero(allowed)
        if len(np.unique(item)) < len(tokens):
            return float("inf")
        places = np.arange(len(item))
        # Times in parts of the most, tokens in parts of a group; the last variable is the time.
        takes = many[item] * work[item, kinds[kind]] / most
        holds = many[item] * tokens[item] / rooms[kind]
        last = np.full(len(kinds), len(item))
        rows = np.concatenate([kind, np.arange(len(kinds)), len(kinds) + kind])
        columns = np.concatenate([places, last, places])
        values = np.concatenate([takes, -counts[kinds].astype(float), holds])
        shape = (2 * len(kinds), len(item) + 1)
        cost = np.zeros(len(item) + 1)
        cost[-1] = 1.0
        found = linprog(
            cost,
            A_ub=csr_array((values, (rows, columns)), shape=shape),
            b_ub=np.concatenate([np.zeros(len(kinds)), counts[kinds]]),
            A_eq=csr_array((np.ones(len(item)), (item, places)), shape=(len(tokens), len(item) + 1)),
            b_eq=np.ones(len(tokens)),
            method="highs",
        )
        if found.status == 2:
            return float("inf")
        if found.status:
            return 0.0
        # The bound is of the duals, whatever the solver's rounding: each sequence at the kind that is cheapest.
        prices = -np.minimum(found.ineqlin.marginals, 0.0)
        of_time, of_room = prices[: len(kinds)], prices[len(kinds) :]
        unit = float(of_time @ counts[kinds])
        if unit <= 0:
            return 0.0
        ratio = of_time * (work[:, kinds] / most) + of_room * (tokens[:, None] / rooms)
        cheapest = np.where(allowed, ratio, np.inf).min(axis=1)
        return float(cheapest @ many - of_room @ counts[kinds]) / unit * most

    def _fullest(self, prices: Floats, kind: int, most: float, above: float, longer: int = 1) -> tuple[float, Ints]:
        tokens, many, work = self._items
        column = np.zeros(len(tokens), dtype=np.int64)
        room = float(self.batch.rooms[kind])
        worth = fullest(
            work[:, kind] / most, tokens / room, prices, many, above, _PLACES * longer, _CELLS * longer, column
        )
        return worth, column

    def rule_out(self, counts: Ints, most: float, clock: Clock) -> tuple[Ints, Floats]:
        """Which divisions end in no distribution in time, and where the rest meets; finds sets for the rest.

        Args:
            counts: groups of each kind, a row a division.
            most: microseconds that a group works at most.
            clock: ends it.

        Returns:
            Which are ruled out, of shape (divisions,); and parts of the divisions, at most 1 in all, whose mixture
            has room for all sequences, each 0 where there is none or time ran out.
        """
        _, many, work = self._items
        # What a sequence that finds no place costs: about the ranks that it takes.
        missing = np.maximum((work * self.batch.sizes).min(axis=1) / most, 1e-9)
        master = _Master(many, missing, counts)
        for kind, column, load in self._found:
            if load <= most * (1 + 1e-11):
                master.put(kind, column)
        out = np.zeros(len(counts), dtype=bool)
        nowhere = np.zeros(len(counts))
        center, center_worth, longer = missing, None, 1
        best = 0.0
        while clock.left_s > 0:
            prices, worth, parts = master.solve()
            if parts is not None:
                return out, parts
            has_new = False
            # Prices jump from one side to the other; halfway to the best so far they need fewer steps.
            for is_near in (True, False):
                used, above = prices, worth
                if is_near:
                    if longer > 1:
                        continue
                    used = 0.5 * (prices + center)
                    above = worth if center_worth is None else 0.5 * (worth + center_worth)
                sure = np.zeros(counts.shape[1])
                for kind in np.flatnonzero(counts[~out].any(axis=0)).tolist():
                    least = max(float(above[kind]), 1e-12) * (1 + _SLACK)
                    sure[kind], column = self._fullest(used, kind, most, least, longer)
                    is_worth = float(prices @ column) > float(worth[kind]) * (1 + _SLACK)
                    if is_worth and self._keep(kind, column):
                        master.put(kind, column)
                        has_new = True
                holds = counts[~out] @ sure
                ratio = float(used @ many) / max(float(holds.max()), 1e-12)
                if ratio > best:
                    best, center, center_worth = ratio, used, sure
                more = ~out
                more[more] = float(used @ many) > holds * (1 + 1e-9)
                if more.any():
                    master.leave_out(np.flatnonzero(more))
                    out |= more
                    best = 0.0
                    has_new = True
                    if out.all():
                        return out, nowhere
                if has_new:
                    break
            if not has_new:
                if longer > 1:
                    break
                longer = _LONGER
        return out, nowhere


class _Master:
    """The linear programme of sets: least cost of what finds no place in the groups of a mixture of divisions."""

    def __init__(self, many: Ints, missing: Floats, counts: Ints) -> None:
        from ortools.linear_solver import pywraplp

        self._solver: Any = pywraplp.Solver.CreateSolver("GLOP")
        self._infinity = self._solver.infinity()
        self._objective = self._solver.Objective()
        self._objective.SetMinimization()
        self._covered = [self._solver.Constraint(float(each), self._infinity) for each in many]
        for row, cost in zip(self._covered, missing.tolist(), strict=True):
            left = self._solver.NumVar(0.0, self._infinity, "")
            row.SetCoefficient(left, 1.0)
            self._objective.SetCoefficient(left, cost)
        self._groups = [self._solver.Constraint(-self._infinity, 0.0) for _ in range(counts.shape[1])]
        whole = self._solver.Constraint(-self._infinity, 1.0)
        self._parts = []
        for division in counts.tolist():
            part = self._solver.NumVar(0.0, 1.0, "")
            whole.SetCoefficient(part, 1.0)
            for row, count in zip(self._groups, division, strict=True):
                if count:
                    row.SetCoefficient(part, -float(count))
            self._parts.append(part)

    def put(self, kind: int, column: Ints) -> None:
        taken = self._solver.NumVar(0.0, self._infinity, "")
        self._groups[kind].SetCoefficient(taken, 1.0)
        for i in np.flatnonzero(column).tolist():
            self._covered[i].SetCoefficient(taken, float(column[i]))

    def leave_out(self, rows: Ints) -> None:
        for row in rows.tolist():
            self._parts[row].SetBounds(0.0, 0.0)

    def solve(self) -> tuple[Floats, Floats, Floats | None]:
        """Prices of sequences and of groups, and parts of the divisions where every sequence finds a place."""
        self._solver.Solve()
        prices = np.array([max(0.0, row.dual_value()) for row in self._covered])
        worth = np.array([max(0.0, -row.dual_value()) for row in self._groups])
        if self._objective.Value() > 1e-7:
            return prices, worth, None
        return prices, worth, np.array([part.solution_value() for part in self._parts])
