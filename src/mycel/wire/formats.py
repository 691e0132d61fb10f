"""Number formats with a scale: what rows between experts and buckets of gradients are both made of.

A format turns numbers up to its largest into codes of a few bits. What the scale is, how many numbers share one and
how it travels is for those who use it: ``mycel.wire.scaled`` for rows, compressors of gradients for buckets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from mycel.arguments import whole_number
from mycel.errors import UsageError
from mycel.wire.buckets import decode_integers, encode_integers, of_elements, pack, packed_bytes, unpack
from mycel.wire.noise import round_at_random, uniform

__all__ = ["Float8", "Format", "Integers"]


class Format(ABC):
    """Numbers of magnitude up to ``largest`` in ``bits`` bits.

    Attributes:
        bits: of a code.
        largest: magnitude; integers reach from minus that to that.
        coarsest: most that rounding to the nearest moves a number up to ``largest``; up or down, at most twice that.
    """

    bits: int
    largest: float
    coarsest: float

    @abstractmethod
    def to_codes(self, numbers: Tensor, noise: Tensor | None = None) -> Tensor:
        """A byte for each number.

        Args:
            numbers: float32, up to ``largest``; may be written on.
            noise: uniform ``uint8`` for each number: rounds up or down by chance, so that the mean is right.
                ``None`` rounds to the nearest.
        """

    @abstractmethod
    def from_codes(self, codes: Tensor) -> Tensor:
        """New float32 numbers from bytes."""

    def encode(self, values: Tensor, scales: Tensor, *, bucket_size: int) -> Tensor:
        """Packed codes of a vector whose buckets have these largest magnitudes, rounded to the nearest.

        Args:
            values: float32, 1-D, contiguous.
            scales: float32, one a bucket; values beyond them are cut off.
            bucket_size: elements that share a scale.

        Returns:
            ``uint8`` of ``packed_bytes(len(values), bits)``.
        """
        numbers = values * of_elements(_inverses(scales, self.largest), bucket_size, len(values))
        return self.to_codes(numbers.clamp_(-self.largest, self.largest))

    def decode(self, packed: Tensor, scales: Tensor, out: Tensor, *, bucket_size: int, add: bool = False) -> None:
        """Writes what ``encode`` made to ``out`` (float32, contiguous), or adds it.

        A scale that is not finite makes its bucket NaN: overflow is seen, not hidden.
        """
        flat = out.view(-1)
        step = torch.where(scales.isfinite(), scales / self.largest, torch.nan)
        numbers = self._unpacked(packed, len(flat)).mul_(of_elements(step, bucket_size, len(flat)))
        if add:
            flat.add_(numbers)
        else:
            flat.copy_(numbers)

    def _unpacked(self, packed: Tensor, count: int) -> Tensor:
        return self.from_codes(packed)


class Integers(Format):
    """Signed integers of a few bits.

    Args:
        bits: 2 to 8; 8 has 255 levels, 4 has 15.

    Raises:
        UsageError: bits out of range.

    References:
        Alistarh et al., "QSGD", NeurIPS 2017, arXiv 1610.02132, section 3 (stochastic levels); Gupta et al., "Deep
        Learning with Limited Numerical Precision", ICML 2015, section 3 (stochastic rounding).
    """

    def __init__(self, bits: int) -> None:
        bits = whole_number(bits, "bits a value")
        if not 2 <= bits <= 8:
            raise UsageError(f"{bits} bits a value; 2 to 8 are possible (1 is the compressor 'sign')")
        self.bits, self.largest, self.coarsest = bits, float((1 << (bits - 1)) - 1), 0.5

    def to_codes(self, numbers: Tensor, noise: Tensor | None = None) -> Tensor:
        """See ``Format``: signed bytes."""
        rounded = numbers.round_() if noise is None else round_at_random(numbers, noise)
        return rounded.to(torch.int8).view(torch.uint8)

    def from_codes(self, codes: Tensor) -> Tensor:
        """See ``Format``."""
        return codes.view(torch.int8).to(torch.float32)

    def encode(self, values: Tensor, scales: Tensor, *, bucket_size: int, seed: int | None = None) -> Tensor:
        """See ``Format``: without a sign, ``round(values / scale * largest) + largest``, side by side.

        Args:
            values: as there.
            scales: as there.
            bucket_size: as there.
            seed: round up or down by chance so that the mean is right; ``None`` rounds to the nearest.
        """
        limit = int(self.largest)
        if values.is_cpu:
            packed = torch.empty(packed_bytes(len(values), self.bits), dtype=torch.uint8)
            by_chance, start = seed is not None, np.uint64(seed or 0)
            encode_integers(values.numpy(), scales.numpy(), bucket_size, self.bits, by_chance, start, packed.numpy())
            return packed
        levels = values * of_elements(_inverses(scales, limit), bucket_size, len(values))
        levels = levels.clamp(-limit, limit) + limit
        levels = levels + (0.5 if seed is None else uniform(seed, len(values), values.device))
        return pack(levels.floor().clamp_(0, 2 * limit).to(torch.uint8), self.bits)

    def decode(self, packed: Tensor, scales: Tensor, out: Tensor, *, bucket_size: int, add: bool = False) -> None:
        """See ``Format``."""
        if out.is_cpu:
            decode_integers(packed.numpy(), scales.numpy(), bucket_size, self.bits, add, out.view(-1).numpy())
        else:
            super().decode(packed, scales, out, bucket_size=bucket_size, add=add)

    def _unpacked(self, packed: Tensor, count: int) -> Tensor:
        return unpack(packed, count, self.bits).float().sub_(self.largest)


class Float8(Format):
    """Eight-bit floating-point numbers; bytes travel as ``uint8``, which every backend takes.

    Args:
        dtype: ``torch.float8_e4m3fn`` (4 bits of precision) or ``torch.float8_e5m2`` (3 bits, a wider range).

    Raises:
        UsageError: another type.

    References:
        Micikevicius et al., "FP8 Formats for Deep Learning", 2022, arXiv 2209.05433.
    """

    def __init__(self, dtype: torch.dtype = torch.float8_e4m3fn) -> None:
        if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            raise UsageError(f"fp8 is float8_e4m3fn or float8_e5m2, not {dtype}")
        self.dtype, self.bits = dtype, 8
        self.largest, self.coarsest = (448.0, 16.0) if dtype == torch.float8_e4m3fn else (57344.0, 4096.0)

    def to_codes(self, numbers: Tensor, noise: Tensor | None = None) -> Tensor:
        """See ``Format``; by chance in e5m2 only."""
        if noise is None:
            return numbers.to(self.dtype).view(torch.uint8)
        assert self.dtype == torch.float8_e5m2
        # The upper byte of a float16 is an e5m2; noise in the lower one decides whether it carries.
        return ((numbers.to(torch.float16).view(torch.int16) + noise.to(torch.int16)) >> 8).to(torch.uint8)

    def from_codes(self, codes: Tensor) -> Tensor:
        """See ``Format``: bits shifted into a float16, which CPUs convert many at a time."""
        if self.dtype == torch.float8_e5m2:
            return (codes.to(torch.int16) << 8).view(torch.float16).to(torch.float32)
        # Float16 has one more bit of exponent, and its value then is 2^-8 of it.
        bits = (codes.view(torch.int8).to(torch.int16) << 7) & -0x4001
        return bits.view(torch.float16).to(torch.float32).mul_(256.0)


def _inverses(scales: Tensor, largest: float) -> Tensor:
    return torch.where((scales > 0) & scales.isfinite(), largest / scales, 0.0)
