"""Nash-MTL: the bargain that tasks would strike over a step, each with a veto; ``G a = 1/a``.

This is where the gradient of ``a' G a / 2 - sum log a_i`` is zero, a strictly convex function that is
self-concordant: damped Newton steps find its least from anywhere, and no sequence of linearised programmes is needed.

References:
    A. Navon et al., "Multi-Task Learning as a Bargaining Game", ICML 2022, arXiv 2202.01017, section 3.2 and
    claim 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch.distributed as dist

from mycel.data_parallel.combine.tasks.by_gram import ByGram
from mycel.data_parallel.combine.tasks.quadratic import Matrix, Vector, scale_of
from mycel.errors import UsageError

__all__ = ["NashMTL"]

#: Keeps weights finite where gradients cancel each other and no bargain is better than none.
_RIDGE = 1e-10
_MOST_STEPS = 200


class NashMTL(ByGram):
    """Weights of the bargain, made shorter where the step would be longer than ``max_norm``.

    The bargain's step has length ``sqrt(K)`` whatever the gradients' lengths are, so that the limit decides how long
    a step is. A task whose gradient is zero takes no part.

    Args:
        max_norm: longest step; ``None`` for none.
        tasks: number of each rank's task, by rank; by default every rank is a task.
        shards: ranks that hold the other shards of this replica, over which inner products are sums.

    Raises:
        UsageError: a length that is not positive.

    Examples:
        >>> NashMTL(max_norm=None).weights(np.array([[1.0, 0.0], [0.0, 4.0]])).round(6).tolist()
        [1.0, 0.5]
    """

    def __init__(
        self,
        *,
        max_norm: float | None = 1.0,
        tasks: Sequence[int] | None = None,
        shards: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(tasks=tasks, shards=shards)
        if max_norm is not None and not max_norm > 0:
            raise UsageError(f"NashMTL with max_norm {max_norm}: it must be positive, or None")
        self.max_norm = max_norm

    def weights(self, gram: Matrix) -> Vector:
        """See ``ByGram``."""
        weights = np.zeros(len(gram))
        there = np.diag(gram) > 0
        if not there.any():
            return weights
        taken = gram[np.ix_(there, there)]
        scale = scale_of(taken)
        found = _bargain(taken / scale) / np.sqrt(scale)
        length = float(np.sqrt(max(float(found @ taken @ found), 0.0)))
        if self.max_norm is not None and length > self.max_norm:
            found *= self.max_norm / length
        weights[there] = found
        return weights


def _bargain(gram: Matrix) -> Vector:
    """Solves ``G a = 1/a`` with ``a > 0``."""
    held = gram + _RIDGE * np.eye(len(gram))
    a = 1 / np.sqrt(np.diag(held) * len(gram))
    for _ in range(_MOST_STEPS):
        slope = held @ a - 1 / a
        step = np.linalg.solve(held + np.diag(a**-2.0), slope)
        decrement = float(np.sqrt(max(float(slope @ step), 0.0)))
        a = a - step / (1 + decrement)  # which keeps a positive: the step is inside of Dikin's ellipsoid
        if decrement < 1e-13:
            break
    return a
