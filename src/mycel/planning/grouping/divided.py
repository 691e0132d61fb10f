"""A step of one micro-batch exactly, division by division: those whose bound a plan meets need no search.

Few divisions are left once a good plan is known: prices of time and tokens rule out most, sets of sequences all but
some of the rest (``columns``). With the groups given what remains is distributing sequences over them: a small model.
Each gets a slice of the time in turn, and longer ones in later rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mycel.pipeline.search.solving import Clock
from mycel.planning.grouping.batch import Batch, Floats, Ints
from mycel.planning.grouping.bounds import division_bounds
from mycel.planning.grouping.columns import Columns
from mycel.planning.grouping.exact import MOST_VARIABLES, Exact
from mycel.planning.grouping.instance import Candidate, SequenceInstance
from mycel.planning.grouping.kernels import priced
from mycel.planning.grouping.plan import PROVED, SequencePlan

__all__ = ["Divided"]

#: Seconds of a division in the first round at least, and of all divisions of what time there is; by how much more in
#: each further round.
_SLICE_S, _SHARE, _LONGER = 0.5, 0.3, 3.0
#: Divisions that are priced at a time, as many places as that may look at in a round, and how often prices change.
_CHUNK, _PLACES, _ROUNDS = 64, 2_000_000, 100
#: Different lengths beyond which one linear programme takes too long to begin with.
_MOST_LENGTHS = 2000
#: Parts of the time: for prices and sets, and of that for each step; seconds of a mixture of divisions at least.
_PRICING, _STEP, _MIXED_S = 0.6, 0.3, 1.0
#: Part of a time to which a bound is raised by halving.
_FINE = 2e-5


@dataclass(kw_only=True)
class Divided:
    """What is known of an instance's divisions; more of it with each call.

    Attributes:
        instance: of one micro-batch, whose divisions are all known.
    """

    instance: SequenceInstance

    @cached_property
    def _batch(self) -> Batch:
        return Batch.of(self.instance)

    @cached_property
    def _columns(self) -> Columns:
        return Columns(batch=self._batch)

    @cached_property
    def _least(self) -> Floats:
        """Microseconds of work that no distribution over each division is below."""
        return division_bounds(self._batch)

    def _goal(self, known: SequencePlan) -> float:
        """Work of which a plan would be better than the known one."""
        return known.total_us * (1 - PROVED) - self.instance.us_per_step

    def _bound(self, known: SequencePlan) -> float:
        return min(known.total_us, float(self._least.min()) + self.instance.us_per_step)

    def _open(self, known: SequencePlan) -> list[int]:
        """Divisions that may have a better plan, the promising ones first."""
        rows = np.flatnonzero(self._least < self._goal(known))
        return [int(row) for row in rows[np.argsort(self._least[rows], kind="stable")]]

    def improve(
        self, known: SequencePlan, clock: Clock, told: Callable[[SequencePlan, float], None]
    ) -> tuple[SequencePlan, float]:
        """The best plan found and a bound.

        Args:
            known: a plan to improve on.
            clock: ends it.
            told: is called with the plan and the bound after each step.
        """
        self._price(known, clock, told)
        beta, least = self.instance.us_per_step, self._least
        seconds = max(_SLICE_S, _SHARE * clock.left_s / max(1, len(self._open(known))))
        while True:
            told(known, self._bound(known))
            rows = self._open(known)
            if not rows or clock.left_s <= 0:
                return known, self._bound(known)
            hopeless = True
            for row in rows:
                if clock.left_s <= 0:
                    break
                if least[row] >= self._goal(known):
                    continue
                groups = _groups_of(self._batch, row)
                bound = float(least[row]) + beta
                model = Exact(instance=self.instance, known=known, bound_us=bound, only=groups)
                if model.num_variables > MOST_VARIABLES:
                    continue
                hopeless = False
                plan, found, _ = model.solve(clock, most_s=seconds)
                least[row] = max(float(least[row]), found - beta)
                if plan is not None and plan.total_us < known.total_us:
                    known = plan
                    told(known, self._bound(known))
            if hopeless:
                return known, self._bound(known)
            seconds *= _LONGER

    def _price(self, known: SequencePlan, clock: Clock, told: Callable[[SequencePlan, float], None]) -> None:
        """Bounds of divisions by prices and sets."""
        batch, least, columns = self._batch, self._least, self._columns
        counts = batch.divisions.counts
        columns.add(known)
        rows = self._open(known)
        many = max(1, min(_CHUNK, _PLACES // batch.work.size))
        for begin in range(0, len(rows), many):
            if clock.left_s <= 0:
                break
            chunk = rows[begin : begin + many]
            mine = least[chunk]
            priced(
                batch.work, batch.tokens, batch.sizes, batch.rooms, counts[chunk], self._goal(known), _ROUNDS, mine
            )
            least[chunk] = mine
        told(known, self._bound(known))
        if len(set(self.instance.lengths)) > _MOST_LENGTHS:
            return
        inner = clock.within(_PRICING * clock.left_s)
        part = inner.within(_STEP * inner.left_s)
        for row in self._open(known):
            if part.left_s <= 0:
                break
            least[row] = max(least[row], columns.spread(counts[row], self._goal(known)))
        told(known, self._bound(known))
        _left(columns, counts, least, self._goal(known), inner.within(_STEP * inner.left_s))
        told(known, self._bound(known))
        _raise(columns, counts, least, self._goal(known), inner, lambda: told(known, self._bound(known)))


def _left(
    columns: Columns, counts: Ints, least: Floats, most: float, clock: Clock, *, is_first_enough: bool = False
) -> Ints:
    """Divisions that sets of sequences do not rule out; bounds of the others are raised.

    Of all together first; where a mixture of them has room, on both sides of a number of groups of a kind apart.
    """
    left: list[int] = []
    waiting = [np.flatnonzero(least < most)]
    while waiting and clock.left_s > 0 and not (left and is_first_enough):
        rows = waiting.pop()
        rows = rows[least[rows] < most]
        if not len(rows):
            continue
        out, parts = columns.rule_out(counts[rows], most, clock.within(max(_MIXED_S, _STEP * clock.left_s)))
        least[rows[out]] = most
        rows, parts = rows[~out], parts[~out]
        if len(rows) == 1:
            left.append(int(rows[0]))
        elif len(rows):
            waiting += _halves(counts[rows], rows, parts)
    return np.array([*left, *(row for rows in reversed(waiting) for row in rows.tolist())], dtype=np.int64)


def _raise(columns: Columns, counts: Ints, least: Floats, most: float, clock: Clock, say: Callable[[], None]) -> None:
    """Bounds of all divisions to the longest time that sets rule out, by halving."""
    low, high = float(least.min()), most
    while high - low > _FINE * high and clock.left_s > 0:
        middle = 0.5 * (low + high)
        part = clock.within(_STEP * clock.left_s)
        if len(_left(columns, counts, least, middle, part, is_first_enough=True)):
            high = middle
        else:
            low = middle
            say()


def _halves(counts: Ints, rows: Ints, parts: Floats) -> list[Ints]:
    """The divisions with few groups of a kind and those with many, the side with more of the mixture last."""
    if not parts.any():
        parts = np.full(len(rows), 1 / len(rows))
    mean = parts @ counts / parts.sum()
    # The kind of which a part has most and another least.
    apart = np.sqrt(parts @ (counts - mean) ** 2) + 1e-9 * np.ptp(counts, axis=0)
    kind = int(np.argmax(apart))
    at = min(np.floor(mean[kind]), counts[:, kind].max() - 1)
    few = counts[:, kind] <= max(at, counts[:, kind].min())
    sides = [few, ~few]
    return [rows[side] for side in sorted(sides, key=lambda side: float(parts[side].sum()))]


def _groups_of(batch: Batch, row: int) -> tuple[tuple[Candidate, int], ...]:
    """Candidates of a division, and how often each is there."""
    instance, divisions = batch.instance, batch.divisions
    if divisions.chosen:
        return tuple((instance.candidates[index], 1) for index in divisions.chosen[row])
    by_size = {candidate.size: candidate for candidate in instance.candidates}
    return tuple(
        (by_size[size], int(count))
        for (size, _), count in zip(divisions.kinds, divisions.counts[row], strict=True)
        if count
    )
