"""Every expert takes its best tokens: perfectly even load, and tokens with more or fewer experts."""

# ruff: noqa: N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

import torch
from torch import Tensor, nn

from mycel.moe.routers.base import Router
from mycel.moe.routers.projection import experts_of
from mycel.moe.slots import RoutingResult, routing_from_slots, slots_from_weights

__all__ = ["ExpertChoiceRouter"]


class ExpertChoiceRouter(Router):
    """Every expert takes the ``ceil(T * top_k / E)`` tokens of this rank that score it highest.

    Which tokens an expert takes depends on all tokens of the batch, later ones too: right for encoders and images;
    losses of causal language models come out too good.

    Args:
        projection: gives logits ``[T, E]`` and has ``num_experts``.
        top_k: experts a token on average.
        max_experts: slots a token; ``None``: one an expert, so that no choice is lost.

    Raises:
        UsageError: fewer experts than ``top_k`` or ``max_experts``, or a projection that does not say how many.

    References:
        Zhou et al., "Mixture-of-Experts with Expert Choice Routing", NeurIPS 2022.

    Examples:
        >>> from mycel.moe import LinearProjection
        >>> router = ExpertChoiceRouter(LinearProjection(8, 4), top_k=2)
        >>> router(torch.randn(6, 8)).tokens_per_expert  # 6 tokens of 2 experts each, on average
        tensor([3, 3, 3, 3])
    """

    def __init__(self, projection: nn.Module, top_k: int, *, max_experts: int | None = None) -> None:
        super().__init__(experts_of(projection), top_k)
        self.projection = projection
        self.max_experts = self.num_experts if max_experts is None else self.checked(max_experts)

    def forward(self, x: Tensor, *, top_k: int | None = None, bias: Tensor | None = None) -> RoutingResult:
        """See ``Router``; a bias would change no expert's order of tokens."""
        taken = -(-x.shape[0] * self.checked(top_k) // self.num_experts)
        logits_TE = self.projection(x)
        scores_TE = logits_TE.softmax(dim=1)
        tokens = scores_TE.detach().topk(taken, dim=0).indices
        chosen = torch.zeros_like(scores_TE, dtype=torch.bool).scatter(0, tokens, True)
        index, weights = slots_from_weights(scores_TE.masked_fill(~chosen, 0.0), self.max_experts)
        return routing_from_slots(index, weights, logits_TE, scores_TE, self.num_experts, full=False)
