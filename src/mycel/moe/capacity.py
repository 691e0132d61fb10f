"""How many tokens an expert takes from one rank, and which it refuses."""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mycel.errors import UsageError
from mycel.moe.slots import RoutingResult, count_tokens, routing_from_slots

__all__ = ["CapacityPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPolicy:
    """Tutel's sign convention for the capacity factor, and a rule for who is dropped.

    With T tokens on a rank, a factor ``f`` means: 0, no token is ever dropped; positive, an expert takes at most
    ``K * int(f * ceil(T/E))`` of them; negative, the smaller of that (with ``-f``) and of the largest load. Exchanges
    here carry only used slots, so a limit above the largest load costs nothing, and a factor and its negative do the
    same: both are taken, so that settings keep their meaning. ``int`` yields at least 1, where Tutel would drop
    every token of a small batch.

    Attributes:
        factor: of the capacity.
        drop: who goes first where an expert is full. ``"first"``: first choices before second ones, then by position.
            ``"priority"``: first choices before second ones, then by the token's best score (batch prioritised
            routing).

    Raises:
        UsageError: an unknown rule.

    References:
        Hwang et al., "Tutel", MLSys 2023; Riquelme et al., "Scaling Vision with Sparse Mixture of Experts",
        NeurIPS 2021, section 4.1 (batch prioritised routing).

    Examples:
        >>> CapacityPolicy(factor=1.25).limit(num_tokens=64, top_k=2, num_experts=8)
        20
    """

    factor: float = 0.0
    drop: Literal["first", "priority"] = "first"

    def __post_init__(self) -> None:
        if self.drop not in ("first", "priority"):
            raise UsageError(f"drop rule {self.drop!r}; expected 'first' or 'priority'")

    def limit(self, *, num_tokens: int, top_k: int, num_experts: int, factor: float | None = None) -> int | None:
        """Slots of one expert, for a rank's tokens; ``None``: no limit."""
        chosen = self.factor if factor is None else factor
        if chosen == 0:
            return None
        return top_k * max(1, int(abs(chosen) * -(-num_tokens // num_experts)))

    def apply(self, routing: RoutingResult, *, top_k: int, factor: float | None = None) -> RoutingResult:
        """Empty the slots of tokens that an expert has no room for. Weights that stay are not changed.

        Args:
            routing: of this rank's tokens.
            top_k: experts a token, by which the capacity is counted; slots may be more.
            factor: in place of the policy's own, for this call.
        """
        T = routing.top_k_index.shape[0]
        E = routing.num_experts
        limit = self.limit(num_tokens=T, top_k=top_k, num_experts=E, factor=factor)
        if limit is None or limit >= T:  # a token has an expert at most once
            return routing
        turn = None
        index_TK = routing.top_k_index
        if self.drop == "priority":
            best = routing.scores.detach().amax(dim=1)
            turn = best.argsort(descending=True, stable=True)
            index_TK = index_TK[turn]
        refused_TK = _place_in_queue(index_TK, E).ge(limit)
        if turn is not None:
            refused_TK = torch.empty_like(refused_TK).index_copy_(0, turn, refused_TK)
        index_TK = routing.top_k_index.masked_fill(refused_TK, E)
        weights_TK = routing.top_k_weights.masked_fill(refused_TK, 0.0)
        # Made anew: what ``_replace`` gives does not survive a break of the graph in torch 2.11's compiler.
        return routing_from_slots(index_TK, weights_TK, routing.router_logits, routing.scores, E, full=False)


def _place_in_queue(index_TK: Tensor, num_experts: int) -> Tensor:
    """How many slots come before each one at its expert, first choices first, shape ``[T, K]``."""
    T, K = index_TK.shape
    queue = index_TK.t().reshape(-1)
    by_expert, order = queue.sort(stable=True)
    counts = count_tokens(queue, num_experts + 1)  # empty slots queue up as well, at an expert of their own
    begins = counts.cumsum(0) - counts
    places = torch.arange(T * K, device=queue.device) - begins[by_expert]
    return torch.empty_like(places).index_copy_(0, order, places).view(K, T).t()
