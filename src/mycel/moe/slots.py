"""What a router says: which experts each token goes to, and with which weight.

Shape suffixes in this package: T tokens of this rank, D width, F hidden size of an expert, E experts, K slots a
token, R rows (one for each used slot).
"""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mycel.brief import brief
from mycel.planning.placement import ExpertLayout

__all__ = [
    "RoutingResult",
    "count_tokens",
    "narrow",
    "routing_from_slots",
    "slots_from_weights",
    "spread_over_slices",
]


class RoutingResult(NamedTuple):
    """Where the tokens of one rank go. A slot whose index is ``num_experts`` is empty.

    Empty slots make one type serve tokens with a fixed number of experts, with a varying one (ReLU routing, expert
    choice) and with experts that were full. A named tuple, because ``torch.compile`` and pytrees know those.

    Attributes:
        top_k_index: expert of each slot, ``int64``, shape ``[T, K]``.
        top_k_weights: factor of that expert's output, shape ``[T, K]``, 0 in empty slots; gradients flow through it.
        router_logits: before any score function, shape ``[T, E]``.
        scores: after it, of all experts, shape ``[T, E]``; what losses balance.
        tokens_per_expert: used slots of each expert, ``int64``, shape ``[E]``.
        full: no slot is empty, known without looking: a router with a fixed number of experts and no capacity.
        sequence: of each token the number of its sequence, shape ``[T]``; ``None``: all are of one. Only policies
            of balance look at it.

    Examples:
        >>> index, weights = torch.tensor([[0, 2], [2, 3]]), torch.tensor([[0.6, 0.4], [1.0, 0.0]])
        >>> even, counts = torch.full((2, 3), 1 / 3), torch.tensor([1, 0, 2])
        >>> routing = RoutingResult(index, weights, even.log(), even, counts, full=False)
        >>> routing.num_experts, (routing.top_k_index == routing.num_experts).sum(dim=1)  # empty slots of each token
        (3, tensor([0, 1]))
    """

    top_k_index: Tensor
    top_k_weights: Tensor
    router_logits: Tensor
    scores: Tensor
    tokens_per_expert: Tensor
    full: bool
    sequence: Tensor | None = None

    def __repr__(self) -> str:
        return brief(self)

    @property
    def num_experts(self) -> int:
        """Experts there are; also the index of an empty slot."""
        return self.tokens_per_expert.shape[0]


def count_tokens(index_TK: Tensor, num_experts: int) -> Tensor:
    """Used slots of each expert, shape ``[E]``; without waiting for a device."""
    flat = index_TK.reshape(-1)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    return counts.scatter_add(0, flat, torch.ones_like(flat))[:num_experts]


def routing_from_slots(
    index_TK: Tensor, weights_TK: Tensor, logits_TE: Tensor, scores_TE: Tensor, num_experts: int, *, full: bool
) -> RoutingResult:
    """A result whose counts are taken from its slots."""
    counts = count_tokens(index_TK, num_experts)
    return RoutingResult(index_TK, weights_TK, logits_TE, scores_TE, counts, full)


def slots_from_weights(weights_TE: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The positive entries of each row as slots, the largest first.

    Args:
        weights_TE: one weight an expert; those that are not positive mean "not chosen".
        width: slots a token; smaller weights that find no slot are left out.

    Returns:
        Index and weights of the slots, shape ``[T, width]``.
    """
    values, index = weights_TE.topk(min(width, weights_TE.shape[1]), dim=1)
    empty = values <= 0
    return index.masked_fill(empty, weights_TE.shape[1]), values.masked_fill(empty, 0.0)


def narrow(routing: RoutingResult) -> tuple[RoutingResult, int]:
    """The same routing in as few slots as its busiest token needs, and how many slots are used.

    Empty slots are costly. Where there may be some, this waits for the device once.
    """
    if routing.full or routing.top_k_index.shape[0] == 0:
        return routing, routing.top_k_index.numel()
    index, order = routing.top_k_index.sort(dim=1, stable=True)  # empty slots have the largest index
    used = (index < routing.num_experts).sum(dim=1)
    width, num_used = torch.stack([used.max(), used.sum()]).tolist()
    if width == index.shape[1]:
        return routing, num_used
    weights = routing.top_k_weights.gather(1, order)
    return routing._replace(top_k_index=index[:, :width], top_k_weights=weights[:, :width]), num_used


def spread_over_slices(
    layout: ExpertLayout, routing: RoutingResult, *, r: int, rank: int, same_tokens: bool = False
) -> RoutingResult:
    """Routes to slots of a layout in place of routes to experts.

    Args:
        layout: of the experts.
        routing: of this rank's tokens, or of all ranks' where they are the same.
        r: at least 1.
        rank: the sender. It sends to the party at its own place in each team: to its own one where the expert is its
            team's, and all parties hear from equally many ranks.
        same_tokens: all ranks have these tokens; they are dealt out to parties in turn.

    Returns:
        ``r`` slots for each one.
    """
    if layout.tensor_shards == 1:
        return routing
    E, S, width = layout.num_experts, layout.tensor_shards, layout.width
    index_TK = routing.top_k_index
    T, K = index_TK.shape
    device = index_TK.device
    experts_E = torch.arange(E + 1, device=device)
    first_E = experts_E // width * (S * width) + experts_E % width
    if same_tokens:
        party_T1 = (torch.arange(T, device=device) % (S // r)).unsqueeze(1)
    else:
        party_T1 = torch.tensor(rank % S // r, device=device)
    copies_r = torch.arange(r, device=device) * width
    slot_TKr = (first_E[index_TK] + party_T1 * (r * width)).unsqueeze(2) + copies_r
    slot_TKr = slot_TKr.masked_fill((index_TK == E).unsqueeze(2), layout.num_slots)
    slots = slot_TKr.reshape(T, K * r)
    return routing._replace(
        top_k_index=slots,
        top_k_weights=routing.top_k_weights.unsqueeze(2).expand(T, K, r).reshape(T, K * r),
        tokens_per_expert=count_tokens(slots, layout.num_slots),
    )
