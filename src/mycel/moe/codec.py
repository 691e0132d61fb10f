"""What rows look like on the wire. A codec turns each row into a row of bytes or numbers of its own, and back.

Dispatchers encode what they send, in both directions and in the backward pass as well; what stays on the rank passes
through the codec too, so that a token's result does not depend on where its expert lives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from mycel.errors import UsageError

__all__ = ["CODECS", "BFloat16Codec", "IdentityCodec", "WireCodec", "make_codec"]


class WireCodec(ABC):
    """Row by row: ``n`` rows become ``n`` rows, so that split sizes stay what they are."""

    @abstractmethod
    def encode(self, rows: Tensor) -> Tensor:
        """What travels for these rows, shape ``[n, anything]``, the same width and type on every rank."""

    @abstractmethod
    def decode(self, wire: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows again, in the type they had."""


class IdentityCodec(WireCodec):
    """As they are."""

    def encode(self, rows: Tensor) -> Tensor:
        """See ``WireCodec``."""
        return rows

    def decode(self, wire: Tensor, dtype: torch.dtype) -> Tensor:
        """See ``WireCodec``."""
        return wire


class BFloat16Codec(WireCodec):
    """Rounded to bfloat16: half of float32's bytes."""

    def encode(self, rows: Tensor) -> Tensor:
        """See ``WireCodec``."""
        return rows.to(torch.bfloat16)

    def decode(self, wire: Tensor, dtype: torch.dtype) -> Tensor:
        """See ``WireCodec``."""
        return wire.to(dtype)


#: Codecs by name.
CODECS: dict[str, type[WireCodec]] = {"identity": IdentityCodec, "bf16": BFloat16Codec}


def make_codec(name: str) -> WireCodec:
    """A codec.

    Raises:
        UsageError: no codec has that name.
    """
    if name not in CODECS:
        raise UsageError(f"no codec is called {name!r}; known: {', '.join(sorted(CODECS))}")
    return CODECS[name]()
