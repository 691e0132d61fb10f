"""Sums over the tokens of a batch, where ranks share its sequences those of all of them."""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.comm.sharing import shared_pass, sum_for_each
from mycel.moe.slots import RoutingResult

__all__ = ["num_sequences", "over_sequences", "over_tokens", "without_stand_ins"]


def over_tokens(routing: RoutingResult, *sums: Tensor) -> tuple[tuple[Tensor, ...], Tensor | int]:
    """Sums over tokens, and of how many tokens they are: at least 1.

    Where ranks share sequences, all get the sums over the tokens of all, in one exchange. A function of them is then
    that of one process, and has its gradient after gradients were averaged over the ranks.

    Args:
        routing: of the tokens here.
        sums: over the tokens here, of any shapes.

    Examples:
        >>> from mycel.moe import LinearProjection, TopKRouter
        >>> routing = TopKRouter(LinearProjection(4, 3), top_k=1)(torch.randn(5, 4))
        >>> (scores_E,), num_tokens = over_tokens(routing, routing.scores.sum(dim=0))
        >>> scores_E.shape, num_tokens
        (torch.Size([3]), 5)
    """
    shared, num_tokens = shared_pass(), routing.scores.shape[0]
    if shared is None:
        return sums, max(1, num_tokens)
    found = _together([*sums, routing.tokens_per_expert.new_tensor(num_tokens)], shared.averaged)
    return found[:-1], found[-1].clamp_min(1)


def num_sequences(sequence_T: Tensor | None, of_T: Tensor) -> int:
    """How many sequences there are, on all ranks that share them; 0 without tokens where nobody else is asked.

    Args:
        sequence_T: of each token the number of its sequence, as routers were told; ``None``: all are of one.
        of_T: the same, of zeros where there is one.
    """
    shared = shared_pass()
    if shared is None:
        if sequence_T is None:
            return min(1, of_T.shape[0])
        return int(of_T.max()) + 1 if of_T.shape[0] else 0
    most = torch.cat([of_T.new_zeros(1), of_T]).max().view(1)
    if shared.group is not None and sequence_T is not None:
        dist.all_reduce(most, dist.ReduceOp.MAX, group=shared.group)
    return int(most) + 1  # others may have tokens where this rank has none


def over_sequences(
    shares_SE: Tensor, counts_SE: Tensor, length_S: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Sums over the tokens of each sequence, and the weight of each sequence in the loss.

    Where ranks share sequences, all get the sums over the tokens of all. The mean over ranks of their losses then is
    the mean over all sequences, also where others share others, in unequal numbers.

    Args:
        shares_SE: of tokens here.
        counts_SE: slots that they use.
        length_S: how many they are, of each sequence that somebody in the group has tokens of.
    """
    shared = shared_pass()
    if shared is None:
        return (shares_SE, counts_SE, length_S), 1 / (length_S > 0).sum()
    shares_SE, counts_SE, length_S = _together([shares_SE, counts_SE, length_S], shared.group)
    size = 1 if shared.group is None else shared.group.size()
    there = (length_S > 0).sum().double() / size
    ranks = 1 if shared.averaged is None else shared.averaged.size()
    everywhere = sum_for_each(there, shared.averaged)
    return (shares_SE, counts_SE, length_S), (ranks / size / everywhere.clamp_min(1)).to(shares_SE.dtype)


def without_stand_ins(routing: RoutingResult) -> RoutingResult:
    """Of the tokens that are there: none, where a rank without any computes on a stand-in."""
    shared = shared_pass()
    if shared is None or shared.num_tokens:
        return routing
    slots = (routing.top_k_index[:0], routing.top_k_weights[:0], routing.router_logits[:0], routing.scores[:0])
    sequence = None if routing.sequence is None else routing.sequence[:0]
    return RoutingResult(*slots, torch.zeros_like(routing.tokens_per_expert), routing.full, sequence)


def _together(parts: list[Tensor], group: dist.ProcessGroup | None) -> tuple[Tensor, ...]:
    """Counts and sums in one exchange, in float64, which holds both."""
    flat = torch.cat([part.reshape(-1).double() for part in parts])
    summed = sum_for_each(flat, group).split_with_sizes([part.numel() for part in parts])
    return tuple(found.view(part.shape).to(part.dtype) for found, part in zip(summed, parts, strict=True))
