"""Attention of one block with the log-sum-exp of its rows, and its gradients from those of whole rows.

With the output and the log-sum-exp of a WHOLE row, the backward pass of a kernel gives the gradients that one block
of its keys has in it: the softmax of block ``j`` is ``exp(s_ij - lse_i)``, and the rest needs only ``sum(dO_i O_i)``.

On the CPU, and on a GPU in half precision, the kernels are torch's own; in plain torch stands what they are to equal,
which serves everything else.

References:
    T. Dao, D. Fu, S. Ermon, A. Rudra, C. Re, "FlashAttention: Fast and Memory-Efficient Exact Attention with
    IO-Awareness", NeurIPS 2022 (Algorithms 1 and 4).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["Seen", "attend", "attend_back", "plain_attend", "plain_attend_back", "row_type"]

#: Which keys are seen: all (``None``), of a square those up to the query's own (``True``), or as booleans of shape
#: (queries, keys) say.
Seen = Tensor | bool | None

_CPU_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_aten = torch.ops.aten


def row_type(dtype: torch.dtype) -> torch.dtype:
    """In which type rows of a type are added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Seen = None) -> tuple[Tensor, Tensor]:
    """Attention of some queries to some keys.

    Args:
        q: shape (batch, heads, queries, width).
        k: shape (batch, key heads, keys, width); key heads divide heads.
        v: shape (batch, key heads, keys, value width).
        scale: of the products.
        seen: which keys are.

    Returns:
        Output of shape (batch, heads, queries, value width); log-sum-exp of shape (batch, heads, queries), float32
        or better. A query that sees no key has 0 and -inf.
    """
    if not (q.numel() and k.numel()):
        return _nothing(q, v)
    if q.device.type == "cpu" and q.dtype in _CPU_TYPES:
        (q_, k_, v_), bias = _alike(q, k, v), _bias(seen, q)
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q_, k_, v_, 0.0, seen is True, attn_mask=bias, scale=scale
        )
        if isinstance(seen, Tensor):
            lse = lse.masked_fill(~seen.any(1), -torch.inf)  # the kernel says 0 of a row that sees nothing
        return out[..., : v.shape[-1]], lse
    if _is_flash(q, seen):
        (q_, k_, v_), group = _alike(q, k, v), q.shape[1] // k.shape[1]
        k_, v_ = k_.repeat_interleave(group, 1), v_.repeat_interleave(group, 1)
        out, lse = _aten._scaled_dot_product_flash_attention(q_, k_, v_, 0.0, seen is True, False, scale=scale)[:2]
        return out[..., : v.shape[-1]], lse
    return plain_attend(q, k, v, scale, seen)


def attend_back(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, seen: Seen = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients that a block of keys has in whole rows, and the block's own.

    Args:
        grad: of the output of whole rows.
        q, k, v, scale, seen: as for ``attend``.
        out, lse: of whole rows: of all keys that the queries see, on whichever rank.

    Returns:
        Gradients of ``q`` (what this block adds to it), ``k`` and ``v``.
    """
    if not (q.numel() and k.numel()):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    width = max(q.shape[-1], v.shape[-1])
    if q.device.type == "cpu" and q.dtype in _CPU_TYPES:
        (q_, k_, v_), bias = _alike(q, k, v), _bias(seen, q)
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _wide(grad, width), q_, k_, v_, _wide(out, width), lse, 0.0, seen is True, attn_mask=bias, scale=scale
        )
        return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]
    if _is_flash(q, seen):
        (q_, k_, v_), group = _alike(q, k, v), q.shape[1] // k.shape[1]
        k_, v_ = k_.repeat_interleave(group, 1), v_.repeat_interleave(group, 1)
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, of which there is none
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            *(_wide(grad, width).contiguous(), q_, k_, v_, _wide(out, width).contiguous(), lse.contiguous()),
            *(None, None, q.shape[2], k.shape[2], 0.0, seen is True, seed, seed[:0]),
            scale=scale,
        )
        dk, dv = _grouped(dk, k.shape[1]).sum(2), _grouped(dv, k.shape[1]).sum(2)
        return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]
    return plain_attend_back(grad, q, k, v, out, lse, scale, seen)


def plain_attend(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Seen = None) -> tuple[Tensor, Tensor]:
    """``attend``, of matrix products and exponentials."""
    if not (q.numel() and k.numel()):
        return _nothing(q, v)
    rows = row_type(q.dtype)
    scores = _scores(q, k, scale, seen)
    lse = scores.logsumexp(-1)
    weights = (scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None]).exp()
    out = torch.einsum("bhgqk,bhkd->bhgqd", weights, v.to(rows))
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def plain_attend_back(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, seen: Seen = None
) -> tuple[Tensor, Tensor, Tensor]:
    """``attend_back``, of matrix products and exponentials."""
    if not (q.numel() and k.numel()):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    rows = row_type(q.dtype)
    grad_, q_, out_ = (_grouped(x.to(rows), k.shape[1]) for x in (grad, q, out))
    k_, v_ = k.to(rows), v.to(rows)
    weights = (_scores(q, k, scale, seen) - _grouped(lse.to(rows), k.shape[1])[..., None]).exp()
    dv = torch.einsum("bhgqk,bhgqd->bhkd", weights, grad_)
    products = torch.einsum("bhgqd,bhkd->bhgqk", grad_, v_) - (grad_ * out_).sum(-1, keepdim=True)
    dscores = weights * products * scale
    dq = torch.einsum("bhgqk,bhkd->bhgqd", dscores, k_).flatten(1, 2)
    dk = torch.einsum("bhgqk,bhgqd->bhkd", dscores, q_)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _scores(q: Tensor, k: Tensor, scale: float, seen: Seen) -> Tensor:
    rows = row_type(q.dtype)
    grouped = _grouped(q.to(rows), k.shape[1])
    scores = torch.einsum("bhgqd,bhkd->bhgqk", grouped, k.to(rows)) * scale
    if seen is True:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill(~seen, -torch.inf) if isinstance(seen, Tensor) else scores


def _grouped(x: Tensor, key_heads: int) -> Tensor:
    """Heads by the key head that serves them."""
    return x.reshape(x.shape[0], key_heads, x.shape[1] // key_heads, *x.shape[2:])


def _nothing(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Of queries that see no key."""
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    return out, q.new_full(q.shape[:3], -torch.inf, dtype=row_type(q.dtype))


def _is_flash(q: Tensor, seen: Seen) -> bool:
    """Whether a GPU's flash kernel takes it: half precision, no mask of its own."""
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    return q.device.type == "cuda" and is_half and not isinstance(seen, Tensor) and q.shape[-1] % 8 == 0


def _alike(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All as wide as the widest: zeros change no product, and give columns of zeros in the output."""
    width = max(q.shape[-1], v.shape[-1])
    return _wide(q, width), _wide(k, width), _wide(v, width)


def _wide(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))


def _bias(seen: Seen, q: Tensor) -> Tensor | None:
    """What the CPU's kernel adds to scores, in the queries' type."""
    if not isinstance(seen, Tensor):
        return None
    return q.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)
