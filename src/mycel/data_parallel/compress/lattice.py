"""Quantisation to a randomly shifted lattice, a shift for each bucket: what QSDP does to weights.

All values of a bucket are rounded to the nearest point of ``shift + step * integers``. Over the shift, the result is
unbiased, as with rounding by chance; but its error is at most half a step instead of a whole one, and the same values
become the same values again. The shift is drawn from the buckets' scales, which travel anyway: nothing else has to
be sent or remembered, weights gathered for the forward and for the backward pass are the same, and the next step has
other shifts because its scales are others.

References:
    I. Markov, A. Vladu, Q. Guo, D. Alistarh, "Quantized Distributed Training of Large Models with Convergence
    Guarantees", ICML 2023, arXiv 2302.02390, section 3 (random shifts), section 5 (buckets).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from mycel.data_parallel.compress.base import Compressor
from mycel.data_parallel.compress.context import Context
from mycel.data_parallel.compress.int_bucket import IntegerBuckets
from mycel.wire.buckets import of_elements
from mycel.wire.noise import uniform

__all__ = ["ShiftedLattice"]

_SEED_BITS = (1 << 63) - 1


class ShiftedLattice(IntegerBuckets):
    """``bits`` a value and four bytes a bucket.

    Args:
        bits: 2 to 8.
        bucket_size: elements that share a scale and a shift; a multiple of 8.
        shifted: draw shifts; otherwise they are 0, which rounds to the nearest.

    Raises:
        UsageError: sizes out of range.

    Examples:
        >>> values = torch.linspace(-1, 1, 9)
        >>> lattice, context = ShiftedLattice(8), Context(name="weight")
        >>> found = lattice.decompress(lattice.compress(values, context), values.shape, context)
        >>> bool((found - values).abs().max() <= 0.5 / 127 + 1e-6)
        True
    """

    name: ClassVar[str] = "lattice"

    def __init__(self, bits: int = 8, *, bucket_size: int = 1024, shifted: bool = True) -> None:
        super().__init__(bits, bucket_size)
        self.shifted = shifted
        self.is_unbiased = shifted
        self.is_contractive = not shifted

    def decompress(self, payload: Tensor, shape: Sequence[int], context: Context) -> Tensor:
        """See ``Compressor``."""
        out = torch.empty(tuple(shape), dtype=torch.float32, device=payload.device)
        shifts = self._spread(self._decode(payload, out, add=False), out.numel(), context)
        return out if shifts is None else out.add_(shifts.view(out.shape))

    def accumulate(self, payload: Tensor, out: Tensor, context: Context) -> None:
        """See ``Compressor``."""
        out.add_(self.decompress(payload, out.shape, context))

    def at(self, level: float) -> Compressor:
        """The same with other bits."""
        super().at(level)
        return ShiftedLattice(int(level), bucket_size=self.bucket_size, shifted=self.shifted)

    def _codes(self, flat: Tensor, scales: Tensor, context: Context) -> Tensor:
        shifts = self._spread(scales, flat.numel(), context)
        return super()._codes(flat if shifts is None else flat - shifts, scales, context)

    def _spread(self, scales: Tensor, count: int, context: Context) -> Tensor | None:
        """The shift of each element, at most half a step to either side."""
        if not self.shifted or not count:
            return None
        odd = torch.arange(1, 2 * len(scales), 2, dtype=torch.int64, device=scales.device)
        digest = int((scales.view(torch.int32).long() * odd * 0x9E3779B1).sum()) & _SEED_BITS
        # Whoever gathers weights gives the same step every time, so that they do not change between two passes.
        seed = context.random_seed(shared=True)
        at = uniform((digest + seed) & _SEED_BITS, len(scales), scales.device) - 0.5
        step = scales / ((1 << (self.bits - 1)) - 1)
        return of_elements(at * step, self.bucket_size, count)
