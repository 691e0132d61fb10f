"""All experts on this rank: sorting, and nothing else."""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

import torch
from torch import Tensor

from mycel.comm.meter import ByteMeter
from mycel.moe.dispatch.base import Dispatched, TokenDispatcher
from mycel.moe.rows import combine_rows, gather_rows, order_slots
from mycel.moe.slots import RoutingResult, narrow

__all__ = ["LocalDispatcher"]


class LocalDispatcher(TokenDispatcher):
    """Sorts slots by expert.

    Where slots may be empty, one look at the data spares their rows, except under ``torch.compile``, where they stay
    as rows that no expert works on. Where none is empty, nothing waits for a device.

    Args:
        num_experts: all of them.
        meter: stays as it is.
    """

    num_ranks = 1

    def __init__(self, num_experts: int, *, meter: ByteMeter | None = None) -> None:
        self.experts = range(num_experts)
        self.meter = meter or ByteMeter()

    def dispatch(self, x_TD: Tensor, routing: RoutingResult) -> Dispatched:
        """See ``TokenDispatcher``."""
        num_rows = None
        if not routing.full and not torch.compiler.is_compiling():
            routing, num_rows = narrow(routing)
        order = order_slots(routing.top_k_index, num_rows)
        return Dispatched(gather_rows(x_TD, order), routing.tokens_per_expert, (order, routing.top_k_weights))

    def combine(self, rows_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """See ``TokenDispatcher``."""
        order, weights_TK = dispatched.state
        return combine_rows(rows_RD, weights_TK, order)
