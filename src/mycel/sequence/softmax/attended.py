"""Attention by any way as one node of autograd, with or without a sink for each head.

A sink is a score that belongs to no key: it takes its share of every row's weight and gives nothing. So a row with
one is what attention gives, shrunk, and a log-sum-exp that counts it; with these two the backward pass of every block
of keys is as it was, on whichever rank, and the gradient of the sink needs no more than they do.

References:
    G. Xiao, Y. Tian, B. Chen, S. Han, M. Lewis, "Efficient Streaming Language Models with Attention Sinks", ICLR 2024
    (section 3.2); OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", arXiv 2508.10925 (section 2.2).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Carrier", "attended"]


class Carrier(Protocol):
    """How keys come to queries, and gradients back: what each way makes of a layout."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Output, in the type of rows, and log-sum-exp of whole rows."""

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of ``q``, ``k`` and ``v``, of the output's; ``out`` and ``lse`` are those of whole rows."""


def attended(q: Tensor, k: Tensor, v: Tensor, carrier: Carrier, sinks: Tensor | None = None) -> Tensor:
    """Attention of this rank's queries to all keys that they see.

    Args:
        q: shape (batch, heads, tokens here, width).
        k: shape (batch, key heads, tokens here, width).
        v: shape (batch, key heads, tokens here, value width).
        carrier: how.
        sinks: a score for each head, shape (heads,).
    """
    made: Tensor = _Attended.apply(q, k, v, sinks, carrier)  # type: ignore[no-untyped-call]
    return made


class _Attended(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, carrier: Carrier) -> Tensor:
        out, lse = carrier.forward(q, k, v)
        if sinks is not None:
            with_sink = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out, lse = out * (lse - with_sink).exp()[..., None], with_sink
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.carrier = carrier
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        gradients = ctx.carrier.backward(grad, q, k, v, out, lse)
        of_sinks = None if sinks is None else _of_sinks(grad, sinks, out, lse).to(sinks.dtype)
        return *gradients, of_sinks, None


def _of_sinks(grad: Tensor, sinks: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """What a sink's weight takes from the others: softmax's gradient for a value of zero."""
    weights = (sinks.to(lse.dtype)[:, None] - lse).exp()
    return -(weights * (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)).sum((0, 2))
