"""Tokens of all ranks and a share of the heads, instead of all heads and a share of the tokens: two exchanges.

Inside some ranks only (a node's, say), what comes of it is a layout of its own, whose ranks are these nodes: between
them, attention goes any other way.

Where there are fewer key heads than ranks, a head goes to every rank whose queries it serves, and its gradients are
added up at home.

References:
    S. Jacobs, M. Tanaka, C. Zhang, M. Zhang, S. Song, S. Rajbhandari, Y. He, "DeepSpeed Ulysses: System Optimizations
    for Enabling Training of Extreme Long Sequence Transformer Models", arXiv 2309.14509;
    J. Fang, S. Zhao, "USP: A Unified Sequence Parallelism Approach for Long Context Generative AI", arXiv 2405.07719.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mycel.sequence.context import SequenceContext

__all__ = ["Heads", "gather_tokens", "scatter_tokens"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Heads:
    """Which rank has which heads, inside a set of ranks that exchange them.

    Attributes:
        context: the ranks.
        inside: ranks of the context that exchange heads, this one among them; the heads are shared out in this order.
        heads: of queries; so many ranks divide them.
        key_heads: of keys; they divide ``heads``.
    """

    context: SequenceContext
    inside: Sequence[int]
    heads: int
    key_heads: int

    @property
    def tokens(self) -> list[int]:
        """Of each rank inside."""
        return [self.context.layout.tokens[rank] for rank in self.inside]

    def queries(self, place: int) -> slice:
        """Heads of queries that a place has."""
        each = self.heads // len(self.inside)
        return slice(each * place, each * (place + 1))

    def keys(self, place: int) -> slice:
        """Key heads that serve these."""
        group, mine = self.heads // self.key_heads, self.queries(place)
        return slice(mine.start // group, -(-mine.stop // group))


def gather_tokens(q: Tensor, k: Tensor, v: Tensor, share: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens of the ranks inside, of the heads that this rank has there.

    Args:
        q: shape (batch, heads, tokens here, width).
        k, v: shape (batch, key heads, tokens here, width), of the values' width.
        share: of the heads.

    Returns:
        The same with tokens of the ranks inside one after the other, and fewer heads. Where a place's query heads do
        not share key heads evenly, there is a key head for each query head.
    """
    context = share.context
    parts, gets = [q.new_zeros(0)] * context.num_ranks, [0] * context.num_ranks
    own = share.inside.index(context.rank)
    batch, keys = q.shape[0], share.keys(own)
    num_keys = keys.stop - keys.start
    # Heads and width of what comes.
    forms = [(share.heads // len(share.inside), q.shape[-1]), (num_keys, k.shape[-1]), (num_keys, v.shape[-1])]
    for rank, tokens, pieces in zip(share.inside, share.tokens, _divided(q, k, v, share), strict=True):
        # Head by head, so that tokens lie together before and after.
        parts[rank] = torch.cat([piece.reshape(-1) for piece in pieces])
        gets[rank] = tokens * batch * sum(heads * width for heads, width in forms)
    arrived = context.exchange_with_gradient(parts, gets, "heads")
    came: tuple[list[Tensor], ...] = ([], [], [])
    for rank, tokens in zip(share.inside, share.tokens, strict=True):
        flat = arrived[rank].split_with_sizes([batch * heads * tokens * width for heads, width in forms])
        for kind, piece, (heads, width) in zip(came, flat, forms, strict=True):
            kind.append(piece.view(batch, heads, tokens, width))
    q_, k_, v_ = (torch.cat(kind, 2) for kind in came)
    group, heads_here = share.heads // share.key_heads, share.queries(own)
    if num_keys > 1 and (heads_here.start % group or heads_here.stop % group):
        place_of = torch.arange(heads_here.start, heads_here.stop, device=q.device) // group - keys.start
        k_, v_ = k_.index_select(1, place_of), v_.index_select(1, place_of)
    return q_, k_, v_


def scatter_tokens(out: Tensor, share: Heads) -> Tensor:
    """All heads of the tokens here, of some heads of the tokens of all ranks inside.

    Args:
        out: shape (batch, heads of this place, tokens inside, value width).
        share: of the heads.
    """
    context = share.context
    parts, gets = [out.new_zeros(0)] * context.num_ranks, [0] * context.num_ranks
    batch, heads, _, width = out.shape
    for part, rank in zip(out.split_with_sizes(share.tokens, 2), share.inside, strict=True):
        parts[rank] = part.reshape(-1)
        gets[rank] = context.num_tokens * batch * heads * width
    arrived = context.exchange_with_gradient(parts, gets, "heads.back")
    return torch.cat([arrived[rank].view(batch, heads, context.num_tokens, width) for rank in share.inside], 1)


def _divided(q: Tensor, k: Tensor, v: Tensor, share: Heads) -> list[tuple[Tensor, ...]]:
    """For each place its heads of queries, keys and values.

    Each is divided by one operator: backward, a slice of its own would fill a whole tensor for every place.
    """
    places = range(len(share.inside))
    served = [range(share.key_heads)[share.keys(place)] for place in places]
    if (chosen := [head for heads in served for head in heads]) != [*range(share.key_heads)]:
        at = torch.tensor(chosen, device=k.device)
        k, v = k.index_select(1, at), v.index_select(1, at)
    each, counts = [share.heads // len(share.inside)] * len(share.inside), [len(heads) for heads in served]
    divided = (q.split_with_sizes(each, 1), k.split_with_sizes(counts, 1), v.split_with_sizes(counts, 1))
    return list(zip(*divided, strict=True))
