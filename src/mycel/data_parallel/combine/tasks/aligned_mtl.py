"""Aligned-MTL: the gradients' principal components are made equally long, as the shortest, before the mean is taken.

References:
    D. Senushkin et al., "Independent Component Alignment for Multi-Task Learning", CVPR 2023, arXiv 2305.19000,
    section 4 and algorithm 1.
"""

from __future__ import annotations

import numpy as np

from mycel.data_parallel.combine.tasks.by_gram import ByGram
from mycel.data_parallel.combine.tasks.quadratic import Matrix, Vector

__all__ = ["AlignedMTL"]


class AlignedMTL(ByGram):
    """Weights ``sqrt(l_min) V L^(-1/2) V' 1/K`` by the eigenvectors and eigenvalues of the Gram matrix.

    Args:
        tasks: number of each rank's task, by rank; by default every rank is a task.
        shards: ranks that hold the other shards of this replica, over which inner products are sums.

    Examples:
        >>> AlignedMTL().weights(np.array([[1.0, 0.0], [0.0, 4.0]])).round(6).tolist()
        [0.5, 0.25]
    """

    def weights(self, gram: Matrix) -> Vector:
        """See ``ByGram``."""
        size = len(gram)
        values, vectors = np.linalg.eigh(gram)
        kept = values > values[-1] * size * np.finfo(np.float64).eps
        mean = np.full(size, 1 / size)
        if not kept.any():
            return mean
        values, vectors = values[kept], vectors[:, kept]
        weights: Vector = np.sqrt(values[0]) * (vectors @ ((vectors.T @ mean) / np.sqrt(values)))
        return weights
