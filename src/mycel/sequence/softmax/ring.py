"""Keys and values go round: in each step every rank passes on what it has met, and computes with what came.

Little memory and one neighbour, but every step waits for its slowest hop: right where all hops are alike, as on a
ring of direct links. Backward they go round again, and with them their gradients, which the last step brings home.

References:
    H. Liu, M. Zaharia, P. Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", ICLR 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mycel.comm import Pending
from mycel.planning.sequence import Mask
from mycel.sequence.context import SequenceContext
from mycel.sequence.softmax.blocks import Block
from mycel.sequence.softmax.rows import BackRows, Rows

__all__ = ["Ring"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ring:
    """A ``Carrier`` that passes on.

    Attributes:
        context: the ranks.
        order: ranks of the context that take part, as they stand in the ring.
        tokens: of each.
        blocks: with this rank's queries, for each of them.
        place: of this rank among them.
        scale: of products.
        mask: inside documents.
    """

    context: SequenceContext
    order: Sequence[int]
    tokens: Sequence[int]
    blocks: Sequence[Sequence[Block]]
    place: int
    scale: float
    mask: Mask

    def whose(self, step: int) -> int:
        """Whose keys are here in a step."""
        return (self.place - step) % len(self.order)

    def pass_on(self, rows: Tensor, step: int, name: str) -> Pending[Tensor]:
        """Begin to pass on what is here in a step; gives what is here in the next."""
        size, ranks = len(self.order), self.context.num_ranks
        if size == ranks:  # one ring, and each rank knows what all others pass on
            targets: list[int | None] = [None] * ranks
            lengths = [0] * ranks
            for place, rank in enumerate(self.order):
                targets[rank] = self.order[(place + 1) % size]
                lengths[rank] = self.tokens[(place - step) % size]
            return self.context.start_permute(rows, targets, lengths, name)
        parts, gets = [rows[:0]] * ranks, [0] * ranks
        before = self.order[(self.place - 1) % size]
        parts[self.order[(self.place + 1) % size]] = rows
        gets[before] = self.tokens[self.whose(step + 1)]
        arriving = self.context.start_exchange(parts, gets, name)
        return Pending(lambda: arriving.wait()[before])

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """As ``Carrier`` has it."""
        rows, size = Rows(q, v.shape[-1], self.scale, self.mask), len(self.order)
        here = torch.cat([k, v], -1).permute(2, 0, 1, 3)
        for step in range(size):
            coming = self.pass_on(here, step, "attention") if step + 1 < size else None
            k_, v_ = here.permute(1, 2, 0, 3).split_with_sizes([k.shape[-1], v.shape[-1]], -1)
            rows.meet(k_, v_, self.blocks[self.whose(step)])
            if coming is not None:
                here = coming.wait()
        return rows.out, rows.lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As ``Carrier`` has it."""
        rows, size = BackRows(grad, q, out, lse, self.scale, self.mask), len(self.order)
        here = torch.cat([k, v], -1).permute(2, 0, 1, 3)
        carried: Pending[Tensor] | None = None  # gradients of the keys that are here, from the ranks before
        for step in range(size):
            coming = self.pass_on(here, step, "attention.backward") if step + 1 < size else None
            k_, v_ = here.permute(1, 2, 0, 3).split_with_sizes([k.shape[-1], v.shape[-1]], -1)
            gradient = torch.cat(rows.meet(k_, v_, self.blocks[self.whose(step)]), -1).permute(2, 0, 1, 3)
            if carried is not None:
                gradient = gradient + carried.wait()
            carried = self.pass_on(gradient.to(k.dtype), step, "attention.gradients")
            if coming is not None:
                here = coming.wait()
        assert carried is not None
        dk, dv = carried.wait().permute(1, 2, 0, 3).split_with_sizes([k.shape[-1], v.shape[-1]], -1)
        return rows.dq.to(q.dtype), dk, dv
