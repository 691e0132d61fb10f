"""How payloads of several ranks become one mean: the conversation, and the bytes it sends.

A compressor names one of three::

    Linear()     the sum of payloads is the payload of the sum     all_reduce
    Scattered()  codes with scales, which cannot be added           all_to_all, local sum, all_gather
    Gathered()   indices and values, matrices to be multiplied      all_gather

``Scattered`` cuts what is sent into a share for each rank. Whoever owns a share adds up what it hears, compresses
the mean and gives it to all. Its own contribution never travels, so it stays exact; and what the second compression
loses is known to the owner alone, who carries it, times the number of ranks, into its next contribution, which is
exact again. That is the feedback on the server's side of 1-bit Adam without a second memory, and whatever happens to
the number of ranks, the mean of all residuals is what has not come through yet.

References:
    Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014 (both halves compressed);
    Tang et al., "1-bit Adam", ICML 2021, arXiv 2102.02888, section 3 (feedback on both sides).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from mycel.data_parallel.compress.context import Context
from mycel.data_parallel.compress.rounds import (
    AllGather,
    AllReduce,
    AllToAll,
    Conversation,
    Item,
    Outcome,
    numel,
)

__all__ = ["Aggregation", "Gathered", "Linear", "Payloads", "Scattered", "Shapes", "joined", "share_sizes"]

#: Shares begin at multiples of so many elements, so that bits and buckets fall on whole bytes.
SHARE_ELEMENTS = 1024


#: Of several tensors.
Shapes = Sequence[Sequence[int]]


class Payloads(ABC):
    """Tensors to payloads and back: what an aggregation needs of a compressor."""

    @abstractmethod
    def wire_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of the payload of a tensor of this shape, exactly."""

    @abstractmethod
    def compress(self, tensor: Tensor, context: Context) -> Tensor:
        """The payload.

        Args:
            tensor: float32, any shape, any strides; not changed.
            context: which tensor this is.

        Returns:
            1-D tensor of ``wire_bytes(tensor.shape)`` bytes on the same device.
        """

    @abstractmethod
    def decompress(self, payload: Tensor, shape: Sequence[int], context: Context) -> Tensor:
        """What a payload stands for: a new float32 tensor of ``shape``."""

    def accumulate(self, payload: Tensor, out: Tensor, context: Context) -> None:
        """Add what a payload stands for to ``out`` (float32, contiguous)."""
        out.add_(self.decompress(payload, out.shape, context))


class Aggregation(ABC):
    """How payloads of several ranks become one.

    Attributes:
        adds_payloads: payloads are of a floating type and are added by the network; otherwise they are bytes, and
            whoever hears them adds up what they stand for. Only then has a reduce-scatter one round.
    """

    adds_payloads: ClassVar[bool] = False

    @abstractmethod
    def converse(self, compressor: Payloads, items: Sequence[Item], *, keep_residual: bool) -> Conversation:
        """The conversation; see ``Compressor.converse``."""

    @abstractmethod
    def sent_bytes(self, compressor: Payloads, shapes: Shapes, *, rank: int, world_size: int) -> float:
        """Bytes of the conversation; see ``Compressor.sent_bytes``."""


class Linear(Aggregation):
    """One sum of payloads. Each rank divides first, so that half types do not overflow."""

    adds_payloads: ClassVar[bool] = True

    def converse(self, compressor: Payloads, items: Sequence[Item], *, keep_residual: bool) -> Conversation:
        """See ``Aggregation``."""
        world_size = items[0].context.world_size
        scaled = [item.tensor / world_size for item in items]
        payloads = [compressor.compress(t, item.context) for t, item in zip(scaled, items, strict=True)]
        lengths = [len(payload) for payload in payloads]
        residuals: list[Tensor | None] = [None] * len(items)
        if keep_residual:
            residuals = [
                (t - compressor.decompress(p, t.shape, item.context)) * world_size
                for t, p, item in zip(scaled, payloads, items, strict=True)
            ]
        total: Tensor = yield AllReduce(tensor=torch.cat(payloads))
        return [
            Outcome(mean=compressor.decompress(payload, item.tensor.shape, item.context), residual=residual)
            for payload, item, residual in zip(total.split_with_sizes(lengths), items, residuals, strict=True)
        ]

    def sent_bytes(self, compressor: Payloads, shapes: Shapes, *, rank: int, world_size: int) -> float:
        """See ``Aggregation``."""
        return 2 * (world_size - 1) / world_size * sum(compressor.wire_bytes(shape) for shape in shapes)


