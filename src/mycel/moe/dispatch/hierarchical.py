"""Two exchanges: between nodes one copy of a token for each node it visits, then between the ranks of that node."""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.comm.exchange import start_counts, start_exchange, start_swap
from mycel.comm.meter import ByteMeter
from mycel.moe.dispatch.all_to_all import AllToAllDispatcher
from mycel.moe.dispatch.base import Dispatched, SteppedDispatcher, Steps
from mycel.moe.rows import combine_rows, gather_rows, order_slots
from mycel.moe.slots import RoutingResult, count_tokens, routing_from_slots
from mycel.planning.placement import ExpertLayout
from mycel.wire import IdentityCodec, WireCodec

__all__ = ["HierarchicalDispatcher"]


class HierarchicalDispatcher(SteppedDispatcher):
    """Between nodes, rank ``l`` of one exchanges with rank ``l`` of the others; within, all with all.

    A token goes to a node once, however many of its experts are there, with its slots' experts and weights; the node
    adds up its experts' results and sends one row back. Experts are divided over nodes, then over a node's ranks.

    Args:
        num_experts: of the layer.
        between: ranks at the same place of every node, in the order of nodes.
        inside: ranks of this node.
        codec: of rows on the wire, in both exchanges.
        meter: counts what is sent.

    References:
        DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.2 (each token once to a node);
        Hwang et al., "Tutel", MLSys 2023, section 3.3 (two-dimensional all-to-all).
    """

    takes_codec = True

    def __init__(
        self,
        num_experts: int,
        between: dist.ProcessGroup,
        inside: dist.ProcessGroup,
        *,
        codec: WireCodec | None = None,
        meter: ByteMeter | None = None,
    ) -> None:
        self.between = between
        self.num_nodes = dist.get_world_size(between)
        self.meter = meter or ByteMeter()
        self.codec = codec or IdentityCodec()
        local = dist.get_world_size(inside)
        self.num_ranks = self.num_nodes * local
        layout = ExpertLayout(num_experts=num_experts, num_ranks=self.num_ranks)
        self.experts = layout.of(dist.get_rank(between) * local + dist.get_rank(inside))
        self.per_node = layout.width * local
        self.within = AllToAllDispatcher(self.per_node, inside, codec=self.codec, meter=self.meter)

    def dispatch_steps(self, x_TD: Tensor, routing: RoutingResult) -> Steps[Dispatched]:
        """See ``TokenDispatcher``."""
        T, N = routing.top_k_index.shape[0], self.num_nodes
        # Visits of tokens to nodes take the part that slots have elsewhere: visit n of a token goes to node n.
        node_TK = (routing.top_k_index // self.per_node).masked_fill(routing.top_k_index == routing.num_experts, N)
        nodes_N = torch.arange(N, device=x_TD.device)
        visited_TN = (node_TK.unsqueeze(2) == nodes_N).any(dim=1)
        visits_TN = nodes_N.expand(T, N).masked_fill(~visited_TN, N)
        give_N = count_tokens(visits_TN, N)
        counts = start_counts(give_N.unsqueeze(1), self.between, self.meter)
        yield
        get_N = counts.wait().squeeze(1)
        gives, gets = torch.stack([give_N, get_N]).tolist()
        order = order_slots(visits_TN, sum(gives))
        token_R, node_R = order.slot_of_row // N, order.slot_of_row % N
        elsewhere_RK = node_TK[token_R] != node_R.unsqueeze(1)
        index_RK = (routing.top_k_index[token_R] - node_R.unsqueeze(1) * self.per_node).to(torch.int32)
        index_RK = index_RK.masked_fill(elsewhere_RK, self.per_node)
        weights_RK = routing.top_k_weights[token_R].masked_fill(elsewhere_RK, 0.0)
        rows = start_exchange(
            [gather_rows(x_TD, order), weights_RK],
            [self.codec, IdentityCodec()],
            gets=gets,
            gives=gives,
            group=self.between,
            meter=self.meter,
            name="dispatch",
        )
        slots = start_swap(index_RK, gets, gives, self.between, self.meter, "dispatch")
        yield
        rows_RD, weights_RK = rows.wait()
        index_RK = slots.wait().long()
        none_RE = weights_RK.new_empty(0, self.per_node)
        arrived = routing_from_slots(index_RK, weights_RK, none_RE, none_RE, self.per_node, full=False)
        inner = yield from self.within.dispatch_steps(rows_RD, arrived)
        counts_E = inner.tokens_per_expert[: len(self.experts)]
        return Dispatched(inner.rows, counts_E, (inner, order, gets, gives))

    def combine_steps(self, rows_RD: Tensor, dispatched: Dispatched) -> Steps[Tensor]:
        """See ``TokenDispatcher``."""
        inner, order, gets, gives = dispatched.state
        summed_RD = yield from self.within.combine_steps(rows_RD, inner)
        exchange = start_exchange(
            [summed_RD],
            [self.codec],
            gets=gives,
            gives=gets,
            group=self.between,
            meter=self.meter,
            name="combine",
        )
        yield
        (summed_RD,) = exchange.wait()
        return combine_rows(summed_RD, None, order)
