"""A small diffusion model of digits, whose steps may be whole, partial or left out.

The denoiser is a chain of blocks. A *full* step runs all of them and keeps what the deep ones added; a *partial* step
runs the first ``branch`` blocks and adds what was kept; a *null* step takes the last prediction again, which makes
DDIM one longer jump.

References:
    J. Song, C. Meng, S. Ermon, "Denoising Diffusion Implicit Models", ICLR 2021, equation 12.
    H. Huang et al., "Flexiffusion: Training-Free Segment-Wise Neural Architecture Search for Efficient Diffusion
    Models", 2024, arXiv 2409.17566.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import Tensor, nn

#: Steps of the teacher, deep blocks, numbers of a picture.
STEPS, BLOCKS, PIXELS = 50, 4, 64
#: Noise levels in training.
LEVELS = 1000


@cache
def alphas() -> Tensor:
    """How much of the picture is left at every level, squared: a cosine."""
    at = (torch.arange(LEVELS + 1, dtype=torch.float64) / LEVELS + 0.008) / 1.008
    curve = torch.cos(at * math.pi / 2) ** 2
    return (curve / curve[0]).clamp(1e-4, 1.0).float()


class Denoiser(nn.Module):
    """Predicts the noise of pictures, ``[pictures, 64]``."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.enter, self.time = nn.Linear(PIXELS, width), nn.Linear(32, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
            for _ in range(BLOCKS)
        )
        self.leave = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, PIXELS))

    def start(self, x: Tensor, level: int | Tensor) -> Tensor:
        """Before the first block."""
        at = torch.as_tensor(level, dtype=torch.float32).reshape(-1, 1) / LEVELS
        angles = at * (2.0 ** torch.arange(16))
        waves = torch.cat([angles.sin(), angles.cos()], 1)
        made: Tensor = self.enter(x) + self.time(waves)
        return made

    def forward(self, x: Tensor, level: int | Tensor) -> Tensor:
        """A full step."""
        features = self.start(x, level)
        for block in self.blocks:
            features = features + block(features)
        made: Tensor = self.leave(features)
        return made

    def full(self, x: Tensor, level: int, branch: int) -> tuple[Tensor, Tensor]:
        """A full step, and what the blocks from ``branch`` on have added."""
        features = self.start(x, level)
        for block in self.blocks[:branch]:
            features = features + block(features)
        shallow = features
        for block in self.blocks[branch:]:
            features = features + block(features)
        return self.leave(features), features - shallow

    def partial(self, x: Tensor, level: int, branch: int, kept: Tensor) -> Tensor:
        """The first blocks, and what was kept of the others."""
        features = self.start(x, level)
        for block in self.blocks[:branch]:
            features = features + block(features)
        made: Tensor = self.leave(features + kept)
        return made

    def work(self, branch: int = BLOCKS) -> int:
        """Multiplications of a step that runs the first blocks only."""

        def of(module: nn.Module) -> int:
            return sum(m.in_features * m.out_features for m in module.modules() if isinstance(m, nn.Linear))

        return of(self.enter) + of(self.time) + of(self.leave) + sum(of(block) for block in self.blocks[:branch])


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the teacher's steps.

    Attributes:
        steps: of the teacher.
        active: steps that are computed; the first is full, the others partial; the rest is null.
        branch: blocks that a partial step runs.
    """

    steps: int
    active: int
    branch: int

    def __post_init__(self) -> None:
        if not 1 <= self.active <= self.steps:
            raise ValueError(f"{self.active} active steps of {self.steps}; at least one, and at most all of them")
        if not 0 <= self.branch < BLOCKS:
            raise ValueError(f"branch {self.branch} of {BLOCKS} blocks; 0 to {BLOCKS - 1}")


Schedule = tuple[Segment, ...]


def uniform(full_steps: int) -> Schedule:
    """Full steps at even distances: what one does without a search.

    Examples:
        >>> [s.steps for s in uniform(4)]
        [12, 13, 12, 13]
    """
    edges = [STEPS * i // full_steps for i in range(full_steps + 1)]
    return tuple(Segment(b - a, 1, 0) for a, b in pairwise(edges))


def cost(model: Denoiser, schedule: Schedule) -> float:
    """In full steps."""
    whole = model.work()
    return sum(1 + (s.active - 1) * model.work(s.branch) / whole for s in schedule)


@torch.no_grad()
def sample(model: Denoiser, schedule: Schedule, noise: Tensor) -> Tensor:
    """Pictures by DDIM.

    Args:
        model: trained.
        schedule: of segments that together have ``STEPS`` steps.
        noise: ``[pictures, 64]``.
    """
    levels = torch.linspace(LEVELS, 0, STEPS + 1).round().long().tolist()
    x = noise
    for first, segment in _placed(schedule):
        predicted, kept = model.full(x, levels[first], segment.branch)
        for step in range(segment.steps):
            if 0 < step < segment.active:
                predicted = model.partial(x, levels[first + step], segment.branch, kept)
            now, after = alphas()[levels[first + step]], alphas()[levels[first + step + 1]]
            clean = ((x - (1 - now).sqrt() * predicted) / now.sqrt()).clamp(-1, 1)  # as pictures are
            x = after.sqrt() * clean + (1 - after).sqrt() * predicted
    return x


def _placed(schedule: Sequence[Segment]) -> Iterator[tuple[int, Segment]]:
    first = 0
    for segment in schedule:
        yield first, segment
        first += segment.steps
    if first != STEPS:
        raise ValueError(f"segments of {first} steps; the teacher has {STEPS}")


def pictures() -> tuple[Tensor, Tensor]:
    """Scikit-learn's digits between -1 and 1, and their classes."""
    data = load_digits()
    return torch.tensor(data.data / 8 - 1, dtype=torch.float32), torch.tensor(data.target)


