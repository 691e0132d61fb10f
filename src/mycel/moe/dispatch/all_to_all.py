"""One uneven all_to_all there and one back: a row for every used slot."""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from mycel.comm.exchange import start_counts, start_exchange
from mycel.comm.meter import ByteMeter
from mycel.comm.pending import Pending
from mycel.moe.dispatch.base import Dispatched, GroupDispatcher, SteppedDispatcher, Steps
from mycel.moe.rows import combine_rows, gather_rows, order_slots, permute_rows
from mycel.moe.slots import RoutingResult
from mycel.wire import IdentityCodec, WireCodec

__all__ = ["AllToAllDispatcher"]


class AllToAllDispatcher(GroupDispatcher, SteppedDispatcher):
    """Rows travel to the ranks of their experts, sorted by expert; a rank may have any number of tokens, or none.

    The host waits for the device once a call: for the split sizes.

    Args:
        num_experts: divided over the group's ranks in order.
        group: the ranks.
        codec: of the rows on the wire.
        meter: counts what is sent.

    References:
        Lepikhin et al., "GShard", ICLR 2021; Gale et al., "MegaBlocks", MLSys 2023 (without padding).
    """

    takes_codec = True

    def __init__(
        self,
        num_experts: int,
        group: dist.ProcessGroup,
        *,
        codec: WireCodec | None = None,
        meter: ByteMeter | None = None,
    ) -> None:
        self.over(num_experts, group, meter)
        self.codec = codec or IdentityCodec()

    def dispatch_steps(self, x_TD: Tensor, routing: RoutingResult) -> Steps[Dispatched]:
        """See ``TokenDispatcher``."""
        W, width = self.num_ranks, self.width
        missing = W * width - routing.num_experts
        give_WE = functional.pad(routing.tokens_per_expert, (0, missing)).view(W, width)
        counts = start_counts(give_WE, self.group, self.meter)
        yield
        get_WE = counts.wait()
        gives, gets = torch.stack([give_WE.sum(dim=1), get_WE.sum(dim=1)]).tolist()
        order = order_slots(routing.top_k_index, sum(gives))
        exchange = self._start(gather_rows(x_TD, order), gets, gives, "dispatch")
        yield
        (rows_RD,) = exchange.wait()
        # They come sorted by source, then by expert; experts want them the other way round.
        expert_R = torch.arange(width, device=x_TD.device).repeat(W)
        expert_R = expert_R.repeat_interleave(get_WE.flatten(), output_size=sum(gets))
        sorting_R = expert_R.argsort(stable=True)
        inverse_R = torch.empty_like(sorting_R)
        inverse_R[sorting_R] = torch.arange(sum(gets), device=x_TD.device)
        rows_RD = permute_rows(rows_RD, sorting_R, inverse_R)
        state = (order, routing.top_k_weights, gets, gives, sorting_R, inverse_R)
        return Dispatched(rows_RD, get_WE.sum(dim=0)[: len(self.experts)], state)

    def combine_steps(self, rows_RD: Tensor, dispatched: Dispatched) -> Steps[Tensor]:
        """See ``TokenDispatcher``."""
        order, weights_TK, gets, gives, sorting_R, inverse_R = dispatched.state
        exchange = self._start(permute_rows(rows_RD, inverse_R, sorting_R), gives, gets, "combine")
        yield
        (rows_RD,) = exchange.wait()
        return combine_rows(rows_RD, weights_TK, order)

    def _start(self, rows_RD: Tensor, gets: list[int], gives: list[int], name: str) -> Pending[tuple[Tensor, ...]]:
        return start_exchange(
            [rows_RD], [self.codec], gets=gets, gives=gives, group=self.group, meter=self.meter, name=name
        )
