"""What each kernel computes, in plain torch: the fallback where Triton does not run, and what tests compare with.

Names are those of ``operations``; what the choice of experts computes is in ``mycel.moe.routers.top_k``. Rows of no
group (after the last one's) are zeros wherever a result has them.
"""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mycel.moe.kernels.grouped_gemm import grouped_linear, grouped_outer
from mycel.moe.slots import count_tokens

__all__ = [
    "activate",
    "activation_backward",
    "combine",
    "gate_up",
    "outer",
    "place",
    "rows_times",
    "spread",
]


def activate(z: Tensor, activation: str) -> Tensor:
    """An activation by name; ``swiglu`` halves the width."""
    if activation == "swiglu":
        gate, up = z.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)
    if activation == "relu":
        return functional.relu(z)
    return functional.gelu(z) if activation == "gelu" else functional.silu(z)


def gather(x: Tensor, slot_of_row: Tensor | None, slots: int) -> Tensor:
    """A copy of its token for each row; without slots, ``x`` itself."""
    return x if slot_of_row is None else x.index_select(0, slot_of_row // slots)


def gate_up(
    x: Tensor, slot_of_row: Tensor | None, slots: int, weight_EOI: Tensor, counts_E: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """``z = x W^T`` and its activation."""
    z = grouped_linear(gather(x, slot_of_row, slots), weight_EOI, counts_E)
    return z, activate(z, activation)


def rows_times(left: Tensor, slot_of_row: Tensor | None, slots: int, right_EIO: Tensor, counts_E: Tensor) -> Tensor:
    """``left B_e`` of each row."""
    return grouped_linear(gather(left, slot_of_row, slots), right_EIO.transpose(1, 2), counts_E)


def outer(
    left: Tensor, right: Tensor, slot_of_row: Tensor | None, slots: tuple[int, int], counts_E: Tensor
) -> Tensor:
    """``left^T right`` over each group's rows."""
    left_RI = gather(left, slot_of_row if slots[0] else None, slots[0])
    right_RO = gather(right, slot_of_row if slots[1] else None, slots[1])
    return grouped_outer(left_RI, right_RO, counts_E)


def combine(rows_RD: Tensor, row_of_slot_TK: Tensor, weights_TK: Tensor | None, *, full: bool) -> Tensor:
    """Weighted sums of a token's rows in float32 at least, one slot of all tokens at a time: no ``[T, K, D]``.

    Args:
        rows_RD: rows.
        row_of_slot_TK: of each slot; ``R`` and more: the slot is empty.
        weights_TK: of slots; ``None``: all 1.
        full: no slot is empty.
    """
    T, K = row_of_slot_TK.shape
    R, D = rows_RD.shape
    wide = torch.promote_types(rows_RD.dtype, torch.float32)
    if full and row_of_slot_TK.numel() and rows_RD.is_cpu:  # one pass over memory where the loop makes K
        weights_TK = None if weights_TK is None else weights_TK.to(wide)
        summed = functional.embedding_bag(row_of_slot_TK, rows_RD.to(wide), mode="sum", per_sample_weights=weights_TK)
        return summed.to(rows_RD.dtype)
    total_TD = torch.zeros(T, D, dtype=wide, device=rows_RD.device)
    if not full and R == 0:
        return total_TD.to(rows_RD.dtype)
    for k in range(K):
        rows_T = row_of_slot_TK[:, k]
        if full:
            part_TD = rows_RD.index_select(0, rows_T).to(wide)
        else:
            used_T1 = (rows_T < R).unsqueeze(1)
            part_TD = rows_RD.index_select(0, rows_T.clamp_max(R - 1)).to(wide)
            part_TD = part_TD.masked_fill(~used_T1, 0.0)
        if weights_TK is None:
            total_TD += part_TD
        else:
            total_TD = total_TD.addcmul_(part_TD, weights_TK[:, k : k + 1].to(wide))
    return total_TD.to(rows_RD.dtype)


def spread(
    grads_TD: Tensor, slot_of_row: Tensor, weights_TK: Tensor | None, rows_RD: Tensor | None, slots: int
) -> tuple[Tensor, Tensor | None]:
    """The transpose of ``combine``: gradients of rows, and of weights where there are any."""
    grads_RD = gather(grads_TD, slot_of_row, max(1, slots))
    if weights_TK is None or rows_RD is None:
        return grads_RD, None
    wide = torch.promote_types(rows_RD.dtype, torch.float32)
    dots_R = torch.einsum("rd,rd->r", rows_RD.to(wide), grads_RD.to(wide)).to(weights_TK.dtype)
    of_weights = weights_TK.new_zeros(weights_TK.numel()).index_copy_(0, slot_of_row, dots_R)
    weights_R = weights_TK.reshape(-1).index_select(0, slot_of_row)
    return grads_RD.mul_(weights_R.unsqueeze(1)), of_weights.view(weights_TK.shape)


def activation_backward(
    of_a: Tensor, z: Tensor, slot_of_row: Tensor | None, weights_TK: Tensor | None, activation: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradient of ``z``, activations times weights, gradient of weights.

    Args:
        of_a: gradients of activations before weights; overwritten.
        z: what was activated.
        slot_of_row: where a row's weight is.
        weights_TK: of slots; ``None``: all 1.
        activation: by name.
    """
    a = activate(z, activation)
    of_weights = None
    if weights_TK is not None and slot_of_row is not None:
        wide = torch.promote_types(a.dtype, torch.float32)
        dots_R = torch.einsum("rf,rf->r", of_a.to(wide), a.to(wide)).to(weights_TK.dtype)
        of_weights = weights_TK.new_zeros(weights_TK.numel()).index_copy_(0, slot_of_row, dots_R)
        of_weights = of_weights.view(weights_TK.shape)
        factor_R1 = weights_TK.reshape(-1).index_select(0, slot_of_row).unsqueeze(1)
        of_a, a = of_a.mul_(factor_R1), a.mul_(factor_R1)  # in place: in the wider of two types, rounded once
    if activation != "swiglu":
        return _plain_backward(of_a, z, activation), a, of_weights
    gate, up = z.chunk(2, dim=-1)
    of_z = torch.empty_like(z)
    of_gate, of_up = of_z.chunk(2, dim=-1)
    torch.mul(of_a, functional.silu(gate), out=of_up)
    torch.ops.aten.silu_backward.grad_input(of_a * up, gate, grad_input=of_gate)
    return of_z, a, of_weights


def _plain_backward(of_a: Tensor, z: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        of_z: Tensor = torch.ops.aten.threshold_backward(of_a, z, 0)
    else:
        of_z = getattr(torch.ops.aten, f"{activation}_backward")(of_a, z)
    return of_z


def place(index_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots sorted by expert, the row of each slot (``T K`` for empty ones), and counts of experts."""
    flat = index_TK.reshape(-1)
    order = flat.argsort(stable=True)
    row_of_slot = torch.empty_like(order)
    row_of_slot[order] = torch.arange(order.numel(), device=order.device)
    row_of_slot = row_of_slot.masked_fill(flat >= num_experts, flat.numel())
    return order, row_of_slot.view(index_TK.shape), count_tokens(index_TK, num_experts)
