"""Weights from a variance that is learned for each task: noisy tasks count less.

References:
    A. Kendall, Y. Gal, R. Cipolla, "Multi-Task Learning Using Uncertainty to Weigh Losses for Scene Geometry and
    Semantics", CVPR 2018, arXiv 1705.07115, section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mycel.data_parallel.combine.tasks.adam_vector import AdamVector
from mycel.data_parallel.combine.tasks.by_loss import ByLoss
from mycel.data_parallel.combine.tasks.quadratic import Matrix, Vector
from mycel.errors import UsageError

__all__ = ["UncertaintyWeighting"]


class UncertaintyWeighting(ByLoss):
    """Weights ``exp(-s_i)`` that make ``sum exp(-s_i) l_i + s_i / 2`` least; Adam moves ``s = log sigma^2``.

    Weights have no fixed sum: they grow as losses fall, to ``1 / (2 l_i)``.

    Args:
        rate: learning rate of ``s``.
        tasks: number of each rank's task, by rank; by default every rank is a task.

    Raises:
        UsageError: a rate that is not positive.

    Examples:
        >>> UncertaintyWeighting(rate=0.1).update(np.array([[2.0], [0.1]])).round(4).tolist()
        [0.9048, 1.1052]
    """

    def __init__(self, *, rate: float = 0.025, tasks: Sequence[int] | None = None) -> None:
        super().__init__(tasks=tasks)
        if not rate > 0:
            raise UsageError(f"UncertaintyWeighting with rate {rate}: it must be positive")
        self.rate = rate
        self._adam: AdamVector | None = None

    def update(self, heard: Matrix) -> Vector:
        """See ``ByLoss``."""
        if self._adam is None:
            self._adam = AdamVector(len(heard), rate=self.rate)
        self._adam.step(0.5 - np.exp(-self._adam.values) * heard[:, 0])
        weights: Vector = np.exp(-self._adam.values)
        return weights

    def learned(self) -> dict[str, Vector]:
        """See ``ByLoss``."""
        return {} if self._adam is None else self._adam.learned()

    def relearn(self, state: Mapping[str, Vector]) -> None:
        """See ``ByLoss``."""
        self._adam = AdamVector.of(state, rate=self.rate) if "values" in state else None
