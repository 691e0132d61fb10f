"""Times that no plan of a micro-batch, or of a step, is below.

With ``t_k(d)`` the microseconds of sequence ``k`` on ``d`` ranks and ``N`` ranks: the longest sequence takes its best
group; and all of them take ``sum_k min_d d t_k(d)`` of rank-time, of which there is ``N`` times the time. Kinds of
groups on which a sequence alone takes longer than that time cannot be meant, so the bound is the least time that
suffices with the kinds that fit into it. A division has only some kinds, so that its own bound is higher.
"""

from __future__ import annotations

import numpy as np

from mycel.planning.grouping.batch import Batch, Floats
from mycel.planning.grouping.kernels import areas

__all__ = ["batch_bound", "division_bounds", "step_bound"]


def division_bounds(batch: Batch) -> Floats:
    """What no distribution of the batch over the groups of each division is below, of shape (divisions,).

    Microseconds of work, without what every micro-batch takes; infinite where a sequence does not fit.

    Args:
        batch: the sequences.
    """
    counts = batch.divisions.counts
    masks, inverse = np.unique(counts > 0, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    ranks = counts @ batch.sizes
    rooms = counts @ batch.rooms
    work = np.where(batch.fits(), batch.work, np.inf)
    longest, area = np.zeros(len(masks)), np.zeros(len(masks))
    areas(work, batch.sizes, masks, longest, area)
    least = np.maximum(longest[inverse], area[inverse] / ranks)
    least[rooms < batch.tokens.sum()] = np.inf
    return least


def batch_bound(batch: Batch) -> float:
    """Microseconds that no plan of the batch in one micro-batch is below.

    Args:
        batch: the sequences.
    """
    work = np.where(batch.fits(), batch.work, np.inf)
    ranks = batch.instance.num_ranks
    low = float(work.min(axis=1).max())

    def suffices(time: float) -> bool:
        allowed = np.where(work <= time, work * batch.sizes, np.inf)
        return float(allowed.min(axis=1).sum()) <= time * ranks

    if not suffices(low):
        # The more time, the more kinds and the less rank-time: what does not suffice rules out all that is less.
        high = 2 * low
        while not suffices(high):
            low, high = high, 2 * high
        while high - low > 1e-10 * high:
            middle = 0.5 * (low + high)
            low, high = (low, middle) if suffices(middle) else (middle, high)
    return low + batch.instance.us_per_step


def step_bound(batch: Batch, num_micro_batches: int) -> float:
    """Microseconds that no plan of the sequences in exactly so many micro-batches is below.

    Args:
        batch: all sequences of the step.
        num_micro_batches: none of which is empty.
    """
    if num_micro_batches == 1:
        return batch_bound(batch)
    work = np.where(batch.fits(), batch.work, np.inf)
    shortest = work.min(axis=1)
    area = float((work * batch.sizes).min(axis=1).sum()) / batch.instance.num_ranks
    # One has the longest, and each of the others at least one sequence: the ones that are done soonest.
    others = float(np.sort(shortest)[: num_micro_batches - 1].sum())
    return num_micro_batches * batch.instance.us_per_step + max(area, float(shortest.max()) + others)
