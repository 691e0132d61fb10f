"""MGDA: the shortest vector in the convex hull of the tasks' gradients; no task gets worse along it.

References:
    J.-A. Desideri, "Multiple-gradient descent algorithm", 2012; O. Sener, V. Koltun, "Multi-Task Learning as
    Multi-Objective Optimization", NeurIPS 2018, arXiv 1810.04650, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch.distributed as dist

from mycel.data_parallel.combine.tasks.by_gram import ByGram
from mycel.data_parallel.combine.tasks.quadratic import Matrix, Vector, nearest_to_origin

__all__ = ["MGDA"]


class MGDA(ByGram):
    """Weights on the simplex with the least ``|sum w_i g_i|``: as long as a mean, or shorter.

    The shortest vector leans towards the shortest gradient, so that a task that has converged stops all others.

    Args:
        normalised: of gradients of length 1, of which no task is the shortest, instead of those that there are.
        tasks: number of each rank's task, by rank; by default every rank is a task.
        shards: ranks that hold the other shards of this replica, over which inner products are sums.

    Examples:
        >>> MGDA().weights(np.array([[1.0, 0.0], [0.0, 3.0]])).round(6).tolist()
        [0.75, 0.25]
    """

    def __init__(
        self,
        *,
        normalised: bool = False,
        tasks: Sequence[int] | None = None,
        shards: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(tasks=tasks, shards=shards)
        self.normalised = normalised

    def weights(self, gram: Matrix) -> Vector:
        """See ``ByGram``."""
        if not self.normalised:
            return nearest_to_origin(gram)
        lengths = np.sqrt(np.diag(gram))
        inverse = np.divide(1.0, lengths, out=np.zeros_like(lengths), where=lengths > 0)
        weights: Vector = nearest_to_origin(inverse[:, None] * gram * inverse) * inverse
        return weights
