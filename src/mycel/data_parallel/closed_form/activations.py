"""Activations that can be undone, for layers whose weights are solved for: the function, its inverse, its slope."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mycel.errors import UsageError
from mycel.names import spelled

__all__ = ["ACTIVATIONS", "Invertible", "invertible"]


class Invertible(NamedTuple):
    """A function of one number that can be undone.

    Attributes:
        forward: the function.
        inverse: of targets strictly between ``low`` and ``high``.
        slope: the function's derivative, as a function of the target ``f(z)``.
        low, high: what the function stays between.
    """

    forward: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    low: float
    high: float

    def check(self, targets: Tensor, name: str) -> None:
        """Refuse targets that the function never reaches.

        Args:
            targets: of any shape.
            name: of the activation, for the message.

        Raises:
            UsageError: a target is out of bounds.
        """
        wrong = ((targets <= self.low) | (targets >= self.high)).nonzero()
        if len(wrong):
            row, value = int(wrong[0][0]), float(targets[tuple(wrong[0])])
            raise UsageError(
                f"target {value:g} of example {row}: {name} stays strictly between {self.low:g} and {self.high:g}; "
                f"scale targets into, say, {self.low + 0.05 * (self.high - self.low):g} to "
                f"{self.high - 0.05 * (self.high - self.low):g}"
            )


def _itself(z: Tensor) -> Tensor:
    return z


#: Activations by name.
ACTIVATIONS: dict[str, Invertible] = {
    "linear": Invertible(_itself, _itself, torch.ones_like, float("-inf"), float("inf")),
    "logistic": Invertible(torch.sigmoid, torch.logit, lambda d: d * (1 - d), 0.0, 1.0),
    "tanh": Invertible(torch.tanh, torch.atanh, lambda d: 1 - d * d, -1.0, 1.0),
}


def invertible(name: str) -> Invertible:
    """The entry of ``ACTIVATIONS``.

    Args:
        name: ``linear``, ``logistic`` or ``tanh``.

    Raises:
        UsageError: no activation that can be undone has that name.
    """
    return ACTIVATIONS[spelled(name, sorted(ACTIVATIONS), "activation that can be undone")]