def train(steps: int, seed: int, *, batch: int = 64, rate: float = 2e-3) -> Denoiser:
    """A denoiser of digits."""
    torch.manual_seed(seed)
    model, (x, _) = Denoiser(), pictures()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        clean = x[torch.randint(0, len(x), (batch,), generator=random)]
        level = torch.randint(1, LEVELS + 1, (batch,), generator=random)
        noise, left = torch.randn(clean.shape, generator=random), alphas()[level][:, None]
        loss = nn.functional.mse_loss(model(left.sqrt() * clean + (1 - left).sqrt() * noise, level), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@cache
@torch.enable_grad()  # type: ignore[untyped-decorator]  # who asks for it samples without
def judge() -> nn.Sequential:
    """The features in which pictures are compared: a classifier's hidden layer."""
    x, y = pictures()
    state = torch.random.get_rng_state()
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(PIXELS, 64), nn.ReLU(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
    torch.random.set_rng_state(state)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(250):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x + 0.1 * torch.sin(37 * x)), y).backward()
        optimizer.step()
    return model[:4]


@torch.no_grad()
def features(x: Tensor) -> NDArray[np.float64]:
    """``[pictures, 24]``."""
    made: NDArray[np.float64] = judge()(x).double().numpy()
    return made


def frechet(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Distance of two normal distributions with the means and covariances of features.

    References:
        M. Heusel et al., "GANs Trained by a Two Time-Scale Update Rule", NeurIPS 2017, section 3.
    """
    first, second = np.cov(one.T), np.cov(other.T)
    values, vectors = np.linalg.eigh(first)
    root = (vectors * np.sqrt(np.clip(values, 0, None))) @ vectors.T
    mixed = np.sqrt(np.clip(np.linalg.eigvalsh(root @ second @ root), 0, None)).sum()
    apart = ((one.mean(0) - other.mean(0)) ** 2).sum()
    return float(apart + np.trace(first) + np.trace(second) - 2 * mixed)
