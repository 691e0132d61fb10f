"""Every expert whose logit is positive: continuous everywhere, and training controls how many they are."""

# ruff: noqa: N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

from torch import Tensor, nn

from mycel.moe.routers.base import Router
from mycel.moe.routers.projection import experts_of
from mycel.moe.slots import RoutingResult, routing_from_slots, slots_from_weights

__all__ = ["ReLURouter"]


class ReLURouter(Router):
    """Weights are ``relu(logits)``; ``AdaptiveL1`` brings their number to ``top_k`` a token on average.

    Args:
        projection: gives logits ``[T, E]`` and has ``num_experts``.
        top_k: experts a token that training aims at; a call's own ``top_k`` changes nothing.
        max_experts: slots a token; ``None``: one an expert, so that nothing is cut off.

    Raises:
        UsageError: fewer experts than ``top_k`` or ``max_experts``, or a projection that does not say how many.

    References:
        Wang et al., "ReMoE: Fully Differentiable Mixture-of-Experts with ReLU Routing", ICLR 2025.

    Examples:
        >>> import torch
        >>> from mycel.moe import LinearProjection
        >>> router = ReLURouter(LinearProjection(4, 4), top_k=2)
        >>> _ = nn.init.eye_(router.projection.weight)  # the numbers of a token are its logits
        >>> router(torch.tensor([[1.0, -1.0, 3.0, 2.0], [-1.0, -1.0, -1.0, 5.0]])).top_k_index  # 4: an empty slot
        tensor([[2, 3, 0, 4],
                [3, 4, 4, 4]])
    """

    def __init__(self, projection: nn.Module, top_k: int, *, max_experts: int | None = None) -> None:
        super().__init__(experts_of(projection), top_k)
        self.projection = projection
        self.max_experts = self.num_experts if max_experts is None else self.checked(max_experts)

    def forward(self, x: Tensor, *, top_k: int | None = None, bias: Tensor | None = None) -> RoutingResult:
        """See ``Router``."""
        logits_TE = self.projection(x)
        scores_TE = logits_TE.relu()
        index, weights = slots_from_weights(scores_TE, self.max_experts)
        return routing_from_slots(index, weights, logits_TE, scores_TE, self.num_experts, full=False)
