"""Integers from -7 to 7 in less than four bits: fifteen values, which leave a sixteenth of every code unused.

Sixteen codes are the digits of one number below 15^16 < 2^63, and the 64th such number of a bucket of 1,024 elements
fills the bits that are left in the other 63. With its scale a bucket is 508 bytes, 3.97 bits an element: less than an
eighth of float32, where four bits and a scale are more.

References:
    Alistarh et al., "QSGD", NeurIPS 2017, arXiv 1610.02132, section 3 (levels and a scale for each bucket);
    A. Douillard et al., "Streaming DiLoCo with overlapping communication", 2025, arXiv 2501.18512, section 2.3
    (outer gradients in four bits, added up in float32).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from mycel.data_parallel.compress.aggregation import Aggregation, Scattered
from mycel.data_parallel.compress.base import Compressor, numel
from mycel.data_parallel.compress.context import Context
from mycel.wire.buckets import bucket_scales, bytes_of, floats_in, of_elements
from mycel.wire.noise import uniform

__all__ = ["DenseInt4"]

_BUCKET = 1024
_LARGEST = 7
_DIGITS = 16
_BASE = 15
_WORDS = _BUCKET // _DIGITS
_FULL_BYTES = 8 * (_WORDS - 1) + 4
#: Elements that are worked on at once: words and noise take eight bytes each meanwhile.
_AT_ONCE = 256 * _BUCKET


class DenseInt4(Compressor):
    """Fifteen levels a value and a scale for each 1,024: 508 bytes for these.

    Args:
        stochastic: round by chance, unbiased; otherwise to the nearest, with error feedback by default.

    Examples:
        >>> DenseInt4().wire_bytes((1024, 3)), DenseInt4().wire_bytes((40,))
        (1524, 28)
        >>> values, context = torch.tensor([7.0, -3.2, 0.4]), Context(name="w")
        >>> int4 = DenseInt4()
        >>> int4.decompress(int4.compress(values, context), (3,), context).tolist()
        [7.0, -3.0, 0.0]
    """

    name: ClassVar[str] = "dense_int4"
    aggregation: ClassVar[Aggregation] = Scattered()
    is_elementwise: ClassVar[bool] = True

    def __init__(self, *, stochastic: bool = False) -> None:
        self.stochastic = stochastic
        self.is_unbiased = stochastic
        self.is_contractive = not stochastic

    def wire_bytes(self, shape: Sequence[int]) -> int:
        """See ``Compressor``."""
        full, rest = divmod(numel(shape), _BUCKET)
        return full * _FULL_BYTES + (8 * -(-rest // _DIGITS) + 4 if rest else 0)

    def compress(self, tensor: Tensor, context: Context) -> Tensor:
        """See ``Compressor``: scales, words of full buckets, words of the last one if it is not full."""
        flat = tensor.reshape(-1)
        scales = bucket_scales(flat, _BUCKET)
        seed = context.random_seed(shared=False) if self.stochastic else None
        full = len(flat) // _BUCKET * _BUCKET
        parts = [bytes_of(scales)]
        for begin in range(0, full, _AT_ONCE):
            words = _words(flat, scales, begin, min(full, begin + _AT_ONCE), seed).view(-1, _WORDS)
            spare = (words[:, -1:] >> torch.arange(_WORDS - 1, device=words.device)) & 1
            parts.append(bytes_of((words[:, :-1] | (spare << 63)).contiguous()))
        if full < len(flat):
            parts.append(bytes_of(_words(flat, scales, full, len(flat), seed)))
        return torch.cat(parts)

    def decompress(self, payload: Tensor, shape: Sequence[int], context: Context) -> Tensor:
        """See ``Compressor``: a scale that is not finite makes its bucket NaN, so that overflow is seen."""
        out = torch.empty(tuple(shape), dtype=torch.float32, device=payload.device)
        flat = out.view(-1)
        cut = 4 * -(-len(flat) // _BUCKET)
        scales = floats_in(payload[:cut])
        steps = torch.where(scales.isfinite(), scales / _LARGEST, torch.nan)
        full = len(flat) // _BUCKET * _BUCKET
        at = cut
        for begin in range(0, full, _AT_ONCE):
            end = min(full, begin + _AT_ONCE)
            size = (end - begin) // _BUCKET * 8 * (_WORDS - 1)
            held = payload[at : at + size].clone().view(torch.int64).view(-1, _WORDS - 1)
            at += size
            bits = ((held >> 63) & 1) << torch.arange(_WORDS - 1, device=held.device)
            words = torch.cat([held & ((1 << 63) - 1), bits.sum(dim=1, keepdim=True)], dim=1)
            flat[begin:end] = _values(words.view(-1), steps[begin // _BUCKET : end // _BUCKET], end - begin)
        if full < len(flat):
            words = payload[at:].clone().view(torch.int64)
            flat[full:] = _values(words, steps[-1:], len(flat) - full)
        return out


def _words(flat: Tensor, scales: Tensor, begin: int, end: int, seed: int | None) -> Tensor:
    """Sixteen elements an ``int64`` below 15^16."""
    own = scales[begin // _BUCKET : -(-end // _BUCKET)]
    inverses = torch.where((own > 0) & own.isfinite(), _LARGEST / own, 0.0)
    levels = flat[begin:end] * of_elements(inverses, _BUCKET, end - begin)
    # The inverse of a subnormal scale is infinite, and zero times that is no number.
    levels = levels.nan_to_num_(nan=0.0).clamp_(-_LARGEST, _LARGEST).add_(_LARGEST)
    levels += 0.5 if seed is None else uniform(seed + begin, end - begin, flat.device)
    codes = levels.floor_().clamp_(0, 2 * _LARGEST).long()
    digits = functional.pad(codes, (0, -len(codes) % _DIGITS)).view(-1, _DIGITS)
    powers = torch.tensor([_BASE**i for i in range(_DIGITS)], device=flat.device)
    words: Tensor = (digits * powers).sum(dim=1)
    return words


def _values(words: Tensor, steps: Tensor, count: int) -> Tensor:
    rest, digits = words, []
    for _ in range(_DIGITS):
        upper = torch.div(rest, _BASE, rounding_mode="floor")
        digits.append(rest - upper * _BASE)
        rest = upper
    numbers = torch.stack(digits, dim=1).view(-1)[:count].float().sub_(_LARGEST)
    return numbers.mul_(of_elements(steps, _BUCKET, count))
