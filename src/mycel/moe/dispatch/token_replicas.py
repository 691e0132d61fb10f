"""Ranks with the same tokens, as of a tensor-parallel group: each sends a share of them, all get all answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

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
        shares: tuple[Tensor, ...] = _Drop.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return shares

    def gather(self, share: Tensor, num_rows: int) -> Tensor:
        """The rows of all shares."""
        gathered: Tensor = _GatherShares.apply(self, num_rows, share)  # type: ignore[no-untyped-call]
        return gathered

    def own(self, rows: Tensor) -> Tensor:
        """A rank's share of rows, a view."""
        width = -(-rows.shape[0] // self.size)
        return rows[self.place * width : (self.place + 1) * width]

    def all_of(self, share: Tensor, num_rows: int, name: str) -> Tensor:
        """``gather`` without gradients."""

        def launch() -> Pending:
            width = -(-num_rows // self.size)
            missing = [0] * (2 * share.dim() - 1) + [width - share.shape[0]]
            padded = functional.pad(share, missing).contiguous()
            gathered = padded.new_empty(width * self.size, *padded.shape[1:])
            dist.all_gather_into_tensor(gathered, padded, group=self.group)
            self.meter.add_even(name, padded.numel() * padded.element_size(), self.group)
            return Pending(gathered[:num_rows])

        return communicate(launch).wait()


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(replicas: TokenReplicas, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(replicas.own(t).clone() for t in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.replicas = inputs[0]
        ctx.num_rows = inputs[1].shape[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        needed = ctx.needs_input_grad[1:]
        return None, *(
            ctx.replicas.all_of(grad, ctx.num_rows, "gather.backward") if need else None
            for grad, need in zip(grads, needed, strict=True)
        )


class _GatherShares(torch.autograd.Function):
    @staticmethod
    def forward(replicas: TokenReplicas, num_rows: int, share: Tensor) -> Tensor:
        return replicas.all_of(share, num_rows, "gather")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.replicas = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, ctx.replicas.own(grads[0]).contiguous()
