"""Everyone gets all tokens, works on those of its experts, and a reduce_scatter adds the results up.

Sends each token to every rank once, so less than all-to-all as soon as a token has about as many experts as there are
ranks.
"""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from mycel.comm.exchange import all_gather_rows, reduce_scatter_rows
from mycel.comm.messages import all_gather_single
from mycel.comm.meter import ByteMeter
from mycel.comm.pending import Pending, communicate
from mycel.moe.dispatch.base import Dispatched, GroupDispatcher, local_routing
from mycel.moe.dispatch.local import LocalDispatcher
from mycel.moe.slots import RoutingResult, routing_from_slots

__all__ = ["AllGatherDispatcher"]


class AllGatherDispatcher(GroupDispatcher):
    """All-gather of tokens and routes, local experts, reduce-scatter of partial sums.

    Ranks with fewer tokens than the largest pad. The host waits for the device twice: for the numbers of
    tokens, and for that of rows.

    Args:
        num_experts: divided over the group's ranks in order.
        group: the ranks.
        meter: counts what is sent.

    References:
        Jin et al., "MegaScale-MoE", 2025, section 3.2 (when to prefer it to all-to-all).
    """

    def __init__(self, num_experts: int, group: dist.ProcessGroup, *, meter: ByteMeter | None = None) -> None:
        self.over(num_experts, group, meter)
        self.local = LocalDispatcher(len(self.experts))

    def dispatch(self, x_TD: Tensor, routing: RoutingResult) -> Dispatched:
        """See ``TokenDispatcher``."""
        T, E = x_TD.shape[0], routing.num_experts
        missing = int(communicate(partial(self._lengths, x_TD)).wait().max()) - T
        x_TD, weights_TK = functional.pad(x_TD, (0, 0, 0, missing)), routing.top_k_weights
        index_TK = functional.pad(routing.top_k_index.to(torch.int32), (0, 0, 0, missing), value=E)
        weights_TK = functional.pad(weights_TK, (0, 0, 0, missing))
        x_AD, weights_AK, index_AK = all_gather_rows([x_TD, weights_TK, index_TK], self.group, self.meter, "dispatch")
        index_AK = index_AK.long()
        none_TE = weights_AK.new_empty(0, E)
        everything = routing_from_slots(index_AK, weights_AK, none_TE, none_TE, E, full=False)
        inner = self.local.dispatch(x_AD, local_routing(everything, self.experts))
        return Dispatched(inner.rows, inner.tokens_per_expert, (inner, T))

    def _lengths(self, x_TD: Tensor) -> Pending[Tensor]:
        """Tokens of each rank."""
        lengths_W = torch.empty(self.num_ranks, dtype=torch.int64, device=x_TD.device)
        all_gather_single(lengths_W, lengths_W.new_tensor([x_TD.shape[0]]), group=self.group)
        self.meter.add_even("counts", lengths_W.element_size(), self.group)
        return Pending.done(lengths_W)

    def combine(self, rows_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """See ``TokenDispatcher``."""
        inner, T = dispatched.state
        return reduce_scatter_rows(self.local.combine(rows_RD, inner), self.group, self.meter, "combine")[:T]
