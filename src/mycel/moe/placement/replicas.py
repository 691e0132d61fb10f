"""Gradients of an expert's replicas, added up: each replica then has the expert's gradient, bit for bit the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.comm.meter import ByteMeter
from mycel.planning.placement import EMPTY, ExpertPlacement

__all__ = ["ReplicaSum"]


class ReplicaSum:
    """Adds up, over the ranks that hold an expert, the gradients of its parameters.

    An expert with n replicas is cut in n pieces. Every replica adds up one of them, in the order of ranks and in
    float32 at least, and gives the sum to the others: two exchanges over the whole group, in which a replica sends
    ``2 (n-1)/n`` of an expert, and no process group for each set of ranks.

    Args:
        placement: of the experts.
        group: its ranks, in order.
        meter: counts the bytes, as ``replicas``.
    """

    def __init__(self, placement: ExpertPlacement, group: dist.ProcessGroup, meter: ByteMeter) -> None:
        self.group, self.meter = group, meter
        self.rank, size = dist.get_rank(group), dist.get_world_size(group)
        holders = {expert: placement.replicas(expert) for expert in range(placement.num_experts)}
        self.any = any(len(ranks) > 1 for ranks in holders.values())
        own = placement.slots[self.rank]
        #: Slot here and ranks of each expert that others hold too, in the order of experts.
        self.shared = [
            (own.index(expert), holders[expert])
            for expert in sorted(expert for expert in own if expert != EMPTY)
            if len(holders[expert]) > 1
        ]
        #: For each rank, which of those it holds as well.
        self.common = [
            [n for n, (_, ranks) in enumerate(self.shared) if peer in ranks and peer != self.rank]
            for peer in range(size)
        ]

    def tie(self, stacked: Sequence[Tensor]) -> list[Tensor]:
        """The parameters as they are; their gradients will be the replicas' sums.

        One node of the autograd graph for all of them, on every rank, so that all meet in the same order.

        Args:
            stacked: parameters with a row for each slot of this rank.
        """
        if not self.any:
            return list(stacked)
        tied: tuple[Tensor, ...] = _Tie.apply(self, *stacked)  # type: ignore[no-untyped-call]
        return list(tied)

    def sum(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Gradients whose rows of shared experts are the sums; all ranks of the group call it."""
        dtype = gradients[0].dtype
        pieces = []
        for slot, ranks in self.shared:
            flat = torch.cat([gradient[slot].reshape(-1) for gradient in gradients])
            padded = torch.nn.functional.pad(flat, (0, -flat.numel() % len(ranks)))
            pieces.append(padded.view(len(ranks), -1))
        empty = gradients[0].new_empty(0)
        sent = [pieces[n][self.shared[n][1].index(peer)] for peer, both in enumerate(self.common) for n in both]
        received = self._exchange(torch.cat([empty, *sent]), pieces)
        wide = torch.promote_types(dtype, torch.float32)
        sums = []
        for n, (_, ranks) in enumerate(self.shared):
            of_ranks = [pieces[n][ranks.index(rank)] if rank == self.rank else received[rank, n] for rank in ranks]
            sums.append(torch.stack([part.to(wide) for part in of_ranks]).sum(dim=0).to(dtype))
        received = self._exchange(torch.cat([empty, *(sums[n] for both in self.common for n in both)]), pieces)
        results = [gradient.clone() for gradient in gradients]
        for n, (slot, ranks) in enumerate(self.shared):
            whole = torch.cat([sums[n] if rank == self.rank else received[rank, n] for rank in ranks])
            begin = 0
            for result in results:
                size = result[slot].numel()
                result[slot] = whole[begin : begin + size].view(result.shape[1:])
                begin += size
        return results

    def _exchange(self, sent: Tensor, pieces: Sequence[Tensor]) -> dict[tuple[int, int], Tensor]:
        """What each rank sent of each shared expert. Two ranks send each other equally much."""
        sizes = [sum(pieces[n].shape[1] for n in both) for both in self.common]
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, sizes, sizes, group=self.group)
        self.meter.add("replicas", [size * sent.element_size() for size in sizes], self.group)
        found, begin = {}, 0
        for peer, both in enumerate(self.common):
            for n in both:
                found[peer, n] = received[begin : begin + pieces[n].shape[1]]
                begin += pieces[n].shape[1]
        return found


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(replicas: ReplicaSum, *stacked: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in stacked)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.replicas = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *ctx.replicas.sum(grads)
