"""Experts as Hugging Face stores them, on the same way as ours: ``RoutedExperts`` with foreign weights.

One class serves every module under ``use_experts_implementation``, because those say how they store weights:
``is_transposed``, ``has_bias``, ``has_gate``, ``has_post_expert_norm``, and ``_apply_gate``.
"""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mycel.errors import UsageError
from mycel.moe.activations import ACTIVATIONS
from mycel.moe.expert_mlp import ApartWeights, ExpertKind, ExpertWeights, compute_dtype
from mycel.moe.flex.choice import Chooser
from mycel.moe.hugging_face.transformers_api import default_gate
from mycel.moe.parallel import ExpertParallel
from mycel.moe.routed import RoutedExperts
from mycel.moe.slices import Cut, WeightUse, call_weights
from mycel.moe.slots import routing_from_slots

__all__ = ["ForeignExperts", "experts_forward"]


class ForeignExperts:
    """The experts of a Hugging Face module: its weights, its arithmetic, our way of tokens.

    Args:
        module: stacked experts, which may be divided already.
        num_experts: of the layer, here and elsewhere.
        parallel: how they are divided.

    Attributes:
        routed: dispatch, compute, combine.
        chooser: of schedules, with a tuner.
        cuts: how each parameter is divided among ranks that share an expert.
        far: where weights are, if not in the module's parameters: for a type, those in far memory.
        router: whose experts they are, once somebody has asked.
        narrow: what makes a call's weights narrower, if anything does: see ``mycel.moe.elastic``.
        watch: see ``ExpertKind``.

    Raises:
        UsageError: they are to be cut, and it is not known how.
    """

    def __init__(self, module: Any, num_experts: int, parallel: ExpertParallel) -> None:
        self.module, self.num_experts = module, num_experts
        self.far: Callable[[torch.dtype], ApartWeights] | None = None
        self.router: nn.Module | None = None
        self.narrow: Callable[[ExpertWeights, WeightUse], ExpertWeights] | None = None
        self.watch: Callable[[Tensor, Tensor], None] | None = None
        self.gated, self.biased = getattr(module, "has_gate", True), getattr(module, "has_bias", False)
        names = ["gate_up_proj" if self.gated else "up_proj", "down_proj"]
        self.names = names + ([f"{name}_bias" for name in names] if self.biased else [])
        act, gate = getattr(module, "act_fn", None), getattr(type(module), "_apply_gate", None)
        silu = isinstance(act, nn.SiLU) or type(act).__name__ == "SiLUActivation"
        #: Their gate is the library's usual one with SiLU, of which our form keeps less for the backward pass.
        self.swiglu = self.gated and silu and gate is not None and gate is default_gate()
        blocks = (2 if self.swiglu else _gate_blocks(module)) if self.gated else 1
        first, second = (2, 1) if module.is_transposed else (1, 2)
        #: Whether it is known which up each gate belongs to.
        self.knows_gates = blocks is not None
        up = blocks or 1
        cuts = [Cut(dim=first, blocks=up), Cut(dim=second), Cut(dim=1, blocks=up), Cut(dim=1)]
        self.cuts = dict(zip(self.names, cuts, strict=False))
        self.routed = RoutedExperts(num_experts, parallel)
        shards = self.routed.layout.tensor_shards
        why = "" if shards == 1 else self._why_whole(shards, known=blocks is not None)
        if why and parallel.tensor_shards is not None:
            raise UsageError(f"{type(module).__name__} {why}: it cannot be cut into {shards} equal slices")
        if why:  # nobody asked for slices
            self.routed = RoutedExperts(num_experts, replace(parallel, tensor_shards=1))
        self.chooser = None if parallel.tuner is None else Chooser(parallel.tuner, self.routed)

    def _why_whole(self, shards: int, *, known: bool) -> str:
        """Why these experts cannot be cut; empty: they can."""
        if getattr(self.module, "has_post_expert_norm", False):
            return "norms what experts give"
        sizes = [getattr(self.module, name).shape[cut.dim] // cut.blocks for name, cut in self.cuts.items()]
        if any(size % shards for size in sizes):
            return f"has widths of {', '.join(str(size) for size in sizes)}"
        return "" if known else "has gates of which it is not known which up each belongs to"

    @property
    def owned(self) -> Sequence[int]:
        """See ``HeldExperts``."""
        return self.routed.owned

    @property
    def kind(self) -> ExpertKind:
        """See ``HeldExperts``."""
        module = self.module
        activate: Callable[[Tensor], Tensor] = module._apply_gate if self.gated else module.act_fn
        after = module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None
        plain = self.swiglu and not (self.biased or module.is_transposed or after)
        # Slots without an expert are not marked, and kernels that take tokens would have to know.
        activate = ACTIVATIONS["swiglu"][1] if self.swiglu else activate
        plain = plain and self.far is None
        return ExpertKind(activate, "swiglu" if plain else None, fused_tokens=False, after=after, watch=self.watch)

    def weights(self, use: WeightUse) -> ExpertWeights | ApartWeights:
        """See ``HeldExperts``."""
        if self.far is not None:
            return self.far(use.dtype)
        stacked = {name: getattr(self.module, name) for name in self.names}
        transposed = self.module.is_transposed
        whole = call_weights(stacked, self.cuts, use, shard=self.routed.shard, transposed=transposed)
        return whole if self.narrow is None else self.narrow(whole, use)

    def __call__(self, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Tokens to their experts, through them, and back; shape and type of ``hidden``."""
        none_TE = weights_TK.new_empty(0, self.num_experts)
        # Slots without an expert come after all rows and have results of zero, so "full" is right with them, too.
        routing = routing_from_slots(index_TK, weights_TK, none_TE, none_TE, self.num_experts, full=True)
        route = self.chooser or self.routed
        return route(self, hidden_TD.to(compute_dtype(hidden_TD)), routing).to(hidden_TD.dtype)


def experts_forward(module: Any, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """The experts backend: for every token the weighted sum of its experts.

    Args:
        module: experts; ``mycel_experts`` says where their tokens are, by default here.
        hidden_TD: tokens.
        index_TK: an expert for each slot; ``num_experts``: none.
        weights_TK: of slots.

    Returns:
        Shape and type of ``hidden``.
    """
    experts: ForeignExperts | None = getattr(module, "mycel_experts", None)
    if experts is None:
        experts = ForeignExperts(module, module.num_experts, ExpertParallel())
    return experts(hidden_TD, index_TK, weights_TK)


@torch.no_grad()
def _gate_blocks(module: Any) -> int | None:
    """2 where gates come first and then ups, 1 where each gate has its up beside it, ``None`` for neither."""
    pairs, some = 4, next(module.parameters())
    rows = torch.linspace(0.3, 0.9, 2 * pairs, device="cpu").repeat(2 * pairs + 1, 1)
    rows[1:] += 0.05 * torch.eye(2 * pairs, device="cpu")
    try:
        answers = module._apply_gate(rows.to("cpu" if some.is_meta else some.device))
    except Exception:  # whatever a foreign gate may raise: it is not understood
        return None
    if answers.shape != (2 * pairs + 1, pairs):
        return None
    touched = (answers[1:] != answers[0]).cpu()
    for blocks, pair_of in ((2, torch.arange(2 * pairs) % pairs), (1, torch.arange(2 * pairs) // 2)):
        if torch.equal(touched, nn.functional.one_hot(pair_of, pairs).bool()):
            return blocks
    return None
