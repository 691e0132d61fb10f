"""The largest values of each tensor with their places; error feedback brings the others later.

Places are sorted and written in 16 bits within blocks of 65,536 elements, with the number of values in each block
but the last.

References:
    Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, arXiv 1809.07599 (top-k contracts);
    Lin et al., "Deep Gradient Compression", ICLR 2018, arXiv 1712.01887.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from mycel.arguments import real_number
from mycel.data_parallel.compress.aggregation import Aggregation, Gathered
from mycel.data_parallel.compress.base import Compressor, numel
from mycel.data_parallel.compress.context import Context
from mycel.wire.buckets import bytes_of

__all__ = ["TopK"]

_BLOCK = 1 << 16
_DENSITIES = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)


class TopK(Compressor):
    """``density`` of the values, six bytes each.

    Args:
        density: share of the values that travel, above 0 and at most 1; at least one of every tensor.

    Raises:
        UsageError: the density is out of range.

    Examples:
        >>> TopK(0.01).wire_bytes((1000, 10)), TopK(0.01).wire_bytes((1000, 100))
        (600, 6004)
    """

    name: ClassVar[str] = "top_k"
    aggregation: ClassVar[Aggregation] = Gathered()
    is_contractive = True

    def __init__(self, density: float = 0.01) -> None:
        self.density = real_number(density, "share of elements that is sent", above=0, most=1)

    def wire_bytes(self, shape: Sequence[int]) -> int:
        """See ``Compressor``."""
        count = numel(shape)
        return 6 * self._kept(count) + 4 * _counts(count)

    def compress(self, tensor: Tensor, context: Context) -> Tensor:
        """See ``Compressor``: values, places in their blocks, values a block."""
        flat = tensor.reshape(-1)
        count = len(flat)
        # A number that is not one comes first, so that overflow is seen.
        places = torch.topk(flat.abs().nan_to_num_(nan=torch.inf), self._kept(count), sorted=False).indices
        places = places.sort().values
        held = torch.bincount(places // _BLOCK, minlength=_counts(count) + 1)[: _counts(count)]
        return torch.cat([bytes_of(flat[places]), bytes_of((places % _BLOCK).to(torch.int16)), bytes_of(held.int())])

    def decompress(self, payload: Tensor, shape: Sequence[int], context: Context) -> Tensor:
        """See ``Compressor``."""
        out = torch.zeros(tuple(shape), dtype=torch.float32, device=payload.device)
        self.accumulate(payload, out, context)
        return out

    def accumulate(self, payload: Tensor, out: Tensor, context: Context) -> None:
        """See ``Compressor``: touches only the places that are there."""
        kept, counts = self._kept(out.numel()), _counts(out.numel())
        values, places, held = payload.clone().split_with_sizes([4 * kept, 2 * kept, 4 * counts])
        index = places.clone().view(torch.int16).long() & (_BLOCK - 1)
        if counts:
            filled = held.clone().view(torch.int32).long()
            filled = torch.cat([filled, (kept - filled.sum()).view(1)])
            index += torch.arange(len(filled), device=out.device).repeat_interleave(filled) * _BLOCK
        out.view(-1).index_add_(0, index, values.clone().view(torch.float32))

    def levels(self) -> tuple[float, ...]:
        """Densities."""
        return _DENSITIES

    def at(self, level: float) -> Compressor:
        """The same of another density."""
        super().at(level)
        return TopK(level)

    def _kept(self, count: int) -> int:
        return min(count, max(1, math.ceil(self.density * count)))


def _counts(count: int) -> int:
    """Blocks whose number of values is written: all but the last."""
    return max(0, -(-count // _BLOCK) - 1)
