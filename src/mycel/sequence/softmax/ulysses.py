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
    context, places = share.context, range(len(share.inside))
    empty = q.new_zeros(0)
    parts, gets = [empty] * context.num_ranks, [0] * context.num_ranks
    own = share.inside.index(context.rank)
    numbers = [_per_token(q, k, v, share, place) for place in places]
    for place, rank in enumerate(share.inside):
        # What a token has: queries of some heads, then keys, then values of theirs.
        mine = torch.cat(
            [x.permute(2, 0, 1, 3).flatten(1) for x in (q[:, share.queries(place)], *_served(k, v, share, place))], 1
        )
        parts[rank] = mine.reshape(-1)
        gets[rank] = share.tokens[place] * numbers[own]
    arrived = context.exchange_with_gradient(parts, gets, "heads")
    rows = torch.cat([arrived[rank] for rank in share.inside]).view(sum(share.tokens), numbers[own])
    batch, width, value_width = q.shape[0], q.shape[-1], v.shape[-1]
    num_queries, keys = share.heads // len(share.inside), share.keys(own)
    num_keys = keys.stop - keys.start
    sizes = [batch * num_queries * width, batch * num_keys * width, batch * num_keys * value_width]
    q_, k_, v_ = (
        x.view(-1, batch, heads, d).permute(1, 2, 0, 3)
        for x, heads, d in zip(
            rows.split_with_sizes(sizes, 1),
            (num_queries, num_keys, num_keys),
            (width, width, value_width),
            strict=True,
        )
    )
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
    rows = out.permute(2, 0, 1, 3)
    here = context.num_tokens
    for part, rank in zip(rows.split_with_sizes(share.tokens), share.inside, strict=True):
        parts[rank] = part.reshape(-1)
        gets[rank] = here * rows[:1].numel() if len(rows) else 0
    arrived = context.exchange_with_gradient(parts, gets, "heads.back")
    whole = [arrived[rank].view(here, out.shape[0], out.shape[1], out.shape[3]) for rank in share.inside]
    return torch.cat(whole, 2).permute(1, 2, 0, 3)


def _served(k: Tensor, v: Tensor, share: Heads, place: int) -> tuple[Tensor, Tensor]:
    keys = share.keys(place)
    return k[:, keys], v[:, keys]


def _per_token(q: Tensor, k: Tensor, v: Tensor, share: Heads, place: int) -> int:
    """Numbers that a token has for a place."""
    keys = share.keys(place)
    each: int = share.heads // len(share.inside) * q.shape[-1] + (keys.stop - keys.start) * (
        k.shape[-1] + v.shape[-1]
    )
    return int(q.shape[0]) * each
