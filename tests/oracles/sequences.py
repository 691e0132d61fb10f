"""Sequences token by token in one process, and layouts that nobody would choose."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mycel.planning.sequence import Layout, Segment

__all__ = ["KEYS", "VALUES", "by_one", "decayed", "delta_ruled", "drawn", "nodes_for", "random_layout", "states_in"]

#: Of drawn states.
KEYS, VALUES = 3, 2


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


def nodes_for(size: int) -> tuple[tuple[int, ...], ...]:
    """Nodes of unlike sizes."""
    cut = max(1, size // 2)
    return tuple(n for n in (tuple(range(cut)), tuple(range(cut, size))) if n)


def drawn(layout: Layout, order: int, heads: int, seed: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Transitions, updates, and weights of a loss, for the segments of each rank."""
    chance = torch.Generator().manual_seed(seed)
    numbers = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=chance)  # noqa: E731
    transitions, updates, weights = [], [], []
    for mine in layout.ranks:
        m = numbers(len(mine), heads, *[KEYS] * order)
        transitions.append((m.sigmoid().log() * 30).exp() if order < 2 and seed % 2 else m)
        updates.append(numbers(len(mine), heads, KEYS, VALUES))
        weights.append(numbers(len(mine), heads, KEYS, VALUES))
    return transitions, updates, weights


def by_one(layout: Layout, transitions: list[Tensor], updates: list[Tensor], weights: list[Tensor]) -> list[Any]:
    """Of each rank the states and gradients that one process gets."""
    ms, us = ([x.clone().requires_grad_() for x in xs] for xs in (transitions, updates))
    held = [(r, n, s) for r, mine in enumerate(layout.ranks) for n, s in enumerate(mine) if len(s)]
    found = states_in(layout, {s: ms[r][n] for r, n, s in held}, {s: us[r][n] for r, n, s in held})
    states = [torch.zeros_like(u) for u in updates]
    loss = sum((found[s] * weights[r][n]).sum() for r, n, s in held)
    for r, n, s in held:
        states[r][n] = found[s].detach()
    if isinstance(loss, Tensor) and loss.requires_grad:
        loss.backward()
    grads = [[torch.zeros_like(x) if x.grad is None else x.grad for x in xs] for xs in (ms, us)]
    return list(zip(states, *grads, strict=True))
