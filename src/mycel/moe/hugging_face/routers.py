"""Routers stay the objects they are and become a subclass of what they were: hooks and recorders go on working."""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from mycel.errors import UsageError
from mycel.moe.balance import Balanced, ExpertBias, LoadBalancing, attach
from mycel.moe.hugging_face.blocks import Block, RouterKind
from mycel.moe.recompute import Memo, recomputing
from mycel.moe.slots import RoutingResult, count_tokens

__all__ = ["ALL", "WatchedRouter", "answers_by", "check_policies", "unwatch", "watch"]

#: Which tokens of a call count, and the number of each one's sequence.
Tokens = tuple[Tensor | None, Tensor | None]
ALL: Tokens = (None, None)
#: What ``watch`` adds to an instance, beside the policies' own.
_ADDED = (
    *("mycel_kind", "mycel_policies", "mycel_tokens", "mycel_passes"),
    *("loss", "_counts", "_tokens", "_blind", "_factor"),
)


class WatchedRouter(Balanced):
    """Mixed in behind a router's own class: answers as that does, and lets policies look at the answer.

    Policies are copies of the ones given, one set a router, and no submodules: a state dictionary has the model's own
    entries only. ``ExpertBias`` works on the router's ``e_score_correction_bias``.

    Attributes:
        mycel_tokens: of the call that is running: which tokens count (``None``: all), and of each the number of its
            sequence (``None``: nobody asks).
        mycel_passes: the same of the latest passes, which may be computed again.
    """

    mycel_kind: RouterKind
    mycel_policies: tuple[LoadBalancing, ...]
    mycel_tokens: Tokens
    mycel_passes: Memo[Tokens]

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
        tokens = self.mycel_tokens
        if recomputing():
            tokens = self.mycel_passes.again(logits_TE, tokens)
        else:
            self.mycel_passes.note(logits_TE, tokens)
        deferred = self.observe(self._routing(logits_TE, weights_TK, index_TK, *tokens))
        return answer if deferred is None else (logits_TE, attach(weights_TK, deferred), index_TK)

    def _routing(
        self,
        logits_TE: Tensor,
        weights_TK: Tensor,
        index_TK: Tensor,
        mask: Tensor | None,
        sequence: Tensor | None,
    ) -> RoutingResult:
        E = logits_TE.shape[1]
        wide_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
        if sequence is not None and sequence.numel() != wide_TE.shape[0]:
            raise UsageError(
                f"{type(self).__name__}: {wide_TE.shape[0]} tokens were routed, and the sequences of the call have "
                f"{sequence.numel()}; a policy that looks at sequences cannot be used with this model"
            )
        if mask is not None and mask.numel() == wide_TE.shape[0]:
            sequence = None if sequence is None else sequence[mask]
            wide_TE, weights_TK, index_TK = wide_TE[mask], weights_TK[mask], index_TK[mask]
        # Policies take the first slot for the first choice; some routers leave slots in no order.
        order_TK = weights_TK.detach().argsort(dim=1, descending=True, stable=True)
        index_TK = index_TK.gather(1, order_TK)
        scores_TE = wide_TE.sigmoid() if self.mycel_kind.score == "sigmoid" else wide_TE.softmax(dim=1)
        counts_E = count_tokens(index_TK, E)
        weights_TK = weights_TK.gather(1, order_TK)
        return RoutingResult(index_TK, weights_TK, wide_TE, scores_TE, counts_E, True, sequence)


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


def answers_by(router: nn.Module, answer: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]) -> Callable[[], None]:
    """Have a router answer by a function of its tokens; policies go on watching. Gives what undoes it."""
    before = type(router)
    if getattr(router, "forward", None) is not None and "forward" in router.__dict__:
        raise UsageError(f"{before.__name__}: its forward is replaced on the object (by accelerate's hooks?)")

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.look_at(answer(x)) if isinstance(self, WatchedRouter) else answer(x)

    # A subclass, so that hooks and recorders of outputs go on working.
    own = before.__bases__[0] if issubclass(before, WatchedRouter) else before
    members = {"__module__": before.__module__, "forward": forward, "mycel_own": own}
    router.__class__ = cast(Any, type(f"Answering{before.__name__}", (before,), members))
    return lambda: setattr(router, "__class__", before)


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
    watched.mycel_tokens, watched.mycel_passes = ALL, Memo()
    watched.start_counting(block.num_experts)


def unwatch(router: nn.Module) -> None:
    """Undo ``watch``."""
    router.__class__ = type(router).__bases__[0]
    for name in _ADDED:
        delattr(router, name)
