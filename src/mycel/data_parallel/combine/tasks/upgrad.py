"""UPGrad: each gradient is projected on what no task objects to, and the mean of the projections is taken.

References:
    P. Quinton, V. Rey, "Jacobian Descent for Multi-Objective Optimization", 2024, arXiv 2406.16232, section 3.
"""

from __future__ import annotations

import numpy as np

from mycel.data_parallel.combine.tasks.by_gram import ByGram
from mycel.data_parallel.combine.tasks.quadratic import Matrix, Vector, least_upper

__all__ = ["UPGrad"]


class UPGrad(ByGram):
    """Never makes a task worse, to first order, and is the mean where no two gradients conflict.

    Args:
        tasks: number of each rank's task, by rank; by default every rank is a task.
        shards: ranks that hold the other shards of this replica, over which inner products are sums.

    Examples:
        >>> UPGrad().weights(np.array([[1.0, -0.5], [-0.5, 1.0]])).round(6).tolist()
        [0.75, 0.75]
    """

    def weights(self, gram: Matrix) -> Vector:
        """See ``ByGram``."""
        size = len(gram)
        weights: Vector = np.mean([least_upper(gram, own) for own in np.eye(size)], axis=0)
        return weights
