"""Integers from -7 to 7 in less than four bits: fifteen values, which leave a sixteenth of every code unused.

Sixteen codes are the digits of one number below 15^16 < 2^63, and the 64th such number of a bucket of 1,024 elements
fills the bits that are left in the other 63. With its scale a bucket is 508 bytes, 3.97 bits an element: less than an
eighth of float32, where four bits and a scale are more.

Loops are compiled for CPU tensors and torch operations for tensors elsewhere; both give the same bytes.

References:
    Alistarh et al., "QSGD", NeurIPS 2017, arXiv 1610.02132, section 3 (levels and a scale for each bucket);
    A. Douillard et al., "Streaming DiLoCo with overlapping communication", 2025, arXiv 2501.18512, section 2.3
    (outer gradients in four bits, added up in float32).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from mycel.compiled import compiled_without_lock
from mycel.data_parallel.compress.aggregation import Aggregation, Scattered
from mycel.data_parallel.compress.base import Compressor, numel
from mycel.data_parallel.compress.context import Context
from mycel.wire.buckets import bucket_scales, bytes_of, floats_in, of_elements
from mycel.wire.noise import one_of, uniform

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
        full = len(flat) // _BUCKET
        if flat.is_cpu and flat.dtype == torch.float32:
            held = torch.empty(full * (_WORDS - 1), dtype=torch.int64)
            rest = torch.empty(-(-(len(flat) % _BUCKET) // _DIGITS), dtype=torch.int64)
            start = np.uint64(seed or 0)
            _encode(flat.numpy(), scales.numpy(), seed is not None, start, held.numpy(), rest.numpy())
            return torch.cat([bytes_of(scales), bytes_of(held), bytes_of(rest)])
        return torch.cat([bytes_of(scales), *_by_torch(flat, scales, seed)])

    def decompress(self, payload: Tensor, shape: Sequence[int], context: Context) -> Tensor:
        """See ``Compressor``: a scale that is not finite makes its bucket NaN, so that overflow is seen."""
        out = torch.empty(tuple(shape), dtype=torch.float32, device=payload.device)
        self._decode(payload, out, add=False)
        return out

    def accumulate(self, payload: Tensor, out: Tensor, context: Context) -> None:
        """See ``Compressor``: in one pass."""
        self._decode(payload, out, add=True)

    def _decode(self, payload: Tensor, out: Tensor, *, add: bool) -> None:
        flat = out.view(-1)
        cut = 4 * -(-len(flat) // _BUCKET)
        scales = floats_in(payload[:cut])
        if flat.is_cpu and flat.dtype == torch.float32:
            words = payload[cut:].clone().view(torch.int64)  # which begin at any address
            _decode(words.numpy(), scales.numpy(), add, flat.numpy())
        elif add:
            flat.add_(_from_torch(payload[cut:], scales, len(flat)))
        else:
            flat.copy_(_from_torch(payload[cut:], scales, len(flat)))


@compiled_without_lock
def _encode(values: Any, scales: Any, by_chance: bool, seed: Any, held: Any, rest: Any) -> None:
    """Compiled: words of full buckets, the last of each in the upper bits of the others; and of what remains.

    The torch operations below draw from the seed anew every ``_AT_ONCE`` elements, and for what remains.
    """
    count, full, top = len(values), len(values) // _BUCKET, np.float32(_LARGEST)
    codes = np.empty(_DIGITS, dtype=np.uint64)
    for bucket in range(len(scales)):
        scale = scales[bucket]
        inverse = top / scale if scale > 0 and np.isfinite(scale) else np.float32(0)
        first = bucket * _BUCKET
        begin = first // _AT_ONCE * _AT_ONCE if bucket < full else first
        words = _WORDS if bucket < full else len(rest)
        for word in range(words):
            at = first + word * _DIGITS
            for i in range(_DIGITS):
                code = np.uint64(0)
                if at + i < count:
                    level = values[at + i] * inverse
                    if level != level:  # zero times the infinite inverse of a subnormal scale
                        level = np.float32(0)
                    level = min(max(level, -top), top) + top
                    level += one_of(seed + np.uint64(begin), at + i - begin) if by_chance else np.float32(0.5)
                    code = np.uint64(min(int(level), 2 * _LARGEST))
                codes[i] = code
            number = np.uint64(0)
            for i in range(_DIGITS):
                number = number * np.uint64(_BASE) + codes[_DIGITS - 1 - i]
            if bucket == full:
                rest[word] = np.int64(number)
            elif word < _WORDS - 1:
                held[bucket * (_WORDS - 1) + word] = np.int64(number)
            else:
                for i in range(_WORDS - 1):
                    spare = (number >> np.uint64(i)) & np.uint64(1)
                    held[bucket * (_WORDS - 1) + i] |= np.int64(spare << np.uint64(63))


@compiled_without_lock
def _decode(words: Any, scales: Any, add: bool, out: Any) -> None:
    """Compiled: sixteen elements of each word, in two halves that do not wait for each other."""
    count, full, at = len(out), len(out) // _BUCKET, 0
    mask, half = np.uint64((1 << 63) - 1), np.uint64(_BASE ** (_DIGITS // 2))
    base, last = np.uint32(_BASE), np.uint64(0)
    values = np.empty(_DIGITS, dtype=np.float32)
    for bucket in range(len(scales)):
        scale = scales[bucket]
        step = scale / np.float32(_LARGEST) if np.isfinite(scale) else np.float32(np.nan)
        first, last = bucket * _BUCKET, np.uint64(0)
        held = _WORDS - 1 if bucket < full else len(words) - at
        if bucket < full:
            for i in range(held):
                last |= (np.uint64(words[at + i]) >> np.uint64(63)) << np.uint64(i)
        for word in range(_WORDS if bucket < full else held):
            number = np.uint64(words[at + word]) & mask if word < held else last
            upper = number // half
            high = np.uint32(upper)
            low = np.uint32(number - upper * half)
            for i in range(_DIGITS // 2):
                next_low, next_high = low // base, high // base
                values[i] = np.float32(np.int32(low - next_low * base) - _LARGEST) * step
                values[i + _DIGITS // 2] = np.float32(np.int32(high - next_high * base) - _LARGEST) * step
                low, high = next_low, next_high
            start = first + word * _DIGITS
            for i in range(min(_DIGITS, count - start)):
                out[start + i] = out[start + i] + values[i] if add else values[i]
        at += held


def _by_torch(flat: Tensor, scales: Tensor, seed: int | None) -> list[Tensor]:
    """Bytes of the words of full buckets, and of those of what remains."""
    full = len(flat) // _BUCKET * _BUCKET
    parts = []
    for begin in range(0, full, _AT_ONCE):
        words = _words(flat, scales, begin, min(full, begin + _AT_ONCE), seed).view(-1, _WORDS)
        spare = (words[:, -1:] >> torch.arange(_WORDS - 1, device=words.device)) & 1
        parts.append(bytes_of((words[:, :-1] | (spare << 63)).contiguous()))
    if full < len(flat):
        parts.append(bytes_of(_words(flat, scales, full, len(flat), seed)))
    return parts


def _from_torch(payload: Tensor, scales: Tensor, count: int) -> Tensor:
    """Numbers of such bytes."""
    steps = torch.where(scales.isfinite(), scales / _LARGEST, torch.nan)
    flat = torch.empty(count, dtype=torch.float32, device=payload.device)
    full, at = count // _BUCKET * _BUCKET, 0
    for begin in range(0, full, _AT_ONCE):
        end = min(full, begin + _AT_ONCE)
        size = (end - begin) // _BUCKET * 8 * (_WORDS - 1)
        held = payload[at : at + size].clone().view(torch.int64).view(-1, _WORDS - 1)
        at += size
        bits = ((held >> 63) & 1) << torch.arange(_WORDS - 1, device=held.device)
        words = torch.cat([held & ((1 << 63) - 1), bits.sum(dim=1, keepdim=True)], dim=1)
        flat[begin:end] = _values(words.view(-1), steps[begin // _BUCKET : end // _BUCKET], end - begin)
    if full < count:
        words = payload[at:].clone().view(torch.int64)
        flat[full:] = _values(words, steps[-1:], count - full)
    return flat


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
