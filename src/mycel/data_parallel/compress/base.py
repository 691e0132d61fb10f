"""What a compressor is: tensors in, fewer bytes out, and which collective may carry them.

A compressor says how its payloads are *aggregated* (``mycel.data_parallel.compress.aggregation``); that alone selects
the collectives. Compressors whose ranks agree on something first bring a conversation of their own.

A new compressor is one file with one class, and one line in ``mycel.data_parallel.compress.COMPRESSORS``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from mycel.data_parallel.compress.aggregation import Aggregation, Payloads, Shapes
from mycel.data_parallel.compress.context import Context
from mycel.data_parallel.compress.rounds import Conversation, Item, numel
from mycel.errors import UsageError

__all__ = ["Compressor", "numel"]


class Compressor(Payloads):
    """Tensors to payloads and back.

    A payload is one 1-D tensor: of a floating type that may be added for ``Linear``, of ``uint8`` for all others,
    scales and indices included. Its size in bytes depends on the shape alone and is what
    ``wire_bytes`` says, so that ranks know what they will receive.

    Attributes:
        name: under which it is registered.
        aggregation: how payloads of several ranks become one.
        is_elementwise: tensors may be joined and cut anywhere before they are compressed.
        is_unbiased: the mean of what comes back, over the compressor's own randomness, is what went in.
        covers_all: nothing may travel without it: vectors and tensors that do not become smaller go through it too.
        is_contractive: what is lost is smaller than what went in, in expectation, so error feedback works.

    Examples:
        >>> from mycel.data_parallel.compress import Linear
        >>> class Halves(Compressor):
        ...     name, aggregation = "halves", Linear()  # the network adds payloads
        ...     def wire_bytes(self, shape):
        ...         return 2 * numel(shape)
        ...     def compress(self, tensor, context):
        ...         return tensor.flatten().bfloat16()
        ...     def decompress(self, payload, shape, context):
        ...         return payload.float().view(tuple(shape))
        >>> Halves().takes((10, 100)), Halves().sent_bytes([(10, 100)], rank=0, world_size=4)
        (True, 3000.0)
    """

    name: ClassVar[str]
    aggregation: ClassVar[Aggregation]
    is_elementwise: ClassVar[bool] = False
    covers_all: ClassVar[bool] = False
    is_unbiased: bool = False
    is_contractive: bool = False

    @property
    def wants_feedback(self) -> bool:
        """Whether error feedback is the default: what is lost is not noise that averages out."""
        return not self.is_unbiased

    def converse(self, items: Sequence[Item], *, keep_residual: bool) -> Conversation:
        """How the mean over all ranks comes about: rounds of communication, by ``aggregation``.

        Compressors whose ranks agree on something first, or that need several rounds, override this.

        Args:
            items: tensors of this rank; the same ones in the same order on every rank.
            keep_residual: also say what this rank's tensors lost, for error feedback.
        """
        return self.aggregation.converse(self, items, keep_residual=keep_residual)

    def sent_bytes(self, shapes: Shapes, *, rank: int, world_size: int) -> float:
        """Bytes that a rank sends for the mean of tensors of these shapes, in one conversation.

        An all_reduce counts ``2 (W-1)/W`` of its bytes, the least that any algorithm sends from a rank on average.
        """
        return self.aggregation.sent_bytes(self, shapes, rank=rank, world_size=world_size)

    def takes(self, shape: Sequence[int]) -> bool:
        """Whether compressing a tensor of this shape saves bytes; others travel as they are."""
        return self.wire_bytes(shape) < 4 * numel(shape)

    def levels(self) -> tuple[float, ...]:
        """Strengths of this family for adaptive policies, the most exact first: ranks, bits, densities.

        A family without a choice has one level.
        """
        return (0.0,)

    def at(self, level: float) -> Compressor:
        """The compressor of the same family at one of ``levels()``.

        Raises:
            UsageError: the family has no such level.
        """
        if level not in self.levels():
            raise UsageError(f"{self.name} has no level {level}; levels: {self.levels()}")
        return self

    def error(self, tensor: Tensor, level: float) -> float:
        """Frobenius norm of what is lost of ``tensor`` at a level.

        Measured by compressing once unless the family knows better; for random compressors one draw, always the
        same.
        """
        judge = self.at(level)
        context = Context(name="error")
        exact = tensor.detach().float()
        found = judge.decompress(judge.compress(exact, context), exact.shape, context)
        return float(torch.linalg.vector_norm(exact - found))

    def errors(self, tensor: Tensor) -> dict[float, float]:
        """``error`` at every level; families that find all at once override this."""
        return {level: self.error(tensor, level) for level in self.levels()}

    def prime(self, name: str, mean: Tensor) -> None:
        """Sees a mean gradient, or a sum of some, of a parameter that this compressor is about to take over.

        The same on all ranks. Compressors that keep something from step to step begin with it, whatever its length.
        Must not change the tensor.
        """

    def settle(self, *, keep: bool) -> None:
        """The step is over. Compressors that keep something from step to step take it over now, or forget it.

        Args:
            keep: all means of the step, of every parameter, are finite. Otherwise the step will not be applied, and
                what the compressor keeps must be what it was.
        """

    def state_dict(self) -> dict[str, Tensor]:
        """State by parameter name; the same on all ranks. Tensors only, so ``weights_only=True`` loads it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes state back.

        Raises:
            UsageError: the state is of another kind of compressor.
        """
        if state:
            raise UsageError(f"{self.name} keeps no state, but was given some for {', '.join(sorted(state)[:3])}")
