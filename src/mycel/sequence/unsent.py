"""A layout over ranks whose exchanges move nothing: sizes of what would arrive, and seconds that it would take."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.comm import Pending
from mycel.planning.sequence import Layout
from mycel.sequence.context import SequenceContext, for_good
from mycel.sequence.softmax.fabric import Fabric, fabric_of

__all__ = ["Unsent"]


class Unsent(SequenceContext):
    """As ``SequenceContext``, for tensors that have sizes and no numbers.

    What attention is chosen by, kernels and wires, is measured all the same, at first: all ranks trace together.

    Attributes:
        seconds: of exchanges since ``begin``, one after the other, by what the group's wires take. Of uneven ones
            it is taken that every rank sends on what this one does.

    Args:
        layout: of the documents.
        group: as many ranks as the layout has.
        device: of the tensors.
    """

    def __init__(self, layout: Layout, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(layout, group)
        self.seconds = 0.0
        self._fabric: Fabric | None = fabric_of(group, device) if layout.num_ranks > 1 else None

    def begin(self) -> None:
        """A step begins."""
        self.seconds = 0.0

    def start_permute(
        self, rows: Tensor, targets: Sequence[int | None], lengths: Sequence[int], name: str = "permute"
    ) -> Pending[Tensor]:
        """See ``SequenceContext``."""
        width = _row_bytes(rows)
        matrix = [[0] * self.num_ranks for _ in lengths]
        for src, dst in enumerate(targets):
            if dst is not None and dst != src:
                matrix[src][dst] = lengths[src] * width
        self._takes(lambda fabric: fabric.permute(matrix))
        source = next((src for src, dst in enumerate(targets) if dst == self.rank and src != self.rank), None)
        sent = rows.detach().contiguous()
        return _under_way(sent, sent.new_empty(0 if source is None else lengths[source], *sent.shape[1:]))

    def start_gather(self, rows: Tensor, name: str = "gather") -> Pending[Tensor]:
        """See ``SequenceContext``."""
        sent = rows.detach().contiguous()
        gathered = sent.new_empty(len(sent) * self.num_ranks, *sent.shape[1:])
        self._takes(lambda fabric: fabric.gather(gathered.nbytes))
        return _under_way(sent, gathered)

    def start_scatter(self, rows: Tensor, name: str = "scatter") -> Pending[Tensor]:
        """See ``SequenceContext``."""
        sent = rows.detach().contiguous()
        self._takes(lambda fabric: fabric.scatter(sent.nbytes))
        return _under_way(sent, sent.new_empty(len(sent) // self.num_ranks, *sent.shape[1:]))

    def _start(self, rows: Tensor, gets: list[int], gives: list[int], name: str) -> Pending[Tensor]:
        size, width = self.num_ranks, _row_bytes(rows)
        matrix = [
            [gives[(self.rank + dst - src) % size] * width * (dst != src) for dst in range(size)]
            for src in range(size)
        ]
        self._takes(lambda fabric: fabric.exchange(matrix))
        sent = rows.contiguous()
        return _under_way(sent, sent.new_empty(sum(gets), *sent.shape[1:]))

    def _takes(self, seconds: Callable[[Fabric], float]) -> None:
        fabric = self._fabric
        if fabric is not None:
            self.seconds += for_good(lambda: seconds(fabric))


def _under_way(sent: Tensor, received: Tensor) -> Pending[Tensor]:
    """What is sent is there for as long as somebody may wait for it."""
    both = sent, received
    return Pending(lambda: both[1])


def _row_bytes(rows: Tensor) -> int:
    return rows[:1].numel() * rows.element_size() if len(rows) else 0
