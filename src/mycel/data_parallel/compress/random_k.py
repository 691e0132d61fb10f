"""Values at places drawn by chance, the same on all ranks: no places travel, and values can be added.

One place is drawn in each of ``k`` runs of neighbours, which is as fair as drawing ``k`` of all, and cheaper.

References:
    Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, arXiv 1809.07599 (random-k contracts);
    Vogels, Karimireddy, Jaggi, "PowerSGD", arXiv 1905.13727, appendix G (one seed for all ranks).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from mycel.arguments import real_number
from mycel.data_parallel.compress.aggregation import Aggregation, Linear
from mycel.data_parallel.compress.base import Compressor, numel
from mycel.data_parallel.compress.context import Context
from mycel.wire.noise import uniform

__all__ = ["RandomK"]

_DENSITIES = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)


class RandomK(Compressor):
    """``density`` of the values, four bytes each.

    Args:
        density: share of the values that travel, above 0 and at most 1; at least one of every tensor.
        unbiased: divide what travels by the chance that it does: right in the mean and noisy. Otherwise values
            arrive as they are and the others are lost, which is for error feedback.

    Raises:
        UsageError: the density is out of range.

    Examples:
        >>> RandomK(0.01).wire_bytes((1000, 10))
        400
    """

    name: ClassVar[str] = "random_k"
    aggregation: ClassVar[Aggregation] = Linear()

    def __init__(self, density: float = 0.01, *, unbiased: bool = False) -> None:
        self.density = real_number(density, "share of elements that is sent", above=0, most=1)
        self.is_unbiased, self.is_contractive = unbiased, not unbiased

    def wire_bytes(self, shape: Sequence[int]) -> int:
        """See ``Compressor``."""
        return 4 * self._kept(numel(shape))

    def compress(self, tensor: Tensor, context: Context) -> Tensor:
        """See ``Compressor``. One value that is not finite makes all of them NaN: places may have missed it."""
        flat = tensor.reshape(-1)
        if not len(flat):
            return flat
        values = flat[self._places(len(flat), context, flat.device)[0]]
        largest = torch.linalg.vector_norm(flat, ord=torch.inf)
        return torch.where(largest.isfinite(), values, torch.nan)

    def decompress(self, payload: Tensor, shape: Sequence[int], context: Context) -> Tensor:
        """See ``Compressor``."""
        out = torch.zeros(tuple(shape), dtype=torch.float32, device=payload.device)
        places, lengths = self._places(out.numel(), context, out.device)
        out.view(-1)[places] = payload * lengths if self.is_unbiased else payload
        return out

    def levels(self) -> tuple[float, ...]:
        """Densities."""
        return _DENSITIES

    def at(self, level: float) -> Compressor:
        """The same of another density."""
        super().at(level)
        return RandomK(level, unbiased=self.is_unbiased)

    def _kept(self, count: int) -> int:
        return min(count, max(1, math.ceil(self.density * count)))

    def _places(self, count: int, context: Context, device: torch.device) -> tuple[Tensor, Tensor]:
        """A place in each run of neighbours, and the runs' lengths."""
        kept = self._kept(count)
        bounds = torch.arange(kept + 1, device=device) * count // max(1, kept)
        lengths = bounds[1:] - bounds[:-1]
        drawn = uniform(context.random_seed(shared=True), kept, device).double()
        return bounds[:-1] + torch.minimum((drawn * lengths).long(), lengths - 1), lengths
