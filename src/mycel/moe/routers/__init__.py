"""Routers: one kind a file. ``ROUTERS`` makes one by name; a router of your own is any module of this signature::

forward(x: Tensor[T, D], *, top_k: int | None, bias: Tensor | None) -> RoutingResult
"""

from __future__ import annotations

from collections.abc import Callable

from mycel.moe.routers.base import Router
from mycel.moe.routers.bi_level import BiLevelRouter
from mycel.moe.routers.expert_choice import ExpertChoiceRouter
from mycel.moe.routers.projection import CosineProjection, LinearProjection
from mycel.moe.routers.relu import ReLURouter
from mycel.moe.routers.top_k import TopKRouter
from mycel.names import spelled

__all__ = [
    "ROUTERS",
    "BiLevelRouter",
    "CosineProjection",
    "ExpertChoiceRouter",
    "LinearProjection",
    "ReLURouter",
    "Router",
    "TopKRouter",
    "make_router",
]

#: Name of a router, and how it is made for a width, a number of experts and a number of experts a token.
ROUTERS: dict[str, Callable[[int, int, int], Router]] = {
    "top_k": lambda dim, num_experts, top_k: TopKRouter(LinearProjection(dim, num_experts), top_k),
    "sigmoid": lambda dim, num_experts, top_k: TopKRouter(
        LinearProjection(dim, num_experts), top_k, score="sigmoid", renormalize=True
    ),
    "cosine": lambda dim, num_experts, top_k: TopKRouter(CosineProjection(dim, num_experts), top_k),
    "expert_choice": lambda dim, num_experts, top_k: ExpertChoiceRouter(LinearProjection(dim, num_experts), top_k),
    "relu": lambda dim, num_experts, top_k: ReLURouter(LinearProjection(dim, num_experts), top_k),
}


def make_router(name: str, dim: int, num_experts: int, top_k: int) -> Router:
    """A router with its usual settings.

    Args:
        name: a key of ``ROUTERS``.
        dim: width of tokens.
        num_experts: to choose from.
        top_k: experts a token, on average where their number varies.

    Raises:
        UsageError: no router has that name, or a size makes no sense.
    """
    return ROUTERS[spelled(name, sorted(ROUTERS), "router")](dim, num_experts, top_k)
