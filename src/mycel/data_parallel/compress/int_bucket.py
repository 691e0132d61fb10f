"""Integers of a few bits with a scale for each bucket of elements, rounded up or down by chance.

A value between two levels goes to the upper one with the probability of its distance to the lower, so the mean is
exact whatever the number of bits, and many ranks' errors average out. The scale is the bucket's largest magnitude.

References:
    Alistarh et al., "QSGD", NeurIPS 2017, arXiv 1610.02132, section 3 (stochastic levels; buckets in section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from mycel.arguments import whole_number
from mycel.data_parallel.compress.aggregation import Aggregation, Scattered
from mycel.data_parallel.compress.base import Compressor, numel
from mycel.data_parallel.compress.context import Context
from mycel.errors import UsageError
from mycel.wire.buckets import bucket_scales, bytes_of, floats_in, packed_bytes
from mycel.wire.formats import Format, Integers

__all__ = ["Bucketed", "IntegerBuckets", "Quantised"]


class Bucketed(Compressor):
    """Numbers in a format, with a scale for each bucket of elements: what such compressors share.

    Args:
        form: of the numbers.
        bucket_size: elements that share a scale.

    Raises:
        UsageError: an empty bucket.
    """

    aggregation: ClassVar[Aggregation] = Scattered()
    is_elementwise: ClassVar[bool] = True

    def __init__(self, form: Format, bucket_size: int) -> None:
        self.form, self.bucket_size = form, whole_number(bucket_size, "elements a bucket", least=1)

    def wire_bytes(self, shape: Sequence[int]) -> int:
        """See ``Compressor``."""
        count = numel(shape)
        return packed_bytes(count, self.form.bits) + 4 * -(-count // self.bucket_size)

    def compress(self, tensor: Tensor, context: Context) -> Tensor:
        """See ``Compressor``: scales first, then codes."""
        flat = tensor.reshape(-1)
        scales = bucket_scales(flat, self.bucket_size)
        return torch.cat([bytes_of(scales), self._codes(flat, scales, context)])

    def decompress(self, payload: Tensor, shape: Sequence[int], context: Context) -> Tensor:
        """See ``Compressor``."""
        out = torch.empty(tuple(shape), dtype=torch.float32, device=payload.device)
        self._decode(payload, out, add=False)
        return out

    def accumulate(self, payload: Tensor, out: Tensor, context: Context) -> None:
        """See ``Compressor``: in one pass."""
        self._decode(payload, out, add=True)

    def _codes(self, flat: Tensor, scales: Tensor, context: Context) -> Tensor:
        return self.form.encode(flat, scales, bucket_size=self.bucket_size)

    def _decode(self, payload: Tensor, out: Tensor, *, add: bool) -> Tensor:
        """Writes to ``out`` or adds to it; gives the scales."""
        cut = 4 * -(-out.numel() // self.bucket_size)
        scales = floats_in(payload[:cut])
        self.form.decode(payload[cut:], scales, out, bucket_size=self.bucket_size, add=add)
        return scales


class IntegerBuckets(Bucketed):
    """Integers of a few bits in buckets.

    Args:
        bits: 2 to 8; 8 has 255 levels, 4 has 15.
        bucket_size: elements that share a scale; a multiple of 8.

    Raises:
        UsageError: sizes out of range.
    """

    def __init__(self, bits: int, bucket_size: int) -> None:
        self.integers = Integers(bits)
        super().__init__(self.integers, bucket_size)
        if bucket_size % 8:
            raise UsageError(f"buckets of {bucket_size}: give a positive multiple of 8")
        self.bits = bits

    def levels(self) -> tuple[float, ...]:
        """Bits."""
        return (8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0)


class Quantised(IntegerBuckets):
    """``bits`` a value and four bytes a bucket.

    Args:
        bits: 2 to 8; 8 has 255 levels, 4 has 15.
        bucket_size: elements that share a scale; a multiple of 8.
        stochastic: round by chance, unbiased; otherwise to the nearest, which is less wrong each time and wrong in
            the same direction every time.

    Raises:
        UsageError: sizes out of range.

    Examples:
        >>> Quantised(bits=4).wire_bytes((1024, 3)), Quantised(bits=8).wire_bytes((10,))
        (1548, 14)
    """

    name: ClassVar[str] = "quantised"

    def __init__(self, bits: int = 8, *, bucket_size: int = 1024, stochastic: bool = True) -> None:
        super().__init__(bits, bucket_size)
        self.stochastic = stochastic
        self.is_unbiased = stochastic
        # Rounding by chance with few levels can lose more than a bucket holds; to the nearest cannot.
        self.is_contractive = not stochastic

    def at(self, level: float) -> Compressor:
        """The same with other bits."""
        super().at(level)
        return Quantised(int(level), bucket_size=self.bucket_size, stochastic=self.stochastic)

    def _codes(self, flat: Tensor, scales: Tensor, context: Context) -> Tensor:
        seed = context.random_seed(shared=False) if self.stochastic else None
        return self.integers.encode(flat, scales, bucket_size=self.bucket_size, seed=seed)
