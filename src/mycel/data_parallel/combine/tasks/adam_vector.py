"""Adam for the few numbers that weights of tasks follow from, in float64 on every rank alike.

References:
    D. Kingma, J. Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, arXiv 1412.6980, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mycel.data_parallel.combine.tasks.quadratic import Vector

__all__ = ["AdamVector"]

_FIRST, _SECOND, _TINY = 0.9, 0.999, 1e-8


class AdamVector:
    """A vector that Adam moves; at first zeros.

    Args:
        size: of the vector.
        rate: learning rate.

    Attributes:
        values: the vector.

    Examples:
        >>> moved = AdamVector(2, rate=0.1)
        >>> moved.step(np.array([3.0, 0.0]))
        >>> moved.values.round(6).tolist()
        [-0.1, 0.0]
    """

    def __init__(self, size: int, *, rate: float) -> None:
        self.rate = rate
        self.values = np.zeros(size)
        self._mean, self._square, self._steps = np.zeros(size), np.zeros(size), 0

    def step(self, slope: Vector) -> None:
        """One step against the slope."""
        self._steps += 1
        self._mean = _FIRST * self._mean + (1 - _FIRST) * slope
        self._square = _SECOND * self._square + (1 - _SECOND) * slope**2
        mean = self._mean / (1 - _FIRST**self._steps)
        root = np.sqrt(self._square / (1 - _SECOND**self._steps))
        self.values = self.values - self.rate * mean / (root + _TINY)

    def learned(self) -> dict[str, Vector]:
        """All that another one needs to go on."""
        steps = np.array([float(self._steps)])
        return {"values": self.values, "mean": self._mean, "square": self._square, "steps": steps}

    @staticmethod
    def of(state: Mapping[str, Vector], *, rate: float) -> AdamVector:
        """One that goes on from ``learned``."""
        made = AdamVector(len(state["values"]), rate=rate)
        made.values, made._mean, made._square = state["values"], state["mean"], state["square"]
        made._steps = int(state["steps"][0])
        return made
