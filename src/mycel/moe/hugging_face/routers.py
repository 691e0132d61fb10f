"""Routers stay the objects they are and become a subclass of what they were: hooks and recorders go on working."""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from mycel.errors import UsageError
from mycel.moe.balance import Balanced, ExpertBias, LoadBalancing
from mycel.moe.hugging_face.blocks import Block, RouterKind
from mycel.moe.slots import RoutingResult, count_tokens

__all__ = ["WatchedRouter", "check_policies", "unwatch", "watch"]

#: What ``watch`` adds to an instance, beside the policies' own.
_ADDED = ("mycel_kind", "mycel_policies", "mycel_mask", "loss", "_counts", "_tokens")


class WatchedRouter(Balanced):
    """Mixed in behind a router's own class: answers as that does, and lets policies look at the answer.

    Policies are copies of the ones given, one set a router, and no submodules: a state dictionary has the model's own
    entries only. ``ExpertBias`` works on the router's ``e_score_correction_bias``.

    Attributes:
        mycel_mask: tokens that count, of the call that is running; ``None``: all.
    """

    mycel_kind: RouterKind
    mycel_policies: tuple[LoadBalancing, ...]
    mycel_mask: Tensor | None

    def policies(self) -> Sequence[LoadBalancing]:
        """See ``Balanced``."""
        for policy in self.mycel_policies:
            if isinstance(policy, ExpertBias):  # the model may have been moved, which makes buffers anew
                policy.bias = cast(Any, self).e_score_correction_bias
        return self.mycel_policies

    def look_at(self, answer: tuple[Tensor, Tensor, Tensor]) -> None:
        """Let the policies see logits, weights and experts, in training."""
        if self.training and torch.is_grad_enabled() and self.mycel_policies:
            self.observe(self._routing(*answer))

    def _routing(self, logits_TE: Tensor, weights_TK: Tensor, index_TK: Tensor) -> RoutingResult:
        E = logits_TE.shape[1]
        wide_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
        mask = self.mycel_mask
        if mask is not None and mask.numel() == wide_TE.shape[0]:
            wide_TE, weights_TK, index_TK = wide_TE[mask], weights_TK[mask], index_TK[mask]
        # Policies take the first slot for the first choice; some routers leave slots in no order.
        order_TK = weights_TK.detach().argsort(dim=1, descending=True, stable=True)
        index_TK = index_TK.gather(1, order_TK)
        scores_TE = wide_TE.sigmoid() if self.mycel_kind.score == "sigmoid" else wide_TE.softmax(dim=1)
        counts_E = count_tokens(index_TK, E)
        return RoutingResult(index_TK, weights_TK.gather(1, order_TK), wide_TE, scores_TE, counts_E, True)


@functools.cache
def _watched(own: Any) -> type[nn.Module]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = own.forward(self, *args, **kwargs)
        self.look_at(answer)
        return answer

    def state(self: Any) -> dict[str, Any]:
        kept: dict[str, Any] = self.without_graph(own.__getstate__(self))
        return kept

    # The own class comes first: only then may an object of it become one of the new class.
    methods = {"__module__": own.__module__, "forward": forward, "__getstate__": state}
    made = type(f"Watched{own.__name__}", (own, WatchedRouter), methods)
    return cast(type[nn.Module], made)


def check_policies(block: Block, policies: Sequence[LoadBalancing]) -> None:
    """Refuse policies that a router cannot follow.

    Raises:
        UsageError: says which router, and why.
    """
    where = f"{block.path}.{block.router_name} ({type(block.router).__name__})"
    if "forward" in block.router.__dict__:
        raise UsageError(
            f"{where}: its forward is replaced on the object (by accelerate's hooks?); apply before that happens"
        )
    if policies and block.kind.score is None:
        raise UsageError(
            f"{where}: its weights are proportional neither to softmax nor to sigmoid of its logits, so that no "
            "policy of balance knows its scores; apply without balancing"
        )
    for policy in policies:
        if policy.selection_bias is None:
            continue
        if not isinstance(policy, ExpertBias) or not block.kind.biased:
            raise UsageError(
                f"{where}: {type(policy).__name__} needs a router with a buffer e_score_correction_bias of "
                f"{block.num_experts} numbers; take a loss, such as SwitchLoss, for this model"
            )
        if policy.bias.numel() != block.num_experts:
            raise UsageError(
                f"{where}: ExpertBias of {policy.bias.numel()} experts for a router of {block.num_experts}"
            )


def watch(block: Block, policies: Sequence[LoadBalancing]) -> None:
    """Make a router a ``WatchedRouter``."""
    router = block.router
    router.__class__ = _watched(cast(Any, type(router)))
    watched = cast(Any, router)
    watched.mycel_kind = block.kind
    # A tuple and not a ModuleList, which would add entries to the state dictionary.
    watched.mycel_policies = tuple(copy.deepcopy(policy) for policy in policies)
    watched.mycel_mask = None
    watched.start_counting(block.num_experts)


def unwatch(router: nn.Module) -> None:
    """Undo ``watch``."""
    router.__class__ = type(router).__bases__[0]
    for name in _ADDED:
        delattr(router, name)
