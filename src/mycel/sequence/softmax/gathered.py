"""Keys and values come to the queries: all at once or slice by slice, while the slice before is computed.

A slice is some key heads, and where those are too few, of them a part of each rank's tokens. Two are on a rank at a
time, so that with as many slices as ranks it holds what a ring's rank holds; but each is moved by one collective, and
not by as many steps as there are ranks, each as slow as the slowest hop.

Backward, slices come again, and the gradients of the one before travel back meanwhile.

References:
    H. Liu, M. Zaharia, P. Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", ICLR 2024:
    the memory; A. Grattafiori et al., "The Llama 3 Herd of Models", arXiv 2407.21783 (section 3.3.2): context
    parallelism by all_gather.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mycel.comm import Pending
from mycel.planning.sequence import Mask
from mycel.sequence.context import SequenceContext
from mycel.sequence.softmax.delivery import Delivery
from mycel.sequence.softmax.rows import BackRows, Rows

__all__ = ["Gathered"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gathered:
    """A ``Carrier`` by collectives.

    Attributes:
        context: the ranks.
        deliveries: of each part of tokens.
        head_slices: into how many slices key heads are cut; as many as there are at most.
        scale: of products.
        mask: inside documents.
    """

    context: SequenceContext
    deliveries: Sequence[Delivery]
    head_slices: int
    scale: float
    mask: Mask

    def slices(self, num_heads: int) -> list[tuple[slice, Delivery]]:
        """Key heads and tokens, slice by slice."""
        count = min(self.head_slices, num_heads)
        heads = [slice(num_heads * i // count, num_heads * (i + 1) // count) for i in range(count)]
        return [(mine, delivery) for mine in heads for delivery in self.deliveries]

    def arriving(self, k: Tensor, v: Tensor, name: str) -> Iterator[tuple[slice, Delivery, tuple[Tensor, ...]]]:
        """Slice by slice, its key heads and what came of each rank; the next is under way."""
        rows = torch.cat([k, v], -1).permute(2, 0, 1, 3)  # tokens first: rows of an exchange
        slices = self.slices(k.shape[1])
        following: Pending[tuple[Tensor, ...]] | None = None
        for index, (heads, delivery) in enumerate(slices):
            pending = following or delivery.start(rows[:, :, heads], self.context, name)
            arrived = pending.wait()
            if index + 1 < len(slices):
                next_heads, next_delivery = slices[index + 1]
                following = next_delivery.start(rows[:, :, next_heads], self.context, name)
            yield heads, delivery, arrived
            del arrived

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """As ``Carrier`` has it."""
        group = q.shape[1] // k.shape[1]
        rows = Rows(q, v.shape[-1], self.scale, self.mask)
        for heads, delivery, arrived in self.arriving(k, v, "attention"):
            for part, blocks in zip(arrived, delivery.blocks, strict=True):
                k_, v_ = part.permute(1, 2, 0, 3).split_with_sizes([k.shape[-1], v.shape[-1]], -1)
                rows.meet(k_, v_, blocks, _queries(heads, group))
            del arrived, part, k_, v_  # else there are three slices here while the next but one begins
        return rows.out, rows.lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As ``Carrier`` has it."""
        group = q.shape[1] // k.shape[1]
        rows = BackRows(grad, q, out, lse, self.scale, self.mask)
        whole = k.new_zeros(k.shape[2], k.shape[0], k.shape[1], k.shape[3] + v.shape[3])
        leaving: tuple[slice, Pending[Tensor]] | None = None
        for heads, delivery, arrived in self.arriving(k, v, "attention.backward"):
            gradients, places = delivery.room(arrived[0])
            for part, place, blocks in zip(arrived, places, delivery.blocks, strict=True):
                k_, v_ = part.permute(1, 2, 0, 3).split_with_sizes([k.shape[-1], v.shape[-1]], -1)
                dk, dv = rows.meet(k_, v_, blocks, _queries(heads, group))
                of_k, of_v = place.split_with_sizes([k.shape[-1], v.shape[-1]], -1)
                of_k.copy_(dk.permute(2, 0, 1, 3))
                of_v.copy_(dv.permute(2, 0, 1, 3))
            del arrived, part, place, places, k_, v_, dk, dv, of_k, of_v
            _land(whole, leaving)
            back = delivery.start_back(gradients, k.shape[2], self.context, "attention.gradients")
            del gradients
            leaving = heads, back
        _land(whole, leaving)
        dk, dv = whole.permute(1, 2, 0, 3).split_with_sizes([k.shape[-1], v.shape[-1]], -1)
        return rows.dq.to(q.dtype), dk, dv


def _queries(heads: slice, group: int) -> slice:
    """Heads of the queries that these key heads serve."""
    return slice(heads.start * group, heads.stop * group)


def _land(whole: Tensor, leaving: tuple[slice, Pending[Tensor]] | None) -> None:
    if leaving is not None:
        heads, pending = leaving
        whole[:, :, heads] += pending.wait()
