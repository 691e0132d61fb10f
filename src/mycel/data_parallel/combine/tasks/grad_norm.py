"""GradNorm: gradients of tasks are made equally long, longer for tasks that learn slowly.

References:
    Z. Chen et al., "GradNorm: Gradient Normalization for Adaptive Loss Balancing in Deep Multitask Networks", ICML
    2018, arXiv 1711.02257, section 3 and algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from mycel.comm.bundle import Bundle
from mycel.data_parallel.combine.tasks.by_loss import ByLoss
from mycel.data_parallel.combine.tasks.quadratic import Matrix, Vector
from mycel.errors import UsageError

__all__ = ["GradNorm"]

#: No weight falls below this: a task whose weight is zero would never be looked at again.
_LEAST = 1e-3


class GradNorm(ByLoss):
    """Weights, of sum K, that go down the slope of ``sum |w_i n_i - mean(w n) r_i^alpha|``.

    ``n_i`` is the length of a task's gradient of all that is shared, over the tasks' mean length, so that ``rate``
    does not depend on their scale; ``r_i`` is the loss over the first one, over the tasks' mean of that. Lengths are
    known when the last gradient is there, so that nothing travels before. Where several ranks hold a task, the length
    is the mean of theirs.

    Args:
        alpha: how much longer gradients of slow tasks are to be; 0 for equally long.
        rate: step length of the weights.
        tasks: number of each rank's task, by rank; by default every rank is a task.

    Raises:
        UsageError: a rate that is not positive or an ``alpha`` that is negative.

    Examples:
        >>> GradNorm(rate=0.1).update(np.array([[1.0, 3.0], [1.0, 1.0]])).round(4).tolist()  # the first is longer
        [0.8947, 1.1053]
    """

    whole = True

    def __init__(self, *, alpha: float = 1.5, rate: float = 0.025, tasks: Sequence[int] | None = None) -> None:
        super().__init__(tasks=tasks)
        if not rate > 0 or not alpha >= 0:
            raise UsageError(f"GradNorm: rate {rate} must be positive, and alpha {alpha} not negative")
        self.alpha, self.rate = alpha, rate
        self._weights: Vector | None = None
        self._first: Vector | None = None
        self._lengths: list[float] = []

    def combine(self, versions: Sequence[Sequence[Bundle]], group: dist.ProcessGroup, shares: Matrix) -> None:
        """See ``TaskCombiner``."""
        self._lengths = [_length(bundles) for bundles in versions]
        super().combine(versions, group, shares)

    def numbers(self, losses: Sequence[float]) -> list[list[float]]:
        """See ``ByLoss``: the losses, and the lengths of the gradients."""
        return [list(both) for both in zip(losses, self._lengths, strict=True)]

    def update(self, heard: Matrix) -> Vector:
        """See ``ByLoss``."""
        losses, lengths = heard[:, 0], heard[:, 1]
        weights = np.ones(len(heard)) if self._weights is None else self._weights
        if self._first is None:
            self._first = np.maximum(losses, 1e-12)
        mean = float(lengths.mean())
        if mean > 0:
            relative = losses / self._first
            slow = relative / max(float(relative.mean()), 1e-12)
            scaled = lengths / mean
            target = float((weights * scaled).mean()) * np.maximum(slow, 0) ** self.alpha
            moved = np.maximum(weights - self.rate * np.sign(weights * scaled - target) * scaled, _LEAST)
            weights = moved * (len(moved) / moved.sum())
        self._weights = weights
        return weights

    def learned(self) -> dict[str, Vector]:
        """See ``ByLoss``."""
        if self._weights is None or self._first is None:
            return {}
        return {"weights": self._weights, "first": self._first}

    def relearn(self, state: Mapping[str, Vector]) -> None:
        """See ``ByLoss``."""
        self._weights, self._first = state.get("weights"), state.get("first")


def _length(bundles: Sequence[Bundle]) -> float:
    squares = [torch.linalg.vector_norm(bundle.flat, dtype=torch.float64).square() for bundle in bundles]
    return math.sqrt(sum(float(square) for square in squares))
