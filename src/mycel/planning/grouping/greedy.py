"""The dual greedy: guess the time, give each sequence the least rank-time that it allows, and halve the guesses.

A group that is larger than a sequence needs makes it shorter and takes more of what ranks there are, as exchanges
grow. So for a time that is guessed, the longest sequence first takes the kind of group on which the product of ranks
and time is least and which ends in time; of groups of that kind the fullest that fits. If all find a place the guess
was long enough. Done for every division of the ranks, the promising ones first, until so much has been looked at:
the same on every rank, as no clock is asked. Exchanges of pairs end it, and plans of one degree stand for election
too.
"""

from __future__ import annotations

import numpy as np

from mycel.planning.grouping.batch import Batch, Division
from mycel.planning.grouping.bounds import division_bounds
from mycel.planning.grouping.kernels import areas, best_of, lightest_first, settle
from mycel.planning.grouping.static import SETTLED, static_divisions

__all__ = ["dual_greedy", "ready"]

#: Places that are looked at before no further division is; some 20 ms.
PATIENCE = 8_000_000


def dual_greedy(batch: Batch, *, patience: int = PATIENCE) -> Division | None:
    """The batch over groups of mixed sizes, or of one where that is better.

    Args:
        batch: the sequences.
        patience: places that may be looked at before no further division is.

    Returns:
        The best found; ``None`` where the sequences do not fit so.
    """
    beta = batch.instance.us_per_step
    best = min(static_divisions(batch), key=lambda division: division.time_us, default=None)
    least = division_bounds(batch)
    rows = np.flatnonzero(np.isfinite(least))
    rows = rows[np.argsort(least[rows], kind="stable")]
    if not len(rows):
        return best
    counts = np.ascontiguousarray(batch.divisions.counts[rows])
    placed = np.zeros(len(batch.which), dtype=np.int64)
    most = np.inf if best is None else best.time_us - beta
    time, row = best_of(
        batch.work, batch.tokens, batch.ranked, batch.rooms, counts, least[rows], most, patience, placed
    )
    if row < 0:
        return best
    time = settle(batch.work, batch.tokens, batch.rooms, batch.kind_of(counts[row]), placed, SETTLED)
    return Division(time_us=time + beta, row=int(rows[row]), counts=counts[row], placed=placed, source="dual greedy")


def ready() -> None:
    """Have the loops compiled, or loaded, before a step waits for them."""
    one = np.ones((1, 1))
    whole = np.ones((1, 1), dtype=np.int64)
    flat = np.ones(1, dtype=np.int64)
    areas(one, flat, whole == 1, np.zeros(1), np.zeros(1))
    lightest_first(one, flat, flat, flat * 0, flat * 0)
    best_of(one, flat, whole * 0, flat, whole, np.zeros(1), np.inf, 1, flat * 0)
    settle(one, flat, flat, flat * 0, flat * 0, 1)
