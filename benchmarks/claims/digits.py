"""Scikit-learn's digits, which come with it, for claims about training: data, a small network, and runs on ranks."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mycel.bench import ranks as launcher

#: Images held out of 1,797.
HELD_OUT = 360


class Digits:
    """Images of 8 x 8 pixels, standardised, split by a seed."""

    def __init__(self, seed: int) -> None:
        data = _all_digits()
        x = torch.tensor(data.data, dtype=torch.float32) / 16
        y = torch.tensor(data.target)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        held, rest = order[:HELD_OUT], order[HELD_OUT:]
        mean, spread = x[rest].mean(), x[rest].std()
        x = (x - mean) / spread
        self.train, self.test = (x[rest], y[rest]), (x[held], y[held])

    def batch(self, seed: int, rank: int, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Images that a rank sees at a step, drawn with replacement."""
        generator = torch.Generator().manual_seed((seed * 1009 + rank) * 100_003 + step)
        which = torch.randint(0, len(self.train[0]), (size,), generator=generator)
        return self.train[0][which], self.train[1][which]

    @torch.no_grad()
    def judge(self, model: nn.Module) -> tuple[float, float]:
        """Accuracy and loss on held-out images."""
        logits = model(self.test[0])
        loss = float(nn.functional.cross_entropy(logits, self.test[1]))
        return float((logits.argmax(1) == self.test[1]).float().mean()), loss


@cache
def _all_digits() -> Any:
    return load_digits()


def network(seed: int, width: int = 64) -> nn.Module:
    """Two layers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def run_ranks(
    num_ranks: int, script: str, arguments: Sequence[str], progress: Callable[[dict[str, Any]], None]
) -> list[dict[str, Any]]:
    """Start a script once a rank on loopback, and collect what rank 0 prints as JSON."""
    lines: list[dict[str, Any]] = []

    def take(rank: int, record: dict[str, Any]) -> None:
        if rank == 0:
            lines.append(record)
            progress(record)

    command = [sys.executable, script, "--rank", *arguments]
    launcher.run_ranks(num_ranks, command, sink=take, timeout_s=1800.0)
    return lines


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation."""
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values) if len(values) > 1 else 0.0:.2f}"
