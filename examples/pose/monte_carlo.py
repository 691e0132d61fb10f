"""How near estimates of a pose come to the Cramer-Rao bound: thousands of runs, divided over the ranks.

torchrun --nproc-per-node 4 examples/pose/monte_carlo.py
python examples/pose/monte_carlo.py --runs 2000        # one process: the same moments
python examples/pose/monte_carlo.py --write            # puts the table beside the script

Every run draws its errors from its own number, so that it does not matter which rank takes it. Ranks exchange once:
one sum of counts, sums and products, 86 numbers however many runs there are.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import least_squares
import numpy as np
import torch
import torch.distributed as dist
from least_squares import Array, Poses
from scipy.stats import chi2

#: Runs that are worked on together.
TOGETHER = 500
METHODS = ("total least squares", "Procrustes, unweighted")
COMPONENTS = ("rotation x", "rotation y", "rotation z", "shift x", "shift y", "shift z")
TABLE = Path(__file__).with_name("table.md")


@dataclass(frozen=True, slots=True)
class Scene:
    """What is measured, and how well.

    Attributes:
        landmarks: before the motion, ``[landmarks, 3]``, in metres.
        covariance: of errors after and before, ``[landmarks, 6, 6]``.
        rotation: true, ``[3, 3]``.
        shift: true, ``[3]``.
    """

    landmarks: Array
    covariance: Array
    rotation: Array
    shift: Array


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums over runs, of the errors themselves: their mean is nearly zero, so that nothing cancels.

    Attributes:
        count: runs.
        total: sums of errors, ``[methods, 6]``.
        products: sums of products of errors, ``[methods, 6, 6]``.
        normalised: sum of ``d' P^-1 d`` of the weighted estimate, with the covariance that it says of itself.
    """

    count: int
    total: Array
    products: Array
    normalised: float

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.count + other.count,
            self.total + other.total,
            self.products + other.products,
            self.normalised + other.normalised,
        )

    def over_ranks(self) -> Moments:
        """Of all ranks' runs, by one all_reduce."""
        parts = [np.array([self.count, self.normalised]), self.total.ravel(), self.products.ravel()]
        packed = torch.from_numpy(np.concatenate(parts))
        dist.all_reduce(packed)
        flat = packed.numpy()
        middle = 2 + self.total.size
        return Moments(
            round(flat[0]),
            flat[2:middle].reshape(self.total.shape),
            flat[middle:].reshape(self.products.shape),
            float(flat[1]),
        )

    def deviations(self) -> Array:
        """Standard deviations, ``[methods, 6]``."""
        mean = self.total / self.count
        squares = np.diagonal(self.products, axis1=1, axis2=2) / self.count
        return np.sqrt((squares - mean**2) * self.count / (self.count - 1))


def make_scene(seed: int, landmarks: int = 12) -> Scene:
    """A cloud of landmarks a few metres wide; errors of centimetres, unlike in every direction, and correlated."""
    random = np.random.default_rng(seed)
    shape = random.normal(size=(landmarks, 6, 6))
    scale = 0.01 * np.exp(random.uniform(-1.0, 1.0, landmarks))[:, None, None]
    covariance = scale**2 * (shape @ np.swapaxes(shape, 1, 2) / 6 + 0.05 * np.eye(6))
    rotation = least_squares.rotation_of(random.normal(size=3))
    return Scene(random.uniform(-2.0, 2.0, (landmarks, 3)), covariance, rotation, random.normal(size=3))


def draw(scene: Scene, seed: int, numbers: Sequence[int]) -> tuple[Array, Array]:
    """Measured landmarks after and before of some runs, ``[runs, landmarks, 3]`` each."""
    spread = np.linalg.cholesky(scene.covariance)
    white = np.stack([np.random.default_rng((seed, n)).normal(size=(len(spread), 6)) for n in numbers])
    noise = np.einsum("kij,nkj->nki", spread, white)
    return scene.landmarks @ scene.rotation.T + scene.shift + noise[..., :3], scene.landmarks + noise[..., 3:]


def moments(scene: Scene, seed: int, numbers: Sequence[int]) -> Moments:
    """Of some runs, by their numbers; there may be none."""
    methods = len(METHODS)
    found = Moments(0, np.zeros((methods, 6)), np.zeros((methods, 6, 6)), 0.0)
    for first in range(0, len(numbers), TOGETHER):
        after, before = draw(scene, seed, numbers[first : first + TOGETHER])
        weighted = least_squares.total_least_squares(after, before, scene.covariance)
        poses: tuple[Poses, ...] = (weighted, least_squares.procrustes(after, before))
        off = np.stack([least_squares.errors(pose, scene.rotation, scene.shift) for pose in poses])
        assert weighted.covariance is not None
        scaled = np.linalg.solve(weighted.covariance, off[0][..., None])[..., 0]
        found += Moments(
            off.shape[1], off.sum(1), np.einsum("mna,mnb->mab", off, off), float(np.einsum("na,na->", off[0], scaled))
        )
    return found


def estimate(scene: Scene, seed: int, runs: int) -> Moments:
    """All runs, each on one of the ranks; alone where there is no group."""
    if not dist.is_initialized():
        return moments(scene, seed, range(runs))
    return moments(scene, seed, range(dist.get_rank(), runs, dist.get_world_size())).over_ranks()


def band(runs: int) -> tuple[float, float]:
    """Between which the mean of ``d' P^-1 d`` lies in 95 of 100 cases, if the covariances are right."""
    low, high = chi2.ppf([0.025, 0.975], 6 * runs) / runs
    return float(low), float(high)


def table(scene: Scene, found: Moments) -> str:
    """Markdown: standard deviations over the bound, a row a component."""
    least = np.sqrt(np.diag(least_squares.bound(scene.landmarks, scene.covariance, scene.rotation)))
    rows = ["| | bound | " + " | ".join(METHODS) + " |", "|---|---|" + "---|" * len(METHODS)]
    for name, smallest, over in zip(COMPONENTS, least, (found.deviations() / least).T, strict=True):
        unit = "mrad" if name.startswith("rotation") else "mm"
        rows.append(f"| {name} | {1e3 * smallest:.3f} {unit} | " + " | ".join(f"{v:.3f}" for v in over) + " |")
    low, high = band(found.count)
    mean = found.normalised / found.count
    where = "inside" if low <= mean <= high else "outside"
    rows.append("")
    rows.append(
        f"Standard deviations over the bound, {found.count} runs (each of them known to "
        f"{100 / math.sqrt(2 * found.count):.1f} %). Mean normalised error {mean:.3f}, {where} its 95 % band of "
        f"{low:.3f} to {high:.3f}."
    )
    return "\n".join(rows) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Estimate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("gloo", "mycel"), default="mycel")
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help=f"put the table into {TABLE.name}")
    options = parser.parse_args(arguments)
    if options.runs < 2:
        parser.error(f"{options.runs} run(s) have no standard deviation; take two or more")
    ranks = "WORLD_SIZE" in os.environ
    if ranks:
        if options.backend == "mycel":
            import mycel.runtime  # noqa: F401  (registers the backend)
        dist.init_process_group(options.backend)
    scene = make_scene(options.seed)
    found = estimate(scene, options.seed, options.runs)
    if not ranks or dist.get_rank() == 0:
        made = table(scene, found)
        print(made, end="")
        if options.write:
            TABLE.write_text(made, encoding="utf-8")
    if ranks:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
