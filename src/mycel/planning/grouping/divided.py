"""A step of one micro-batch exactly, division by division: those whose bound a plan meets need no search.

Few divisions are left once a good plan is known, and with the groups given what remains is distributing sequences
over them: a small model. Each gets a slice of the time in turn, and longer ones in later rounds.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mycel.pipeline.search.solving import Clock
from mycel.planning.grouping.batch import Batch
from mycel.planning.grouping.bounds import division_bounds, weighted_bound
from mycel.planning.grouping.exact import MOST_VARIABLES, Exact
from mycel.planning.grouping.instance import Candidate, SequenceInstance
from mycel.planning.grouping.plan import PROVED, SequencePlan

__all__ = ["improve_by_divisions"]

#: Seconds of a division in the first round at least, and of all divisions of what time there is; by how much more in
#: each further round.
_SLICE_S, _SHARE, _LONGER = 0.5, 0.3, 3.0


def improve_by_divisions(
    instance: SequenceInstance, known: SequencePlan, clock: Clock, told: Callable[[SequencePlan, float], None]
) -> tuple[SequencePlan, float]:
    """The best plan found and a bound, of one micro-batch.

    Args:
        instance: whose divisions are all known.
        known: a plan to improve on.
        clock: ends it.
        told: is called with the plan and the bound after each division.
    """
    batch = Batch.of(instance)
    beta = instance.us_per_step
    plain = division_bounds(batch) + beta
    rows = np.flatnonzero(plain < known.total_us * (1 - PROVED)).tolist()
    least = {row: max(float(plain[row]), weighted_bound(batch, row, known.total_us - beta) + beta) for row in rows}
    # What needs no search may still be below the plan by what counts as proved.
    rest = min([known.total_us, *(float(bound) for row, bound in enumerate(plain) if row not in least)])
    seconds = max(_SLICE_S, _SHARE * clock.left_s / max(1, len(rows)))
    while True:
        bound = min([known.total_us, rest, *least.values()])
        told(known, bound)
        if bound >= known.total_us * (1 - PROVED) or clock.left_s <= 0:
            return known, bound
        hopeless = True
        for row in sorted(least, key=least.__getitem__):
            if clock.left_s <= 0:
                break
            if least[row] >= known.total_us * (1 - PROVED):
                continue
            model = Exact(instance=instance, known=known, bound_us=least[row], only=_groups_of(batch, row))
            if model.num_variables > MOST_VARIABLES:
                continue
            hopeless = False
            plan, found, _ = model.solve(clock, most_s=seconds)
            least[row] = max(least[row], found)
            if plan is not None and plan.total_us < known.total_us:
                known = plan
                told(known, min([known.total_us, rest, *least.values()]))
        if hopeless:
            return known, bound
        seconds *= _LONGER


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
