"""Sequences token by token in one process, and layouts that nobody would choose."""

from __future__ import annotations

import random
from itertools import pairwise

import torch
from torch import Tensor

from mycel.planning.sequence import Layout, Segment

__all__ = ["decayed", "delta_ruled", "random_layout", "states_in"]


def random_layout(seed: int, num_ranks: int, *, most_documents: int = 4, longest: int = 12) -> Layout:
    """Documents of random lengths, none and one token among them, cut anywhere and dealt to ranks in any order."""
    chance = random.Random(seed)
    documents = [chance.choice([0, 1, chance.randint(2, longest)]) for _ in range(chance.randint(1, most_documents))]
    if not any(documents):
        documents.append(longest)
    held: list[list[Segment]] = [[] for _ in range(num_ranks)]
    for number, length in enumerate(documents):
        cuts = sorted({0, length, *(chance.randint(0, length) for _ in range(chance.randint(0, num_ranks + 1)))})
        for start, stop in pairwise(cuts):
            chance.choice(held).append(Segment(document=number, start=start, stop=stop))
        if chance.random() < 0.3:
            chance.choice(held).append(Segment(document=number, start=0, stop=0))
    for mine in held:
        chance.shuffle(mine)
    return Layout(documents=tuple(documents), ranks=tuple(map(tuple, held)))


def states_in(
    layout: Layout, transitions: dict[Segment, Tensor], updates: dict[Segment, Tensor]
) -> dict[Segment, Tensor]:
    """The state that comes into each segment with tokens."""
    found = {}
    for number in range(len(layout.documents)):
        segments = sorted(s for mine in layout.ranks for s in mine if s.document == number and len(s))
        state = torch.zeros_like(next(iter(updates.values())))
        for segment in segments:
            found[segment] = state
            m = transitions[segment]
            order = m.dim() - (state.dim() - 2)
            moved = m @ state if order == 2 else (m[..., None] if order == 1 else m[..., None, None]) * state
            state = moved + updates[segment]
    return found


def decayed(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """``S = e^g S + k v^T``, ``o = S^T q``, token by token over one document; ``g`` a number or one for each key."""
    state = k.new_zeros(*k.shape[:-2], k.shape[-1], v.shape[-1])
    rows = []
    for t in range(k.shape[-2]):
        decay = g[..., t].exp()[..., None, None] if g.dim() < k.dim() else g[..., t, :].exp()[..., None]
        state = state * decay + k[..., t, :, None] * v[..., t, None, :]
        rows.append((q[..., t, :, None] * state).sum(-2))
    return torch.stack(rows, -2) if rows else v * 0


def delta_ruled(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """``S = e^g S; S += k (beta (v - S^T k))^T``, ``o = S^T q``, token by token over one document."""
    state = k.new_zeros(*k.shape[:-2], k.shape[-1], v.shape[-1])
    rows = []
    for t in range(k.shape[-2]):
        decay = g[..., t].exp()[..., None, None] if g.dim() < k.dim() else g[..., t, :].exp()[..., None]
        state = state * decay
        error = v[..., t, :] - (k[..., t, :, None] * state).sum(-2)
        state = state + k[..., t, :, None] * (beta[..., t, None] * error)[..., None, :]
        rows.append((q[..., t, :, None] * state).sum(-2))
    return torch.stack(rows, -2) if rows else v * 0