class Gathered(Aggregation):
    """Everybody hears every payload, and adds up in the order of ranks."""

    def converse(self, compressor: Payloads, items: Sequence[Item], *, keep_residual: bool) -> Conversation:
        """See ``Aggregation``."""
        world_size = items[0].context.world_size
        payloads = [compressor.compress(item.tensor, item.context) for item in items]
        lengths = [len(payload) for payload in payloads]
        residuals: list[Tensor | None] = [None] * len(items)
        if keep_residual:
            residuals = [
                item.tensor - compressor.decompress(payload, item.tensor.shape, item.context)
                for item, payload in zip(items, payloads, strict=True)
            ]
        together: list[Tensor] = yield AllGather(tensor=torch.cat(payloads), sizes=[sum(lengths)] * world_size)
        means = [torch.zeros_like(item.tensor) for item in items]
        for rank, payload in enumerate(together):
            for part, mean, item in zip(payload.split_with_sizes(lengths), means, items, strict=True):
                compressor.accumulate(part, mean, replace(item.context, rank=rank))
        return [
            Outcome(mean=mean.div_(world_size), residual=residual)
            for mean, residual in zip(means, residuals, strict=True)
        ]

    def sent_bytes(self, compressor: Payloads, shapes: Shapes, *, rank: int, world_size: int) -> float:
        """See ``Aggregation``."""
        return (world_size - 1) * sum(compressor.wire_bytes(shape) for shape in shapes)


class Scattered(Aggregation):
    """All to all, local sums, all gather, over the items joined into one vector."""

    def converse(self, compressor: Payloads, items: Sequence[Item], *, keep_residual: bool) -> Conversation:
        """See ``Aggregation``."""
        context = items[0].context
        rank, world_size = context.rank, context.world_size
        vector = joined([item.tensor for item in items])
        sizes = share_sizes(len(vector), world_size)
        shares = vector.split_with_sizes(sizes)
        parts = [
            shares[i].new_empty(0, dtype=torch.uint8)
            if i == rank
            else compressor.compress(shares[i], replace(context, part=1 + i))
            for i in range(world_size)
        ]
        own_bytes = compressor.wire_bytes((sizes[rank],))
        heard: list[Tensor] = yield AllToAll(
            parts=parts, sizes=[0 if i == rank else own_bytes for i in range(world_size)]
        )
        own = shares[rank].clone()
        for i in range(world_size):
            if i != rank:
                compressor.accumulate(heard[i], own, replace(context, rank=i, part=1 + rank))
        own /= world_size
        payload = compressor.compress(own, context)
        together: list[Tensor] = yield AllGather(tensor=payload, sizes=[compressor.wire_bytes((n,)) for n in sizes])
        mean = torch.empty_like(vector)
        for i, share in enumerate(mean.split_with_sizes(sizes)):
            share.copy_(compressor.decompress(together[i], share.shape, replace(context, rank=i)))
        residual = None
        if keep_residual:
            residual = torch.empty_like(vector)
            for i, share in enumerate(residual.split_with_sizes(sizes)):
                if i == rank:
                    share.copy_((own - mean.split_with_sizes(sizes)[i]) * world_size)
                else:
                    found = compressor.decompress(parts[i], share.shape, replace(context, part=1 + i))
                    share.copy_(shares[i] - found)
        return _parted(items, mean, residual)

    def sent_bytes(self, compressor: Payloads, shapes: Shapes, *, rank: int, world_size: int) -> float:
        """See ``Aggregation``."""
        sizes = [compressor.wire_bytes((n,)) for n in share_sizes(sum(map(numel, shapes)), world_size)]
        return sum(sizes) - sizes[rank] + (world_size - 1) * sizes[rank]


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """All of them as one vector; the tensor's own memory where there is only one."""
    return tensors[0].reshape(-1) if len(tensors) == 1 else torch.cat([t.reshape(-1) for t in tensors])


def share_sizes(length: int, world_size: int) -> list[int]:
    """Elements of each rank's share of a vector: as even as whole multiples of ``SHARE_ELEMENTS`` allow.

    Examples:
        >>> share_sizes(5000, 2), share_sizes(100, 3)
        ([2048, 2952], [100, 0, 0])
    """
    blocks = -(-length // SHARE_ELEMENTS)
    ends = [min(length, SHARE_ELEMENTS * (blocks * (i + 1) // world_size)) for i in range(world_size)]
    if blocks and blocks < world_size:
        ends = [min(length, SHARE_ELEMENTS * (i + 1)) for i in range(world_size)]
    return [end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def _parted(items: Sequence[Item], mean: Tensor, residual: Tensor | None) -> list[Outcome]:
    lengths = [item.tensor.numel() for item in items]
    rests = [None] * len(items) if residual is None else residual.split_with_sizes(lengths)
    return [
        Outcome(mean=m.view(item.tensor.shape), residual=None if rest is None else rest.view(item.tensor.shape))
        for item, m, rest in zip(items, mean.split_with_sizes(lengths), rests, strict=True)
    ]
