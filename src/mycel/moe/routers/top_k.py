"""Every token takes its best experts: softmax or sigmoid scores, within the best groups, renormalised or not."""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from mycel.errors import UsageError
from mycel.moe.kernels.best import best_experts, kernel_scores
from mycel.moe.routers.base import Router
from mycel.moe.routers.projection import experts_of
from mycel.moe.slots import RoutingResult, count_tokens

__all__ = ["TopKRouter"]

#: Keeps a sum of scores that all underflowed from being divided by.
_TINY = 1e-20


class TopKRouter(Router):
    """The ``top_k`` experts with the largest scores.

    Args:
        projection: gives logits ``[T, E]`` and has ``num_experts``.
        top_k: experts a token.
        score: ``"softmax"`` over all experts, or ``"sigmoid"`` of each.
        renormalize: weights of a token add up to 1 (with one expert a token they are 1, and carry no gradient).
        num_groups: experts are divided into so many groups of neighbours.
        top_groups: a token's experts come from so many groups, those with the largest sums of two best scores.
        scale: factor of all weights.
        noise: in training, normal noise of this deviation over the number of experts is added to logits.

    Raises:
        UsageError: sizes that do not fit together.

    References:
        Shazeer et al., "Outrageously Large Neural Networks", ICLR 2017 (top-k, noise);
        DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.2 (sigmoid scores, groups, bias in the choice).

    Examples:
        >>> from mycel.moe import LinearProjection
        >>> router = TopKRouter(LinearProjection(4, 4), top_k=2, renormalize=True)
        >>> _ = nn.init.eye_(router.projection.weight)  # the numbers of a token are its logits
        >>> routing = router(torch.tensor([[0.0, 2.0, 1.0, 2.0]]))
        >>> routing.top_k_index.sort().values, routing.top_k_weights.detach()
        (tensor([[1, 3]]), tensor([[0.5000, 0.5000]]))
    """

    takes_bias = True

    def __init__(
        self,
        projection: nn.Module,
        top_k: int,
        *,
        score: Literal["softmax", "sigmoid"] = "softmax",
        renormalize: bool = False,
        num_groups: int = 1,
        top_groups: int = 1,
        scale: float = 1.0,
        noise: float = 0.0,
    ) -> None:
        super().__init__(experts_of(projection), top_k)
        if score not in ("softmax", "sigmoid"):
            raise UsageError(f"score {score!r}; expected 'softmax' or 'sigmoid'")
        if num_groups < 1 or self.num_experts % num_groups or not 1 <= top_groups <= num_groups:
            raise UsageError(f"{self.num_experts} experts in {num_groups} groups, the best {top_groups} of them")
        self.projection = projection
        self.score = score
        self.renormalize = renormalize
        self.num_groups, self.top_groups = num_groups, top_groups
        self.scale = scale
        self.noise = noise
        self._check_groups(top_k)

    def forward(self, x: Tensor, *, top_k: int | None = None, bias: Tensor | None = None) -> RoutingResult:
        """See ``Router``."""
        k = self.checked(top_k)
        self._check_groups(k)
        logits_TE = self.projection(x)
        noisy_TE = logits_TE
        if self.noise and self.training:
            noisy_TE = logits_TE + torch.randn_like(logits_TE) * (self.noise / self.num_experts)
        if self.top_groups == self.num_groups and kernel_scores(noisy_TE):
            index_TK, weights_TK, scores_TE, counts_E = best_experts(noisy_TE, bias, k, self.score)
        else:
            scores_TE = noisy_TE.softmax(dim=1) if self.score == "softmax" else noisy_TE.sigmoid()
            choice_TE = scores_TE.detach() if bias is None else scores_TE.detach() + bias
            index_TK = self._within_groups(choice_TE).topk(k, dim=1).indices
            weights_TK = scores_TE.gather(1, index_TK)
            counts_E = count_tokens(index_TK, self.num_experts)
        if self.renormalize:
            weights_TK = weights_TK / (weights_TK.sum(dim=1, keepdim=True) + _TINY)
        if self.scale != 1.0:
            weights_TK = weights_TK * self.scale
        return RoutingResult(index_TK, weights_TK, logits_TE, scores_TE, counts_E, full=True)

    def _check_groups(self, top_k: int) -> None:
        reached = self.num_experts // self.num_groups * self.top_groups
        if top_k > reached:
            raise UsageError(f"top_k {top_k}; the best {self.top_groups} groups have {reached} experts")

    def _within_groups(self, choice_TE: Tensor) -> Tensor:
        if self.top_groups == self.num_groups:
            return choice_TE
        grouped = choice_TE.view(-1, self.num_groups, self.num_experts // self.num_groups)
        of_group = grouped.topk(min(2, grouped.shape[2]), dim=2).values.sum(dim=2)
        best = of_group.topk(self.top_groups, dim=1).indices
        outside = torch.ones_like(of_group, dtype=torch.bool).scatter(1, best, False)
        return grouped.masked_fill(outside.unsqueeze(2), float("-inf")).flatten(1)
