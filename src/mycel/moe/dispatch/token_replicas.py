"""Ranks with the same tokens, as of a tensor-parallel group: each sends a share of them, all get all answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from mycel.comm.exchange import there_and_back
from mycel.comm.messages import all_gather_single
from mycel.comm.meter import ByteMeter
from mycel.comm.pending import Pending, communicate

__all__ = ["TokenReplicas"]


class TokenReplicas:
    """Drops what other ranks send too before an exchange and gathers its results after it.

    Backward, gradients of a rank's share are gathered as well, so that all ranks of the group have the same ones.

    Args:
        group: ranks with the same tokens, routers and loss.
        meter: counts bytes, as ``gather`` and ``gather.backward``.

    References:
        Singh et al., "A Hybrid Tensor-Expert-Data Parallelism Approach to Optimize Mixture-of-Experts Training",
        ICS 2023 (duplicate token dropping).
    """

    def __init__(self, group: dist.ProcessGroup, meter: ByteMeter) -> None:
        self.group = group
        self.meter = meter
        self.size = dist.get_world_size(group)
        self.place = dist.get_rank(group)

    def drop(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """This rank's share of rows, consecutive ones; the last ranks may have fewer."""
        back = partial(self.all_of, num_rows=tensors[0].shape[0], name="gather.backward")
        return there_and_back(tensors, lambda x: self.own(x).clone(), back)

    def gather(self, share: Tensor, num_rows: int) -> Tensor:
        """The rows of all shares."""
        there = partial(self.all_of, num_rows=num_rows, name="gather")
        (gathered,) = there_and_back([share], there, lambda gradient: self.own(gradient).contiguous())
        return gathered

    def own(self, rows: Tensor) -> Tensor:
        """A rank's share of rows, a view."""
        width = -(-rows.shape[0] // self.size)
        return rows[self.place * width : (self.place + 1) * width]

    def all_of(self, share: Tensor, num_rows: int, name: str) -> Tensor:
        """``gather`` without gradients."""

        def launch() -> Pending[Tensor]:
            width = -(-num_rows // self.size)
            missing = [0] * (2 * share.dim() - 1) + [width - share.shape[0]]
            padded = functional.pad(share, missing).contiguous()
            gathered = padded.new_empty(width * self.size, *padded.shape[1:])
            all_gather_single(gathered, padded, group=self.group)
            self.meter.add_even(name, padded.numel() * padded.element_size(), self.group)
            return Pending.done(gathered[:num_rows])

        return communicate(launch).wait()
