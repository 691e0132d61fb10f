"""All ranks have the same tokens, as in a tensor-parallel group: each works on its experts' share, all add up."""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from mycel.comm.exchange import copy_to_ranks, sum_over_ranks
from mycel.comm.meter import ByteMeter
from mycel.moe.dispatch.base import Dispatched, GroupDispatcher, local_routing
from mycel.moe.dispatch.local import LocalDispatcher
from mycel.moe.slots import RoutingResult

__all__ = ["AllReduceDispatcher"]


class AllReduceDispatcher(GroupDispatcher):
    """Nothing travels before the experts; an all_reduce of ``[T, D]`` follows them, and one in the backward pass.

    Tokens, routers and losses must be alike on the group's ranks; gradients of everything but the experts then are so
    too. The host waits for the device once, for the number of rows.

    Args:
        num_experts: divided over the group's ranks in order.
        group: the ranks, usually those of tensor parallelism.
        meter: counts what is sent.

    References:
        Chen et al., "Pipeline MoE: A Flexible MoE Implementation with Pipeline Parallelism", 2023, section 3.
    """

    same_tokens = True

    def __init__(self, num_experts: int, group: dist.ProcessGroup, *, meter: ByteMeter | None = None) -> None:
        self.over(num_experts, group, meter)
        self.local = LocalDispatcher(len(self.experts))

    def dispatch(self, x_TD: Tensor, routing: RoutingResult) -> Dispatched:
        """See ``TokenDispatcher``."""
        x_TD, weights_TK = copy_to_ranks([x_TD, routing.top_k_weights], self.group, self.meter, "dispatch")
        routing = routing._replace(top_k_weights=weights_TK)
        return self.local.dispatch(x_TD, local_routing(routing, self.experts))

    def combine(self, rows_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """See ``TokenDispatcher``."""
        return sum_over_ranks(self.local.combine(rows_RD, dispatched), self.group, self.meter, "combine")
