"""Rows as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from mycel.wire.base import WireCodec

__all__ = ["IdentityCodec"]


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
