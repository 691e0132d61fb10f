"""Attention of whole documents in one process: dense masked softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from mycel.planning.sequence import Layout, Mask

__all__ = ["dense_attention", "visible"]


def visible(layout: Layout, mask: Mask) -> Tensor:
    """Which tokens of a batch, documents in order, see which, booleans of shape (tokens, tokens)."""
    document = torch.cat([torch.full((n,), i) for i, n in enumerate(layout.documents)])
    at = torch.cat([torch.arange(n) for n in layout.documents])
    same = document[:, None] == document
    query, key = at[:, None], at
    rules = {
        "full": key >= 0,
        "causal": key <= query,
        "window": (key <= query) & (key > query - (mask.width or 0)),
        "chunked": (key <= query) & (key // (mask.width or 1) == query // (mask.width or 1)),
    }
    return same & rules[mask.kind]


def dense_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Shapes as ``mycel.sequence.attention`` has them, of all tokens."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v
