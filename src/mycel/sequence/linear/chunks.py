"""One chunk of linear attention as an affine map of the state that comes in, whatever the rule of its tokens is.

With ``S`` the state before a chunk, what the chunk gives is ``O = o + Q S``, and ``M S + U`` is the state after it.
``M`` and ``U`` are needed before anything can travel, ``o`` and ``Q`` only afterwards. ``G`` are sums of log decays
from the beginning of the chunk; powers are taken of ``G_i - G_j`` with ``i >= j`` only, which are at most 1, so that
no decay is too strong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Chunked", "decay_chunks", "delta_chunks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunked:
    """Chunks as maps.

    Attributes:
        transition: ``M``, of shape (batch, heads, chunks), with keys once or twice more.
        update: ``U``, of shape (batch, heads, chunks, keys, values).
        outputs: gives, of the states before the chunks (..., keys, values), ``O`` (batch, heads, chunks, chunk,
            values) and ``Q`` (..., chunk, keys).
    """

    transition: Tensor
    update: Tensor
    outputs: Callable[[Tensor], tuple[Tensor, Tensor]]


class _Powers:
    """Powers of sums of log decays, ``g`` of shape (..., chunk), or (..., chunk, keys) where ``by_key``.

    Sums between two tokens are taken for each pair: differences of sums from the beginning would lose weak decays
    beside strong ones.

    Attributes:
        between: of the decays of tokens ``j + 1`` to ``i``, of shape (..., i, j, [keys]); 0 for ``i < j``.
        until: of those up to and with each token, (..., chunk, 1 or keys).
        after: of those after each token, likewise.
        whole: of all, (...) or (..., keys).
    """

    def __init__(self, g: Tensor, *, by_key: bool) -> None:
        self.by_key = by_key
        axis = -2 if by_key else -1
        rows = torch.arange(g.shape[axis], device=g.device)
        is_later, is_before = rows[:, None] > rows, rows[:, None] < rows
        if by_key:
            is_later, is_before = is_later[..., None], is_before[..., None]
        sums = torch.where(is_later, g.unsqueeze(axis), 0.0)
        self.between = sums.cumsum(axis - 1).masked_fill(is_before, -torch.inf).exp()
        until = g.cumsum(axis).exp()
        self.whole = until.select(axis, -1)
        after = self.between.select(axis - 1, -1)
        self.until, self.after = (until, after) if by_key else (until[..., None], after[..., None])

    def products(self, a: Tensor, b: Tensor) -> Tensor:
        """``a_i . b_j`` with what decays in between: shape (..., i, j)."""
        if self.by_key:
            return torch.einsum("...id,...ijd,...jd->...ij", a, self.between, b)
        return (a @ b.mT) * self.between


def decay_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Chunked:
    """The rule ``S = e^g S + k v^T``.

    Args:
        q, k: of shape (batch, heads, chunks, chunk, keys).
        v: of shape (..., chunk, values).
        g: log decays, of shape (..., chunk), or (..., chunk, keys).

    References:
        Sun et al., "Linear Attention Sequence Parallelism", arXiv 2404.02882 (constant decays); Yang et al., "Gated
        Linear Attention Transformers", ICML 2024 (one for each key); Dao, Gu, "Transformers are SSMs", ICML 2024
        (one for each token).
    """
    powers = _Powers(g, by_key=g.dim() == k.dim())

    def outputs(states: Tensor) -> tuple[Tensor, Tensor]:
        queries = q * powers.until
        return powers.products(q, k) @ v + queries @ states, queries

    return Chunked(transition=powers.whole, update=(k * powers.after).mT @ v, outputs=outputs)


def delta_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Chunked:
    """The rule ``S = e^g S``, then ``S = S + k (beta (v - S^T k))^T``.

    The errors ``u`` of a chunk's tokens solve a triangular system, ``(1 + beta A) u = beta (V - K S)``.

    Args:
        q, k: of shape (batch, heads, chunks, chunk, keys).
        v: of shape (..., chunk, values).
        g: log decays, of shape (..., chunk), or (..., chunk, keys).
        beta: of shape (..., chunk).

    References:
        Yang, Kautz, Hatamizadeh, "Gated Delta Networks", ICLR 2025, section 3.3 (the WY form of a chunk); Kimi Team,
        "Kimi Linear", arXiv 2510.26692 (decays for each key).
    """
    powers = _Powers(g, by_key=g.dim() == k.dim())
    system = (beta[..., None] * powers.products(k, k)).tril(-1)
    sides = beta[..., None] * torch.cat([v, k * powers.until], -1)
    # The diagonal is taken to be 1.
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    values, of_state = solved.split_with_sizes([v.shape[-1], k.shape[-1]], -1)
    left = (k * powers.after).mT
    kept = powers.whole if powers.by_key else powers.whole[..., None].expand(*k.shape[:-2], k.shape[-1])

    def outputs(states: Tensor) -> tuple[Tensor, Tensor]:
        seen = powers.products(q, k)
        queries = q * powers.until - seen @ of_state
        return seen @ values + queries @ states, queries

    return Chunked(transition=torch.diag_embed(kept) - left @ of_state, update=left @ values, outputs=outputs)
