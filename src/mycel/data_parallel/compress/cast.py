"""Half types: two bytes a value, added by the network as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from mycel.data_parallel.compress.aggregation import Aggregation, Linear
from mycel.data_parallel.compress.base import Compressor, numel
from mycel.data_parallel.compress.context import Context
from mycel.errors import UsageError
from mycel.names import spelled

__all__ = ["Cast"]

_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


class Cast(Compressor):
    """Values in another floating type.

    Args:
        dtype: ``torch.bfloat16`` (the range of float32, 8 bits of precision) or ``torch.float16`` (11 bits, up to
            65504), or ``torch.float32`` or ``torch.float64``, which change nothing; or the name of one of them.

    Raises:
        UsageError: another type.

    Examples:
        >>> Cast(torch.float16).wire_bytes((3, 5))
        30
    """

    name: ClassVar[str] = "cast"
    aggregation: ClassVar[Aggregation] = Linear()
    is_elementwise: ClassVar[bool] = True

    def __init__(self, dtype: torch.dtype | str = torch.bfloat16) -> None:
        if isinstance(dtype, str):
            dtype = _TYPES[spelled(dtype, _TYPES, "type of gradients")]
        if dtype not in _TYPES.values():
            raise UsageError(f"gradients travel as bfloat16, float16, float32 or float64, not as {dtype}")
        self.dtype = dtype
        self.is_unbiased = dtype.itemsize >= torch.float32.itemsize
        self.is_contractive = True

    @property
    def wants_feedback(self) -> bool:
        """No: what is lost is less than what gradients differ by from batch to batch."""
        return False

    def wire_bytes(self, shape: Sequence[int]) -> int:
        """See ``Compressor``."""
        return numel(shape) * self.dtype.itemsize

    def compress(self, tensor: Tensor, context: Context) -> Tensor:
        """See ``Compressor``."""
        return tensor.reshape(-1).to(self.dtype)

    def decompress(self, payload: Tensor, shape: Sequence[int], context: Context) -> Tensor:
        """See ``Compressor``."""
        return payload.to(torch.promote_types(self.dtype, torch.float32), copy=True).view(tuple(shape))
