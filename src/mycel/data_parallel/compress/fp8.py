"""Eight-bit floats with a scale for each bucket: small values keep their relative precision.

References:
    Micikevicius et al., "FP8 Formats for Deep Learning", 2022, arXiv 2209.05433 (the two formats).
"""

from __future__ import annotations

from typing import ClassVar

import torch

from mycel.data_parallel.compress.int_bucket import Bucketed
from mycel.wire.formats import Float8

__all__ = ["FP8"]


class FP8(Bucketed):
    """One byte a value and four a bucket, rounded to the nearest.

    Args:
        dtype: ``torch.float8_e4m3fn`` (4 bits of precision) or ``torch.float8_e5m2`` (3 bits, a wider range).
        bucket_size: elements that share a scale.

    Raises:
        UsageError: another type, or an empty bucket.

    Examples:
        >>> FP8().wire_bytes((1024, 2))
        2056
    """

    name: ClassVar[str] = "fp8"
    is_contractive = True

    def __init__(self, dtype: torch.dtype = torch.float8_e4m3fn, *, bucket_size: int = 1024) -> None:
        super().__init__(Float8(dtype), bucket_size)
