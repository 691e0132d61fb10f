"""CAGrad: near the mean gradient, the direction along which the task that improves least improves most.

The dual has weights on the simplex: the least ``w' G 1/K + c |g_0| sqrt(w' G w)``. The root is the least of
``(w' G w / t + t) / 2`` over ``t``; for a given ``t`` what remains is the point of a convex hull nearest to the
origin, that of the gradients moved by a multiple of their mean. The outer problem is convex in ``t``, and its
derivative's sign says on which side the answer is.

References:
    B. Liu et al., "Conflict-Averse Gradient Descent for Multi-task Learning", NeurIPS 2021, arXiv 2110.14048,
    section 3 and algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import numpy as np
import torch.distributed as dist

from mycel.data_parallel.combine.tasks.by_gram import ByGram
from mycel.data_parallel.combine.tasks.quadratic import Matrix, Vector, nearest_to_origin, scale_of
from mycel.errors import UsageError

__all__ = ["CAGrad"]

#: Halvings of where ``t`` may be: more than a float64 has digits.
_HALVINGS = 60


class CAGrad(ByGram):
    """The mean, moved by at most ``c`` times its length.

    Args:
        c: how far; 0 is the mean. Below 1 it converges to a minimum of the mean loss.
        tasks: number of each rank's task, by rank; by default every rank is a task.
        shards: ranks that hold the other shards of this replica, over which inner products are sums.

    Raises:
        UsageError: ``c`` is negative.

    Examples:
        >>> CAGrad(c=0.5).weights(np.array([[1.0, 0.0], [0.0, 1.0]])).round(6).tolist()
        [0.75, 0.75]
    """

    def __init__(
        self,
        c: float = 0.5,
        *,
        tasks: Sequence[int] | None = None,
        shards: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(tasks=tasks, shards=shards)
        if not c >= 0:
            raise UsageError(f"CAGrad with c {c}: how far from the mean, at least 0")
        self.c = c

    def weights(self, gram: Matrix) -> Vector:
        """See ``ByGram``."""
        size = len(gram)
        scaled = gram / scale_of(gram)
        mean = np.full(size, 1 / size)
        reach = self.c * sqrt(max(float(mean @ scaled @ mean), 0.0))
        if reach <= 1e-9:  # the mean is nothing, and so is what is near it
            return mean
        found = _worst(scaled, scaled @ mean, reach)
        length = sqrt(max(float(found @ scaled @ found), 0.0))
        if length <= 1e-6:  # no direction serves all tasks
            return mean
        moved: Vector = mean + reach / length * found
        return moved


def _worst(gram: Matrix, towards_mean: Vector, reach: float) -> Vector:
    """The weights that make ``w' towards_mean + reach sqrt(w' gram w)`` least."""
    low, high = 0.0, sqrt(float(np.diag(gram).max()))
    ones = np.ones((len(gram), len(gram)))
    both = np.add.outer(towards_mean, towards_mean)
    square = float(towards_mean.mean())  # of the mean's length
    found = np.full(len(gram), 1 / len(gram))
    for _ in range(_HALVINGS):
        t = (low + high) / 2
        moved = t / reach
        found = nearest_to_origin(gram + moved * both + moved**2 * square * ones)
        if found @ gram @ found > t * t:
            low = t
        else:
            high = t
    return found
