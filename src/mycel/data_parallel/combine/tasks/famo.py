"""FAMO: tasks improve at the same relative rate; weights follow how fast losses fell, and no gradient is looked at.

References:
    B. Liu et al., "FAMO: Fast Adaptive Multitask Optimization", NeurIPS 2023, arXiv 2306.03792, section 3 and
    algorithm 1 (equations 8 and 9).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from mycel.data_parallel.combine.tasks.adam_vector import AdamVector
from mycel.data_parallel.combine.tasks.by_loss import ByLoss, numbers_of
from mycel.data_parallel.combine.tasks.quadratic import Matrix, Vector
from mycel.errors import UsageError

__all__ = ["FAMO"]

#: Losses below this count as this: their logarithms and inverses stay finite.
_LEAST = 1e-8
#: Of a loss after a step that nobody told.
_UNKNOWN = -1.0


class FAMO(ByLoss):
    """Weights ``c z_i / l_i`` with ``z = softmax(xi)`` and ``c`` such that they have sum 1.

    ``xi`` follows by how much each loss's logarithm has changed: by default from one ``tell`` to the next, which is
    on other data; ``tell_after`` gives the loss on the same data after the step, as published.

    Args:
        rate: step length of ``xi``.
        decay: by which ``xi`` is drawn to zero, as a weight decay.
        tasks: number of each rank's task, by rank; by default every rank is a task.

    Raises:
        UsageError: a rate that is not positive or a decay that is negative.

    Examples:
        >>> famo = FAMO()
        >>> famo.update(np.array([[1.0, -1.0], [2.0, -1.0]])).round(6).tolist()  # (1/1, 1/2), of sum 1
        [0.666667, 0.333333]
        >>> first, second = famo.update(np.array([[0.5, -1.0], [2.0, -1.0]]))  # the first has halved its loss
        >>> bool(first * 0.5 < second * 2.0)
        True
    """

    def __init__(self, *, rate: float = 0.025, decay: float = 0.001, tasks: Sequence[int] | None = None) -> None:
        super().__init__(tasks=tasks)
        if not rate > 0 or not decay >= 0:
            raise UsageError(f"FAMO with rate {rate}, decay {decay}: the first is positive, the second not negative")
        self.rate, self.decay = rate, decay
        self._adam: AdamVector | None = None
        self._before: Vector | None = None
        self._own_after: list[float] = []

    def tell_after(self, loss: Tensor | float | Sequence[Tensor | float]) -> None:
        """This rank's loss on the same data after the step: one forward pass more. Every rank calls it, or none does.

        The number travels with the next ``tell``'s.

        Args:
            loss: as given to ``tell``, computed again.
        """
        self._own_after = numbers_of(loss)

    def numbers(self, losses: Sequence[float]) -> list[list[float]]:
        """See ``ByLoss``: the losses, and those after the last step where they were told."""
        after, self._own_after = self._own_after or [_UNKNOWN] * len(losses), []
        if len(after) != len(losses):
            raise UsageError(f"FAMO.tell_after was given {len(after)} losses, and tell {len(losses)}")
        return [list(both) for both in zip(losses, after, strict=True)]

    def update(self, heard: Matrix) -> Vector:
        """See ``ByLoss``."""
        losses = np.maximum(heard[:, 0], _LEAST)
        if self._adam is None:
            self._adam = AdamVector(len(losses), rate=self.rate)
        if self._before is not None:
            told = heard[:, 1] >= 0
            now = np.where(told, np.maximum(heard[:, 1], _LEAST), losses)
            fell = np.log(self._before) - np.log(now)
            z = _softmax(self._adam.values)
            self._adam.step(z * (fell - z @ fell) + self.decay * self._adam.values)
        self._before = losses
        weights = _softmax(self._adam.values) / losses
        found: Vector = weights / weights.sum()
        return found

    def learned(self) -> dict[str, Vector]:
        """See ``ByLoss``."""
        known = {} if self._before is None else {"before": self._before}
        return {**known, **({} if self._adam is None else self._adam.learned())}

    def relearn(self, state: Mapping[str, Vector]) -> None:
        """See ``ByLoss``."""
        self._before = state.get("before")
        self._adam = AdamVector.of(state, rate=self.rate) if "values" in state else None


def _softmax(x: Vector) -> Vector:
    powers = np.exp(x - x.max())
    found: Vector = powers / powers.sum()
    return found
