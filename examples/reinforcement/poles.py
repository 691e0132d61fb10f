"""Gymnasium's CartPole, several at once, each with random numbers of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mycel.extras import needs

Array = NDArray[np.float64]


class Poles:
    """Poles on carts.

    Attributes:
        observations: numbers that are seen.
        actions: to choose among.
    """

    observations, actions = 4, 2
    discrete = True

    def __init__(self, poles: Sequence[int], *, seed: int) -> None:
        """
        Args:
            poles: their numbers.
            seed: of all of them.

        Raises:
            MissingExtraError: gymnasium is not installed.
        """
        needs("CartPole", "gymnasium")
        import gymnasium

        self._worlds: list[Any] = [gymnasium.make("CartPole-v1") for _ in poles]
        began = [world.reset(seed=seed * 1009 + pole)[0] for world, pole in zip(self._worlds, poles, strict=True)]
        self._seen = np.array(began, np.float64)
        self._steps = np.zeros(len(began))

    def observe(self) -> Array:
        """``[poles, 4]``."""
        return self._seen.copy()

    def step(self, actions: Array) -> tuple[Array, NDArray[np.bool_], Array]:
        """Push each cart once; poles that fell, or stood for 500 steps, begin again.

        Args:
            actions: ``[poles]``.

        Returns:
            Rewards, which are over, and how long these have lasted, nan for the others.
        """
        count = len(self._worlds)
        over, lasted = np.zeros(count, np.bool_), np.full(count, np.nan)
        for pole, world in enumerate(self._worlds):
            seen, _, fallen, late, _ = world.step(int(actions[pole]))
            self._steps[pole] += 1
            if fallen or late:
                over[pole], lasted[pole], self._steps[pole] = True, self._steps[pole], 0
                seen, _ = world.reset()
            self._seen[pole] = seen
        return np.ones(count), over, lasted
