"""One bit a value: its sign, and for each bucket the mean magnitude.

Biased, so nearly useless without error feedback, which is on by default. Both halves of the exchange are signs; the
feedback covers both (``aggregation.Scattered``).

References:
    Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014;
    Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019, arXiv 1901.09847 (the scaled sign contracts).
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
from mycel.wire.buckets import bytes_of, floats_in, pack, packed_bytes, unpack

__all__ = ["Sign"]


class Sign(Compressor):
    """One bit a value and four bytes a bucket.

    Args:
        bucket_size: elements that share a magnitude.

    Raises:
        UsageError: an empty bucket.

    Examples:
        >>> Sign().wire_bytes((1024, 8)), Sign().wire_bytes((3,))
        (1056, 5)
    """

    name: ClassVar[str] = "sign"
    aggregation: ClassVar[Aggregation] = Scattered()
    is_elementwise: ClassVar[bool] = True
    is_contractive = True

    def __init__(self, *, bucket_size: int = 1024) -> None:
        self.bucket_size = whole_number(bucket_size, "elements a bucket", least=1)

    def wire_bytes(self, shape: Sequence[int]) -> int:
        """See ``Compressor``."""
        count = numel(shape)
        return packed_bytes(count, 1) + 4 * -(-count // self.bucket_size)

    def compress(self, tensor: Tensor, context: Context) -> Tensor:
        """See ``Compressor``: magnitudes first, then signs; zero counts as positive."""
        flat = tensor.reshape(-1)
        if not len(flat):
            return flat.new_zeros(0, dtype=torch.uint8)
        full = len(flat) // self.bucket_size * self.bucket_size
        magnitudes = flat.abs()
        means = [magnitudes[:full].view(-1, self.bucket_size).mean(dim=1)]
        if full < len(flat):
            means.append(magnitudes[full:].mean().view(1))
        return torch.cat([bytes_of(torch.cat(means)), pack((flat >= 0).to(torch.uint8), 1)])

    def decompress(self, payload: Tensor, shape: Sequence[int], context: Context) -> Tensor:
        """See ``Compressor``."""
        count = numel(shape)
        cut = 4 * -(-count // self.bucket_size)
        scales = floats_in(payload[:cut])
        scales = torch.where(scales.isfinite(), scales, torch.nan).repeat_interleave(self.bucket_size)[:count]
        signs = unpack(payload[cut:], count, 1).float().mul_(2).sub_(1)
        return signs.mul_(scales).view(tuple(shape))
