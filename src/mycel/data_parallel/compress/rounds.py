"""Rounds of communication as values: a compressor asks for them, the exchange carries out those of many at once.

A *conversation* is a generator. It yields a request, is sent the answer, and returns an outcome for each of its
tensors. Conversations of many layers and buckets advance together, so that their requests of one kind travel as one
collective and latencies are paid once for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from mycel.data_parallel.compress.context import Context

__all__ = ["AllGather", "AllReduce", "AllToAll", "Conversation", "Item", "Outcome", "Request", "numel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A tensor to take part with.

    Attributes:
        tensor: float32, contiguous, any shape; the residual is added already. Not to be changed.
        context: which tensor, and when.
    """

    tensor: Tensor
    context: Context


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of an item.

    Attributes:
        mean: over all ranks, as far as it came through; float32, bit-identical on all ranks.
        residual: what must be added to this rank's next tensor so that nothing is lost in the long run: its mean over
            ranks is the exact mean minus ``mean``. ``None`` where nobody asked.
    """

    mean: Tensor
    residual: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """Asks for the sum, maximum or bitwise or over ranks; the answer is a tensor like ``tensor``.

    Attributes:
        tensor: contiguous; of the same shape and type on all ranks; may be overwritten.
        op: ``or`` is for integers.
    """

    tensor: Tensor
    op: Literal["sum", "max", "or"] = "sum"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllToAll:
    """Asks to hand a part to every rank; the answer is a list of one part from every rank.

    Attributes:
        parts: ``uint8``, 1-D, by receiver. The own part is empty: it does not travel.
        sizes: bytes that will arrive, by sender; 0 from itself.
    """

    parts: list[Tensor]
    sizes: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllGather:
    """Asks for everybody's tensor; the answer is a list by rank.

    Attributes:
        tensor: ``uint8``, 1-D.
        sizes: bytes of every rank's, by rank.
    """

    tensor: Tensor
    sizes: list[int]


Request = AllReduce | AllToAll | AllGather
#: The answer is a tensor for ``AllReduce``, else a list of them, which the type of a generator cannot say.
Conversation = Generator[Request, Any, list[Outcome]]


def numel(shape: Sequence[int]) -> int:
    """Elements of a shape.

    Examples:
        >>> numel(()), numel((3, 0)), numel((2, 3))
        (1, 0, 6)
    """
    return math.prod(shape)
