"""Rows of attention put together of blocks that come one after the other, and their gradients taken apart again."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mycel.planning.sequence import Mask
from mycel.sequence.softmax.blocks import Block
from mycel.sequence.softmax.kernels import Seen, attend, attend_back, row_type

__all__ = ["BackRows", "Rows", "merge"]


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Attention to two sets of keys, of attention to each; where the first is, both are in the end.

    Args:
        out, other: outputs, shape (..., width).
        lse, other_lse: log-sum-exps, shape (...); -inf where nothing was seen.

    References:
        H. Liu, M. Zaharia, P. Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", ICLR
        2024 (section 3).
    """
    both = torch.logaddexp(lse, other_lse)
    base = torch.where(both == -torch.inf, 0.0, both)  # of a row that saw nothing both shares are 0, not 0 / 0
    out.mul_((lse - base).exp()[..., None]).addcmul_(other, (other_lse - base).exp()[..., None])
    lse.copy_(both)


class Rows:
    """Output and log-sum-exp of some queries, over the keys that they have met.

    Args:
        q: shape (batch, heads, queries, width).
        value_width: of the values.
        scale: of products.
        mask: which keys each query sees inside its document.
    """

    def __init__(self, q: Tensor, value_width: int, scale: float, mask: Mask) -> None:
        self.q, self.scale, self.mask = q, scale, mask
        rows = row_type(q.dtype)
        self.out = q.new_zeros(*q.shape[:3], value_width, dtype=rows)
        self.lse = q.new_full(q.shape[:3], -torch.inf, dtype=rows)

    def meet(self, k: Tensor, v: Tensor, blocks: Iterable[Block], heads: slice = slice(None)) -> None:
        """Add what queries see of keys that one rank holds.

        Args:
            k: shape (batch, key heads, keys, width).
            v: shape (batch, key heads, keys, value width).
            blocks: in which they meet.
            heads: of the queries, those of these key heads.
        """
        for block in blocks:
            rows, keys = _places(block)
            part, lse = attend(self.q[:, heads, rows], k[:, :, keys], v[:, :, keys], self.scale, _seen(block, self))
            merge(self.out[:, heads, rows], self.lse[:, heads, rows], part, lse)


class BackRows:
    """The gradient of some queries, over the keys that they have met again.

    Args:
        grad: of the output.
        q, out, lse, scale, mask: of the forward pass; ``out`` and ``lse`` of whole rows.

    Attributes:
        dq: as far as they have.
    """

    def __init__(self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, scale: float, mask: Mask) -> None:
        self.grad, self.q, self.out, self.lse, self.scale, self.mask = grad, q, out, lse, scale, mask
        self.dq = torch.zeros_like(q, dtype=row_type(q.dtype))

    def meet(
        self, k: Tensor, v: Tensor, blocks: Iterable[Block], heads: slice = slice(None)
    ) -> tuple[Tensor, Tensor]:
        """Gradients of keys and values that one rank holds, from these queries; the queries' own are added to ``dq``.

        Args:
            k, v, blocks, heads: as for ``Rows.meet``.
        """
        rows_in = row_type(k.dtype)
        dk, dv = torch.zeros_like(k, dtype=rows_in), torch.zeros_like(v, dtype=rows_in)
        for block in blocks:
            rows, keys = _places(block)
            at = (slice(None), heads, rows)
            of_q, of_k, of_v = attend_back(
                self.grad[at],
                self.q[at],
                k[:, :, keys],
                v[:, :, keys],
                self.out[at],
                self.lse[at],
                self.scale,
                _seen(block, self),
            )
            # An index and += would copy what was added once more.
            self.dq[at].add_(of_q)
            dk[:, :, keys].add_(of_k)
            dv[:, :, keys].add_(of_v)
        return dk, dv


def _places(block: Block) -> tuple[slice, slice]:
    return slice(block.query, block.query + block.num_queries), slice(block.key, block.key + block.num_keys)


def _seen(block: Block, of: Rows | BackRows) -> Seen:
    if block.sees == "some":
        return block.visible(of.mask, of.q.device)
    return block.sees == "triangle" or None
