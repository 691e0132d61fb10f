"""What the neurons of experts do on calibration data: how often, how much on average, and how widely spread."""

# ruff: noqa: N803  (the shape suffixes are capitals on purpose)
from __future__ import annotations

import torch
from torch import Tensor

from mycel.errors import UsageError
from mycel.names import spelled

__all__ = ["IMPORTANCES", "Activity"]

#: What neurons can be sorted by.
IMPORTANCES = ("spread", "magnitude")


class Activity:
    """Sums over the rows that experts have seen, in float64.

    Args:
        num_experts: here.
        count: neurons of each.
        device: of the sums.

    Attributes:
        rows: of each expert.
    """

    def __init__(self, num_experts: int, count: int, device: torch.device) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        self.rows = zeros(num_experts)
        self._sum, self._squares, self._sizes = (zeros(num_experts, count) for _ in range(3))

    @torch.no_grad()
    def add(self, inside_RF: Tensor, counts_E: Tensor) -> None:
        """Count what came out between the maps; rows are sorted by expert. See ``ExpertKind.watch``."""
        group = torch.repeat_interleave(torch.arange(len(counts_E), device=counts_E.device), counts_E)
        inside = inside_RF[: len(group)].double()
        self.rows[: len(counts_E)] += counts_E
        self._sum.index_add_(0, group, inside)
        self._squares.index_add_(0, group, inside.square())
        self._sizes.index_add_(0, group, inside.abs())

    @property
    def mean(self) -> Tensor:
        """Of each neuron, ``[E, F]``; zero where an expert has seen nothing."""
        mean: Tensor = self._sum / self._rows()
        return mean

    @property
    def spread(self) -> Tensor:
        """Standard deviation of each neuron, ``[E, F]``."""
        variance: Tensor = self._squares / self._rows() - self.mean.square()
        spread: Tensor = variance.clamp(min=0).sqrt()
        return spread

    def importance(self, down_EDF: Tensor, by: str) -> Tensor:
        """What is lost with each neuron, ``[E, F]``: how much it varies, times the length of what it adds.

        The part of a neuron that does not vary is no loss: it can be added as a constant. Sorting by sizes of
        activations (``magnitude``) keeps large neurons that cancel each other, and comes out worst.

        Args:
            down_EDF: the second map.
            by: ``spread`` or ``magnitude``.

        Raises:
            UsageError: no rows were seen, or an unknown importance.
        """
        by = spelled(by, IMPORTANCES, "importance of neurons")
        if not bool(self.rows.any()):
            raise UsageError("no expert has seen a token; run the model on some data inside observe()")
        if by == "magnitude":
            sizes: Tensor = self._sizes / self._rows()
            return sizes
        lengths: Tensor = torch.linalg.vector_norm(down_EDF.double(), dim=1)
        return self.spread * lengths

    def _rows(self) -> Tensor:
        return self.rows.clamp(min=1).unsqueeze(1)
