"""Rows of signed bytes."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mycel.errors import UsageError
from mycel.wire.base import WireCodec
from mycel.wire.scaled import Noise, decode_scaled, encode_scaled, round_at_random

__all__ = ["Int8Codec"]

_LARGEST = 127


class Int8Codec(WireCodec):
    """One byte a number and two a row: multiples of a step, 127 of which are the largest magnitude of the row.

    Tokens and results are rounded to the nearest multiple, gradients up or down at random, so that they are right on
    average. See ``mycel.wire.scaled`` for rows of zeros and rows that are not finite.

    Args:
        gradients: ``"coded"``, or ``"exact"``: as they are (rounding then is straight-through).

    Raises:
        UsageError: another word.

    References:
        Dettmers et al., "LLM.int8()", NeurIPS 2022, section 2.1 (absmax scales of rows); Gupta et al., "Deep Learning
        with Limited Numerical Precision", ICML 2015, section 3 (stochastic rounding).
    """

    def __init__(self, gradients: Literal["coded", "exact"] = "coded") -> None:
        if gradients not in ("coded", "exact"):
            raise UsageError(f"int8 rows: gradients {gradients!r}; expected 'coded' or 'exact'")
        self.gradients = gradients
        self._noise = Noise()

    def encode(self, rows: Tensor, *, gradient: bool = False) -> Tensor:
        """See ``WireCodec``."""
        if gradient and self.gradients == "exact":
            return rows

        def pack(numbers: Tensor) -> Tensor:
            rounded = round_at_random(numbers, self._noise) if gradient else numbers.round_()
            return rounded.to(torch.int8).view(torch.uint8)

        return encode_scaled(rows, _LARGEST, rows.shape[1], pack)

    def decode(self, wire: Tensor, width: int, dtype: torch.dtype, *, gradient: bool = False) -> Tensor:
        """See ``WireCodec``."""
        if gradient and self.gradients == "exact":
            return wire
        return decode_scaled(wire, width, width, dtype, lambda packed: packed.view(torch.int8).to(torch.float32))

    def row_error(self, *, gradient: bool = False) -> float:
        """See ``WireCodec``; for rows whose largest magnitude is from 1e-36 up."""
        if gradient:
            return 0.0 if self.gradients == "exact" else _WIDEST_STEP
        return _WIDEST_STEP / 2


#: Of a row whose largest magnitude is 1: bfloat16 rounds steps up by as much.
_WIDEST_STEP = (1 + 2.0**-7) / _LARGEST
