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
from mycel.moe.balance import Balanced, ExpertBias, LoadBalancing, attach
from mycel.moe.hugging_face.blocks import Block, RouterKind
from mycel.moe.recompute import Memo, recomputing
from mycel.moe.slots import RoutingResult, count_tokens

__all__ = ["WatchedRouter", "check_policies", "unwatch", "watch"]

#: What ``watch`` adds to an instance, beside the policies' own.
_ADDED = (
    *("mycel_kind", "mycel_policies", "mycel_mask", "mycel_masks"),
    *("loss", "_counts", "_tokens", "_blind", "_factor"),
)


class WatchedRouter(Balanced):
    """Mixed in behind a router's own class: answers as that does, and lets policies look at the answer.

    Policies are copies of the ones given, one set a router, and no submodules: a state dictionary has the model's own
    entries only. ``ExpertBias`` works on the router's ``e_score_correction_bias``.

    Attributes:
        mycel_mask: tokens that count, of the call that is running; ``None``: all.
        mycel_masks: the same of the latest passes, which may be computed again.
    """

    mycel_kind: RouterKind
    mycel_policies: tuple[LoadBalancing, ...]
    mycel_mask: Tensor | None
    mycel_masks: Memo[Tensor | None]

    def policies(self) -> Sequence[LoadBalancing]:
        """See ``Balanced``."""
        for policy in self.mycel_policies:
            if isinstance(policy, ExpertBias):  # the model may have been moved, which makes buffers anew
                policy.bias = cast(Any, self).e_score_correction_bias
        return self.mycel_policies

    def look_at(self, answer: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Let the policies see logits, weights and experts, in training; the answer to go on with."""
        if not self.training or not self.mycel_policies:
            return answer
        logits_TE, weights_TK, index_TK = answer
        mask = self.mycel_mask
        if recomputing():
            mask = self.mycel_masks.again(logits_TE, mask)
        else:
            self.mycel_masks.note(logits_TE, mask)
        deferred = self.observe(self._routing(logits_TE, weights_TK, index_TK, mask))
        return answer if deferred is None else (logits_TE, attach(weights_TK, deferred), index_TK)

    def _routing(self, logits_TE: Tensor, weights_TK: Tensor, index_TK: Tensor, mask: Tensor | None) -> RoutingResult:
        E = logits_TE.shape[1]
        wide_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
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
        return self.look_at(own.forward(self, *args, **kwargs))

    def state(self: Any) -> dict[str, Any]:
        kept: dict[str, Any] = self.without_graph(own.__getstate__(self))
        return kept

    def reduced(self: Any, protocol: Any) -> Any:
        return _made_again, (own,), self.__getstate__()

    # The own class comes first: only then may an object of it become one of the new class.
    methods = {"__module__": own.__module__, "forward": forward, "__getstate__": state, "__reduce_ex__": reduced}
    made = type(f"Watched{own.__name__}", (own, WatchedRouter), methods)
    return cast(type[nn.Module], made)


def _made_again(own: Any) -> nn.Module:
    """An empty watched router, for pickles: no module has its class under a name."""
    made = _watched(own)
    return made.__new__(made)


def check_policies(block: Block, policies: Sequence[LoadBalancing]) -> None:
    """Refuse policies that a router cannot follow.

    Raises:
        UsageError: says which router, and why.
    """
    where = f"{block.path}.{block.router_name} ({type(block.router).__name__})"
    if block.router is None or block.kind is None:
        raise UsageError(f"{block.path}: nobody has asked which of its children is the router")
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
    """Make a router, which ``find_blocks`` has asked, a ``WatchedRouter``."""
    router = cast(nn.Module, block.router)
    router.__class__ = _watched(cast(Any, type(router)))
    watched = cast(Any, router)
    watched.mycel_kind = block.kind
    # A tuple and not a ModuleList, which would add entries to the state dictionary.
    watched.mycel_policies = tuple(copy.deepcopy(policy) for policy in policies)
    watched.mycel_mask, watched.mycel_masks = None, Memo()
    watched.start_counting(block.num_experts)


def unwatch(router: nn.Module) -> None:
    """Undo ``watch``."""
    router.__class__ = type(router).__bases__[0]
    for name in _ADDED:
        delattr(router, name)
