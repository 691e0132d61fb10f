"""IMTL-G: the combination whose projection on every task's gradient, each of length 1, is the same.

References:
    L. Liu et al., "Towards Impartial Multi-task Learning", ICLR 2021, section 3.1. The pseudo-inverse, for gradients
    that depend on each other, is that of P. Quinton, V. Rey, arXiv 2406.16232, appendix B.
"""

from __future__ import annotations

import numpy as np

from mycel.data_parallel.combine.tasks.by_gram import ByGram
from mycel.data_parallel.combine.tasks.quadratic import Matrix, Vector, scale_of

__all__ = ["IMTLG"]


class IMTLG(ByGram):
    """Closed form, with weights of sum 1 that may be negative.

    Args:
        tasks: number of each rank's task, by rank; by default every rank is a task.
        shards: ranks that hold the other shards of this replica, over which inner products are sums.

    Examples:
        >>> IMTLG().weights(np.array([[1.0, 0.0], [0.0, 4.0]])).round(6).tolist()  # projections of 2/3 on both
        [0.666667, 0.333333]
    """

    def weights(self, gram: Matrix) -> Vector:
        """See ``ByGram``."""
        scaled = gram / scale_of(gram)
        inverse = np.asarray(np.linalg.pinv(scaled, hermitian=True), dtype=np.float64)
        found: Vector = inverse @ np.sqrt(np.maximum(np.diag(scaled), 0))
        total = float(found.sum())
        if abs(total) < 1e-12:  # no combination treats all alike
            return np.zeros(len(gram))
        weights: Vector = found / total
        return weights
