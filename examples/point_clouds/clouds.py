"""Clouds of points from formulas, and their division into groups: what a network for point clouds reads.

Twelve surfaces and curves, of random size in each direction, turned at random, with noise. A cloud becomes ``GROUPS``
groups of near points around centres that are far from each other, once, before training: done in every step it would
cost more than the network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]

#: Points of a cloud, groups of it, points of a group.
POINTS, GROUPS, NEAR = 128, 16, 12
#: Deviation of the noise, of clouds that are about 1 in size.
NOISE = 0.06


def _on_sphere(random: np.random.Generator) -> Array:
    made = random.normal(size=(POINTS, 3))
    return made / np.linalg.norm(made, axis=1, keepdims=True)


def _on_cube(random: np.random.Generator) -> Array:
    made = random.uniform(-1, 1, (POINTS, 3))
    made[np.arange(POINTS), random.integers(0, 3, POINTS)] = random.choice((-1.0, 1.0), POINTS)
    return made


def _round(random: np.random.Generator, radius: Callable[[Array], Array]) -> Array:
    height, angle = random.uniform(-1, 1, POINTS), random.uniform(0, 2 * np.pi, POINTS)
    return np.stack([radius(height) * np.cos(angle), radius(height) * np.sin(angle), height], 1)


def _torus(random: np.random.Generator) -> Array:
    one, other = random.uniform(0, 2 * np.pi, (2, POINTS))
    wide = 1 + 0.35 * np.cos(other)
    return np.stack([wide * np.cos(one), wide * np.sin(one), 0.35 * np.sin(other)], 1)


def _over_square(random: np.random.Generator, height: Callable[[Array, Array], Array]) -> Array:
    x, y = random.uniform(-1, 1, (2, POINTS))
    return np.stack([x, y, height(x, y)], 1)


def _helix(random: np.random.Generator) -> Array:
    along = random.uniform(-1, 1, POINTS)
    return np.stack([np.cos(6 * along), np.sin(6 * along), along], 1)


def _two_spheres(random: np.random.Generator) -> Array:
    return 0.55 * _on_sphere(random) + np.array([0.0, 0.0, 0.6]) * random.choice((-1.0, 1.0), (POINTS, 1))


def _moebius(random: np.random.Generator) -> Array:
    angle, across = random.uniform(0, 2 * np.pi, POINTS), random.uniform(-0.4, 0.4, POINTS)
    wide = 1 + across * np.cos(angle / 2)
    return np.stack([wide * np.cos(angle), wide * np.sin(angle), across * np.sin(angle / 2)], 1)


#: By name; every second one is for pre-training, the others are for tuning.
SHAPES: dict[str, Callable[[np.random.Generator], Array]] = {
    "sphere": _on_sphere,
    "cube": _on_cube,
    "cylinder": lambda random: _round(random, np.ones_like),
    "cone": lambda random: _round(random, lambda z: (1 - z) / 2),
    "torus": _torus,
    "two spheres": _two_spheres,
    "saddle": lambda random: _over_square(random, lambda x, y: x**2 - y**2),
    "bowl": lambda random: _over_square(random, lambda x, y: x**2 + y**2 - 0.7),
    "helix": _helix,
    "hourglass": lambda random: _round(random, np.abs),
    "wave": lambda random: _over_square(random, lambda x, y: 0.5 * np.sin(4 * x)),
    "Moebius band": _moebius,
}
PRETRAINED, TUNED = tuple(SHAPES)[::2], tuple(SHAPES)[1::2]


@dataclass(frozen=True, slots=True)
class Clouds:
    """Clouds, grouped.

    Attributes:
        centres: of groups, ``[clouds, GROUPS, 3]``.
        groups: points of each, seen from its centre, ``[clouds, GROUPS, NEAR, 3]``.
        kinds: which shape, ``[clouds]``.
    """

    centres: Tensor
    groups: Tensor
    kinds: Tensor

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, which: Tensor) -> Clouds:
        return Clouds(self.centres[which], self.groups[which], self.kinds[which])


def make_clouds(names: Sequence[str], each: int, seed: int) -> Clouds:
    """As many clouds of each shape.

    Args:
        names: keys of ``SHAPES``; their places are the kinds.
        each: clouds a shape.
        seed: other seeds give other clouds.
    """
    random = np.random.default_rng((seed, 31))
    points = np.stack([_placed(SHAPES[name](random), random) for name in names for _ in range(each)])
    centres, groups = _grouped(torch.from_numpy(points.astype(np.float32)))
    return Clouds(centres, groups, torch.arange(len(names)).repeat_interleave(each))


def _placed(points: Array, random: np.random.Generator) -> Array:
    turn, _ = np.linalg.qr(random.normal(size=(3, 3)))
    made: Array = (points * random.uniform(0.5, 1.2, 3)) @ turn + NOISE * random.normal(size=points.shape)
    return made - made.mean(0)


def _grouped(points: Tensor) -> tuple[Tensor, Tensor]:
    """Centres by farthest-point sampling, and their nearest points."""
    clouds = torch.arange(len(points))
    chosen = torch.zeros(len(points), GROUPS, dtype=torch.int64)
    far = points.norm(dim=2)
    for group in range(GROUPS):
        chosen[:, group] = far.argmax(1)
        centre = points[clouds, chosen[:, group]]
        away = (points - centre[:, None]).norm(dim=2)
        far = away if group == 0 else torch.minimum(far, away)
    centres = points[clouds[:, None], chosen]
    near = torch.cdist(centres, points).topk(NEAR, largest=False).indices
    return centres, points[clouds[:, None, None], near] - centres[:, :, None]
