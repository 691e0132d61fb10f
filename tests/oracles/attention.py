"""Attention of whole documents in one process: dense masked softmax."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mycel.planning.sequence import Layout, Mask, Segment
from mycel.sequence import SequenceContext, Way

__all__ = ["dense_attention", "expected", "got", "scattered", "tensors", "visible", "ways_over", "worst"]


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


def scattered(documents: tuple[int, ...], num_ranks: int, seed: int, *, leave_out: int = -1) -> Layout:
    """Pieces of any length on any rank in any order, empty ones among them."""
    choice = random.Random(seed)
    ranks: list[list[Segment]] = [[] for _ in range(num_ranks)]
    holders = [r for r in range(num_ranks) if r != leave_out] or [0]
    for document, length in enumerate(documents):
        cuts = sorted(choice.choices(range(length + 1), k=choice.randrange(5)))
        for start, stop in zip([0, *cuts], [*cuts, length], strict=True):
            ranks[choice.choice(holders)].append(Segment(document=document, start=start, stop=stop))
    for mine in ranks:
        choice.shuffle(mine)
    return Layout(documents=documents, ranks=tuple(map(tuple, ranks)))


def tensors(layout: Layout, form: tuple[int, int, int, int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, keys, values and the gradient of the output, of all tokens."""
    heads, key_heads, width, value_width = form
    torch.manual_seed(sum(form) + layout.num_tokens)
    shapes = ((heads, width), (key_heads, width), (key_heads, value_width), (heads, value_width))
    return [torch.randn(2, h, layout.num_tokens, d, dtype=torch.float64).to(dtype) for h, d in shapes]


def expected(layout: Layout, mask: Mask, whole: list[Tensor], scale: float) -> list[Tensor]:
    """The output and gradients of queries, keys and values, in float64."""
    leaves = [x.double().clone().requires_grad_() for x in whole[:3]]
    q, k, v = leaves
    out = dense_attention(q, k, v, visible(layout, mask), scale)
    return [out.detach(), *torch.autograd.grad(out, leaves, whole[3].double())]


def got(
    context: SequenceContext, whole: list[Tensor], call: Callable[..., Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a rank has of the same."""
    leaves = [context.shard(x, 2).requires_grad_() for x in whole[:3]]
    out = call(*leaves, context)
    out.backward(context.shard(whole[3], 2))
    return (out.detach(), *(x.grad for x in leaves))  # type: ignore[return-value]


def worst(context: SequenceContext, found: Any, right: list[Tensor]) -> float:
    """The greatest error of a rank."""
    errors = [(a.double() - context.shard(b, 2)).abs() for a, b in zip(found, right, strict=True)]
    return max(float(e.max()) if e.numel() else 0.0 for e in errors)


def ways_over(num_ranks: int, *, ulysses: bool = True) -> list[Any]:
    found: list[Any] = ["ring", "all_gather", "sliced", "needed", Way(between="needed", slices=5)]
    if ulysses:
        found.append("ulysses")
    if num_ranks == 4:
        groups = ((0, 2), (1, 3))
        found += [Way(between="needed", groups=groups, slices=3), Way(between="ring", groups=groups), "usp"]
    return found
