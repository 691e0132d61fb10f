"""A layer's tokens in chunks, so that the exchange of one chunk overlaps the experts' work on another.

Chunks are turned into steps that stop wherever an exchange is under way; steps are taken in turn, one of each chunk.
Autograd goes back over them in the opposite order, so that the backward pass overlaps as the forward pass does.
"""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from mycel.errors import UsageError
from mycel.moe.dispatch.base import Steps, TokenDispatcher
from mycel.moe.expert_mlp import ApartWeights, ExpertKind, ExpertWeights, expert_mlp
from mycel.moe.slots import RoutingResult, routing_from_slots

__all__ = ["Beside", "in_turn", "overlapped_experts", "overlapped_tokens", "overlapped_whole", "parts_of_experts"]

Result = TypeVar("Result")
_Weights = ExpertWeights | ApartWeights


class Beside:
    """Something else to compute, as a shared expert, while tokens travel; computed once.

    Args:
        compute: without exchanges of its own.
    """

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute
        self._result: Tensor | None = None

    def steps(self) -> Steps[Tensor]:
        """As one of the flows taken in turn: all at once, when exchanges of the flows before it are under way."""
        yield from ()
        self._result = self._compute()
        return self._result

    def take(self) -> Tensor:
        """The result; computed now if nothing travelled."""
        return self._compute() if self._result is None else self._result


def in_turn(flows: Sequence[Steps[Result]]) -> list[Result]:
    """One step of each flow, then the next one of each, until all have ended; their results."""
    results: dict[int, Result] = {}
    while len(results) < len(flows):
        for place, flow in enumerate(flows):
            if place in results:
                continue
            try:
                next(flow)
            except StopIteration as stopped:
                results[place] = stopped.value
    return [results[place] for place in range(len(flows))]


def overlapped_whole(
    dispatcher: TokenDispatcher,
    x_TD: Tensor,
    routing: RoutingResult,
    weights: _Weights,
    kind: ExpertKind,
    beside: Beside,
) -> Tensor:
    """Dispatch, compute, combine, all tokens together, and something else while the first exchange is under way."""
    return in_turn([_chunk(dispatcher, x_TD, routing, weights, kind), beside.steps()])[0]


def overlapped_tokens(
    dispatcher: TokenDispatcher,
    x_TD: Tensor,
    routing: RoutingResult,
    weights: _Weights,
    kind: ExpertKind,
    degree: int,
    beside: Beside | None = None,
) -> Tensor:
    """Dispatch, compute, combine, where consecutive tokens are a chunk. A rank may have fewer tokens than chunks.

    Args:
        dispatcher: of the tokens.
        x_TD: tokens.
        routing: of them.
        weights: of all experts here.
        kind: of experts.
        degree: how many chunks, alike on all ranks.
        beside: what else is to be computed.

    References:
        Hwang et al., "Tutel", MLSys 2023 (adaptive pipelining, of chunks of the capacity).
    """
    logits, scores = routing.router_logits[:0], routing.scores[:0]  # dispatchers look at slots only
    flows = []
    for x_cD, index_cK, weights_cK in zip(
        *(torch.tensor_split(t, degree) for t in (x_TD, routing.top_k_index, routing.top_k_weights)), strict=True
    ):
        slots = (index_cK, weights_cK, logits, scores, routing.num_experts)
        chunk = routing_from_slots(*slots, full=routing.full)
        flows.append(_chunk(dispatcher, x_cD, chunk, weights, kind))
    return torch.cat(_with(flows, beside))


def _with(flows: Sequence[Steps[Tensor]], beside: Beside | None) -> list[Tensor]:
    return in_turn([*flows, *([] if beside is None else [beside.steps()])])[: len(flows)]


def overlapped_experts(
    dispatcher: TokenDispatcher,
    x_TD: Tensor,
    routing: RoutingResult,
    weights: _Weights,
    kind: ExpertKind,
    width: int,
    degree: int,
    beside: Beside | None = None,
) -> Tensor:
    """The same, where some experts of every rank, with all their tokens, are a chunk: each product stays whole.

    Args:
        dispatcher: of the tokens.
        x_TD: tokens.
        routing: of them.
        weights: of all experts here.
        kind: of experts.
        width: experts of a rank that has its full share.
        degree: how many chunks, alike on all ranks.
        beside: what else is to be computed.

    Raises:
        UsageError: there are fewer experts than chunks.

    References:
        Qian et al., "EPS-MoE: Expert Pipeline Scheduler for Cost-Efficient MoE Inference", arXiv 2410.12247.
    """
    parts = parts_of_experts(width, degree)
    place_TK = routing.top_k_index % width
    slots_E = torch.arange(routing.num_experts, device=place_TK.device) % width
    flows = []
    for part, some in zip(parts, weights.split(parts), strict=True):
        outside_TK = (place_TK < part.start) | (place_TK >= part.stop)
        outside_E = (slots_E < part.start) | (slots_E >= part.stop)
        chunk = routing._replace(
            top_k_index=routing.top_k_index.masked_fill(outside_TK, routing.num_experts),
            top_k_weights=routing.top_k_weights.masked_fill(outside_TK, 0.0),
            tokens_per_expert=routing.tokens_per_expert.masked_fill(outside_E, 0),
            full=False,
        )
        flows.append(_chunk(dispatcher, x_TD, chunk, some, kind, part))
    return torch.stack(_with(flows, beside)).sum(dim=0)


def parts_of_experts(width: int, degree: int) -> list[range]:
    """``width`` experts of a rank in consecutive parts, none empty.

    Raises:
        UsageError: there are fewer experts than parts.
    """
    if not 1 <= degree <= width:
        raise UsageError(f"{width} experts a rank cannot be done in {degree} parts")
    bounds = [part * width // degree for part in range(degree + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]


def _chunk(
    dispatcher: TokenDispatcher,
    x_TD: Tensor,
    routing: RoutingResult,
    weights: _Weights,
    kind: ExpertKind,
    part: range | None = None,
) -> Steps[Tensor]:
    arrived = yield from dispatcher.dispatch_steps(x_TD, routing)
    counts_E = arrived.tokens_per_expert if part is None else arrived.tokens_per_expert[part.start : part.stop]
    rows_RD = expert_mlp(arrived.rows, counts_E, weights, kind)
    return (yield from dispatcher.combine_steps(rows_RD, arrived))
