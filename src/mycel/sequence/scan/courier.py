"""What a scan sends between the ranks of a context, metered under one name, inside or outside the main thread."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.comm import Pending
from mycel.comm.messages import all_gather_single
from mycel.sequence.context import SequenceContext

__all__ = ["Courier"]


class Courier:
    """Sends vectors for one pass of one scan.

    Args:
        context: whose ranks.
        name: under which the context's meter counts.

    Attributes:
        rank: this one, within the group.
        num_ranks: of the group.
    """

    def __init__(self, context: SequenceContext, name: str) -> None:
        self._context, self._name = context, name
        self.rank, self.num_ranks = context.rank, context.num_ranks
        self._sent: list[tuple[list[dist.Work], Tensor]] = []

    def exchange(self, parts: Sequence[Tensor], receive: Sequence[int]) -> tuple[Tensor, ...]:
        """A vector for every rank, and what each sends here; all ranks call this."""
        return self._context.exchange(parts, receive, self._name)

    def gather(self, vector: Tensor) -> Tensor:
        """Vectors of one length of all ranks, of shape (ranks, length)."""
        group = self._group()
        found = vector.new_empty(self.num_ranks * len(vector))
        all_gather_single(found, vector, group=group)
        self._context.meter.add_even(self._name, vector.nbytes, group)
        return found.view(self.num_ranks, -1)

    def send(self, to: int, vector: Tensor) -> None:
        """To one rank; ``finish`` waits for it. Messages between two ranks arrive in the order they were sent."""
        whole = vector.contiguous()
        group = self._group()
        if whole.is_cuda:  # NCCL wants pairs of ranks in one call where messages may cross
            works = dist.batch_isend_irecv([dist.P2POp(dist.isend, whole, group=group, group_peer=to)])
        else:
            works = [dist.isend(whole, group=group, group_dst=to)]  # type: ignore[list-item]
        self._sent.append((works, whole))
        self._context.meter.add(self._name, [whole.nbytes * (rank == to) for rank in range(self.num_ranks)], group)

    def receive(self, source: int, length: int, like: Tensor) -> Tensor:
        """From one rank."""
        return self.start_receive(source, length, like).wait()

    def start_receive(self, source: int, length: int, like: Tensor) -> Pending[Tensor]:
        """Begin to take what one rank sends.

        Args:
            source: who.
            length: numbers of the vector.
            like: of the type and on the device of what comes.
        """
        found = torch.empty(length, dtype=like.dtype, device=like.device)
        group = self._group()
        if found.is_cuda:
            works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, found, group=group, group_peer=source)])
        else:
            works = [dist.irecv(found, group=group, group_src=source)]  # type: ignore[list-item]

        def finish() -> Tensor:
            for work in works:
                work.wait()
            return found

        return Pending(finish)

    def finish(self) -> None:
        """Wait until everything that was sent has left."""
        for works, _ in self._sent:
            for work in works:
                work.wait()
        self._sent.clear()

    def _group(self) -> dist.ProcessGroup:
        group = self._context.group
        if group is None:
            raise AssertionError("one rank alone has nobody to send to")
        return group
