"""A car that follows a route: many at once, written from formulas, with two kinds of reward.

A kinematic bicycle model drives along a lane whose curvature is a sum of three random waves. What it sees: how far it
is from the middle of the lane, its angle to it, its speed, and the curvature ahead. It steers and accelerates. An
episode ends at the end of the route, after ``STEPS`` steps, or by leaving the lane.

``simple`` is CaRL's kind of reward: how much of the route was completed in this step, in percent, times soft
penalties (too fast, far from the middle), and a penalty where the lane is left. ``shaped`` is a sum of what one would
like to see (speed, place, angle), as it is common; its terms and weights are ours.

References:
    B. Jaeger et al., "CaRL: Learning Scalable Planning Policies with Simple Rewards", 2025, arXiv 2504.17838.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Reward = Literal["simple", "shaped"]

#: Seconds a step, steps an episode, metres of the route, half of the lane's width and between the axles.
STEP_S, STEPS, ROUTE_M, HALF_LANE_M, AXLES_M = 0.2, 150, 200.0, 2.0, 2.7
#: Metres a second: the most that a car does, and what is allowed.
FASTEST, ALLOWED = 12.0, 9.0
#: Metres ahead at which the curvature is seen.
AHEAD_M = (0.0, 4.0, 8.0, 16.0)
#: Points of percent that leaving the lane costs.
PENALTY = 5.0
_LENGTHS_M = np.array([35.0, 60.0, 110.0])
_SHARPNESS = np.array([0.03, 0.025, 0.02])


class Routes:
    """Cars, each with random numbers of its own, so that it does not matter which rank drives them.

    Attributes:
        observations: numbers that a car sees.
        actions: numbers that it decides: steering and acceleration, each cut off at -1 and 1.
    """

    observations, actions = 3 + len(AHEAD_M), 2
    discrete = False

    def __init__(self, cars: Sequence[int], *, seed: int, reward: Reward) -> None:
        """
        Args:
            cars: their numbers.
            seed: of all of them.
            reward: which one.
        """
        self._random = [np.random.default_rng((seed, 77, car)) for car in cars]
        self._reward = reward
        count = len(self._random)
        self._state = np.zeros((count, 4))  # metres along the route, metres to the left, angle, speed
        self._height, self._phase = np.zeros((count, 3)), np.zeros((count, 3))
        self._age = np.zeros(count, np.int64)
        for car in range(count):
            self._begin(car)

    def _begin(self, car: int) -> None:
        random = self._random[car]
        self._height[car] = _SHARPNESS * random.uniform(0.3, 1.0, 3)
        self._phase[car] = random.uniform(0.0, 2 * np.pi, 3)
        self._state[car] = (0.0, random.uniform(-0.3, 0.3), random.uniform(-0.05, 0.05), 0.0)
        self._age[car] = 0

    def _curvature(self, along: Array) -> Array:
        return (self._height * np.sin(2 * np.pi * along[:, None] / _LENGTHS_M + self._phase)).sum(1)

    def observe(self) -> Array:
        """``[cars, observations]``, each about 1 in size."""
        along, left, angle, speed = self._state.T
        ahead = [10 * self._curvature(along + metres) for metres in AHEAD_M]
        return np.stack([left / HALF_LANE_M, 2 * angle, speed / ALLOWED, *ahead], 1)

    def step(self, actions: Array) -> tuple[Array, NDArray[np.bool_], Array]:
        """Drive for one step; cars whose episode is over begin another.

        Args:
            actions: ``[cars, 2]``.

        Returns:
            Rewards, whose episode is over, and percent of the route that these have completed, nan for the others.
        """
        steering, push = np.clip(actions, -1, 1).T
        along, left, angle, speed = self._state.T
        speed = np.clip(speed + STEP_S * 4.0 * push, 0.0, FASTEST)
        bend = self._curvature(along)
        forward = speed * np.cos(angle) / np.maximum(1 - left * bend, 0.2)
        moved = np.stack(
            [
                along + STEP_S * forward,
                left + STEP_S * speed * np.sin(angle),
                angle + STEP_S * (speed * np.tan(0.5 * steering) / AXLES_M - bend * forward),
                speed,
            ],
            1,
        )
        before, self._state, self._age = along, moved, self._age + 1
        along, left, angle, speed = moved.T
        lost = (np.abs(left) > HALF_LANE_M) | (np.abs(angle) > 1.2)
        over = lost | (along >= ROUTE_M) | (self._age >= STEPS)
        completed = 100 * np.clip(along, 0, ROUTE_M) / ROUTE_M
        if self._reward == "simple":
            gained = completed - 100 * np.clip(before, 0, ROUTE_M) / ROUTE_M
            soft = np.where(speed > ALLOWED, 0.5, 1.0) * np.where(np.abs(left) > HALF_LANE_M / 2, 0.7, 1.0)
            reward = gained * soft - PENALTY * lost
        else:
            near = np.clip(1 - np.abs(left) / HALF_LANE_M, 0, 1)
            straight = np.clip(1 - np.abs(angle), 0, 1)
            quick = np.clip(1 - np.abs(speed - ALLOWED) / ALLOWED, 0, 1)
            reward = (near + straight + quick) / 3 - PENALTY * lost
        ended = np.where(over, completed, np.nan)
        for car in np.flatnonzero(over):
            self._begin(int(car))
        return reward, over, ended
