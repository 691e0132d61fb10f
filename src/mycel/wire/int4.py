"""Rows of signed halves of bytes."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from mycel.errors import UsageError
from mycel.wire.base import WireCodec
from mycel.wire.scaled import Noise, decode_scaled, encode_scaled, round_at_random

__all__ = ["Int4Codec"]

_LARGEST = 7


class Int4Codec(WireCodec):
    """Two numbers a byte and two bytes a row: multiples of a step, 7 of which are the row's largest magnitude.

    The first half of a row is in the low halves of its bytes. Otherwise as ``Int8Codec``, with steps 18 times as
    wide: nearest rounding would lose every gradient below a fourteenth of the largest one in its row, random rounding
    keeps them on average.

    Args:
        gradients: ``"coded"``, or ``"exact"``: as they are.

    Raises:
        UsageError: another word.
    """

    def __init__(self, gradients: Literal["coded", "exact"] = "coded") -> None:
        if gradients not in ("coded", "exact"):
            raise UsageError(f"int4 rows: gradients {gradients!r}; expected 'coded' or 'exact'")
        self.gradients = gradients
        self._noise = Noise()

    def encode(self, rows: Tensor, *, gradient: bool = False) -> Tensor:
        """See ``WireCodec``."""
        if gradient and self.gradients == "exact":
            return rows
        half = -(-rows.shape[1] // 2)

        def pack(numbers: Tensor) -> Tensor:
            rounded = round_at_random(numbers, self._noise) if gradient else numbers.round_()
            halves = functional.pad(rounded.add_(8.0), (0, 2 * half - numbers.shape[1])).to(torch.uint8)
            return halves[:, :half] | (halves[:, half:] << 4)

        return encode_scaled(rows, _LARGEST, half, pack)

    def decode(self, wire: Tensor, width: int, dtype: torch.dtype, *, gradient: bool = False) -> Tensor:
        """See ``WireCodec``."""
        if gradient and self.gradients == "exact":
            return wire
        half = -(-width // 2)

        def unpack(packed: Tensor) -> Tensor:
            halves = torch.cat([packed & 15, packed >> 4], dim=1)[:, :width]
            return halves.to(torch.float32).sub_(8.0)

        return decode_scaled(wire, width, half, dtype, unpack)

    def row_error(self, *, gradient: bool = False) -> float:
        """See ``WireCodec``; for rows whose largest magnitude is from 1e-37 up."""
        if gradient:
            return 0.0 if self.gradients == "exact" else _WIDEST_STEP
        return _WIDEST_STEP / 2


#: Of a row whose largest magnitude is 1: bfloat16 rounds steps up by as much.
_WIDEST_STEP = (1 + 2.0**-7) / _LARGEST
