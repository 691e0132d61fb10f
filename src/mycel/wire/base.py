"""What a codec is: rows of numbers into rows of bytes or other numbers, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

__all__ = ["WireCodec"]


class WireCodec(ABC):
    """Row by row: ``n`` rows become ``n`` rows, so that split sizes stay what they are.

    Rows have any floating type; there may be none. What a row becomes does not depend on its neighbours.

    Examples:
        >>> from mycel.wire import make_codec
        >>> codec, rows = make_codec("int8"), torch.randn(3, 16)
        >>> wire = codec.encode(rows)
        >>> wire.dtype, wire.shape  # a byte for each number, two for what they are multiples of
        (torch.uint8, torch.Size([3, 18]))
        >>> error = (codec.decode(wire, 16, rows.dtype) - rows).abs().amax(dim=1)
        >>> bool((error <= codec.row_error() * rows.abs().amax(dim=1)).all())
        True
    """

    @abstractmethod
    def encode(self, rows: Tensor, *, gradient: bool = False) -> Tensor:
        """What travels.

        Args:
            rows: shape ``[n, width]``.
            gradient: of a backward pass; codecs may treat those otherwise.

        Returns:
            Shape ``[n, anything]``; width and type follow from the codec, the width and type of the rows and
            ``gradient`` alone, so that they are the same on every rank.
        """

    @abstractmethod
    def decode(self, wire: Tensor, width: int, dtype: torch.dtype, *, gradient: bool = False) -> Tensor:
        """The rows again.

        Args:
            wire: what ``encode`` gave, shape ``[n, anything]``.
            width: of the rows.
            dtype: that the rows had.
            gradient: as ``encode`` was told.

        Returns:
            Shape ``[n, width]``, of type ``dtype``.
        """

    @abstractmethod
    def row_error(self, *, gradient: bool = False) -> float:
        """Largest error of a number in a decoded row, as a part of the largest magnitude in that row.

        For rows whose type and size leave room for it; each codec says where its range ends.

        Args:
            gradient: of rows that are encoded as gradients.
        """
