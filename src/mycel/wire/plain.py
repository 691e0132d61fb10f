"""Rows as they are, or rounded to bfloat16: no scales."""

from __future__ import annotations

import torch
from torch import Tensor

from mycel.wire.base import WireCodec

__all__ = ["BFloat16Codec", "IdentityCodec"]


class IdentityCodec(WireCodec):
    """As they are."""

    def encode(self, rows: Tensor, *, gradient: bool = False) -> Tensor:
        """See ``WireCodec``."""
        return rows

    def decode(self, wire: Tensor, width: int, dtype: torch.dtype, *, gradient: bool = False) -> Tensor:
        """See ``WireCodec``."""
        return wire

    def row_error(self, *, gradient: bool = False) -> float:
        """See ``WireCodec``."""
        return 0.0


class BFloat16Codec(WireCodec):
    """Rounded to bfloat16: half of float32's bytes. Numbers that are not finite stay what they are."""

    def encode(self, rows: Tensor, *, gradient: bool = False) -> Tensor:
        """See ``WireCodec``."""
        return rows.to(torch.bfloat16)

    def decode(self, wire: Tensor, width: int, dtype: torch.dtype, *, gradient: bool = False) -> Tensor:
        """See ``WireCodec``."""
        if dtype == torch.float16:  # a number next to the end of its range may have been rounded over it
            wire = torch.where(wire.isinf(), wire, wire.float().clamp(-65504.0, 65504.0))
        return wire.to(dtype)

    def row_error(self, *, gradient: bool = False) -> float:
        """See ``WireCodec``."""
        return 2.0**-8
