"""A rank without tokens computes on one that counts for nothing, because models refuse tensors without any.

Attention, scans and convolutions over ranks see the truth, which is no token, and give the stand-in a zero.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from mycel.sequence.context import SequenceContext

__all__ = ["rows_of", "with_stand_in", "without_stand_in"]


def rows_of(context: SequenceContext) -> int:
    """Tokens in the tensors of this rank: those that it holds, or the stand-in."""
    return max(1, context.num_tokens)


def without_stand_in(x: Tensor, context: SequenceContext, dim: int) -> Tensor:
    """The tokens that are there."""
    return x if context.num_tokens else x.narrow(dim, 0, 0)


def with_stand_in(x: Tensor, context: SequenceContext, dim: int) -> Tensor:
    """The tokens that are there, or a zero for the stand-in, which hangs in the graph all the same."""
    if context.num_tokens:
        return x
    behind = x.dim() - 1 - dim % x.dim()
    return functional.pad(x, (0, 0) * behind + (0, 1))
