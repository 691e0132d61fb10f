"""Rows of eight-bit floating-point numbers: e4m3 forward, e5m2 backward."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mycel.errors import UsageError
from mycel.wire.base import WireCodec
from mycel.wire.scaled import Noise, decode_scaled, encode_scaled

__all__ = ["Float8Codec"]

_LARGEST_E4M3 = 448.0
_LARGEST_E5M2 = 57344.0
#: Bfloat16 rounds scales up by as much.
_WIDER = 1 + 2.0**-7


class Float8Codec(WireCodec):
    """One byte a number and two a row: numbers with four bits of exponent and three of mantissa, times a scale.

    Errors are a part of each number, down to a hundred-thousandth of the largest one in its row, where those of
    ``Int8Codec`` are a part of the largest. Gradients have five bits of exponent and two of mantissa, and are rounded
    up or down at random, so that they are right on average. See ``mycel.wire.scaled`` for rows of zeros and
    rows that are not finite.

    Bytes travel as ``uint8``, which every backend takes; both formats are made and read by shifting bits of float16,
    which CPUs convert from and to many at a time.

    Args:
        gradients: ``"coded"``, or ``"exact"``: as they are.

    Raises:
        UsageError: another word.

    References:
        Micikevicius et al., "FP8 Formats for Deep Learning", 2022, section 3 (formats, and which for what).
    """

    def __init__(self, gradients: Literal["coded", "exact"] = "coded") -> None:
        if gradients not in ("coded", "exact"):
            raise UsageError(f"fp8 rows: gradients {gradients!r}; expected 'coded' or 'exact'")
        self.gradients = gradients
        self._noise = Noise()

    def encode(self, rows: Tensor, *, gradient: bool = False) -> Tensor:
        """See ``WireCodec``."""
        if not gradient:
            return encode_scaled(rows, _LARGEST_E4M3, rows.shape[1], _to_e4m3)
        if self.gradients == "exact":
            return rows

        def pack(numbers: Tensor) -> Tensor:
            # The upper byte of a float16 is an e5m2; noise in the lower one decides whether it carries.
            noise = self._noise.like(numbers).to(torch.int16)
            return ((numbers.to(torch.float16).view(torch.int16) + noise) >> 8).to(torch.uint8)

        return encode_scaled(rows, _LARGEST_E5M2, rows.shape[1], pack)

    def decode(self, wire: Tensor, width: int, dtype: torch.dtype, *, gradient: bool = False) -> Tensor:
        """See ``WireCodec``."""
        if gradient and self.gradients == "exact":
            return wire
        return decode_scaled(wire, width, width, dtype, _from_e5m2 if gradient else _from_e4m3)

    def row_error(self, *, gradient: bool = False) -> float:
        """See ``WireCodec``; for rows whose largest magnitude is from 1e-32 up."""
        if gradient:
            return 0.0 if self.gradients == "exact" else 8192 / _LARGEST_E5M2 * _WIDER
        return 16 / _LARGEST_E4M3 * _WIDER


def _to_e4m3(numbers: Tensor) -> Tensor:
    return numbers.to(torch.float8_e4m3fn).view(torch.uint8)


def _from_e4m3(packed: Tensor) -> Tensor:
    """Shifted into a float16, which has one more bit of exponent and whose value then is 2^-8 of it."""
    bits = (packed.view(torch.int8).to(torch.int16) << 7) & -0x4001
    return bits.view(torch.float16).to(torch.float32).mul_(256.0)


def _from_e5m2(packed: Tensor) -> Tensor:
    return (packed.to(torch.int16) << 8).view(torch.float16).to(torch.float32)
