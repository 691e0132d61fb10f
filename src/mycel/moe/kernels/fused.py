"""Experts from tokens to tokens (or from rows to rows) as one node of the autograd graph.

With ``x_t`` a token, ``r = (t, k)`` one of its rows, ``w_r`` the row's weight, ``U_e`` and ``V_e`` the matrices of
its expert and ``f`` the activation::

    z_r = U_e x_t        a_r = f(z_r)        y_t = sum_k w_r V_e a_r

Saved for the backward pass are ``x`` and ``z``, nothing else that is as long as tokens or rows. From the gradient
``dy`` alone::

    g_r = V_e^T dy_t     dw_r = g_r . a_r    dz_r = w_r f'(z_r) g_r    dx_t = sum_k U_e^T dz_r
    dV_e = sum_r dy_t (w_r a_r)^T            dU_e = sum_r dz_r x_t^T

so that ``V_e a_r``, which the gradient of weights is usually taken from, need not be kept: ``dy_t . V_e a_r`` is
``g_r . a_r``. Nothing is added up by atomic operations: equal inputs give equal bits.

References:
    Guo et al., "SonicMoE", arXiv 2512.14080 (gradients of weights from activations);
    Tan et al., "Scattered Mixture-of-Experts Implementation", arXiv 2403.08245 (gathers inside grouped products).
"""

# ruff: noqa: N803  (the shape suffixes are capitals on purpose)
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, library

from mycel.moe.kernels import reference
from mycel.moe.kernels.choice import triton_runs, triton_takes
from mycel.moe.kernels.tiles import Tiles, choose_tiles

__all__ = ["ACTIVATIONS", "Sorted", "experts_of_rows", "experts_of_tokens", "sort_slots"]

#: Activations that the kernels know.
ACTIVATIONS = ("swiglu", "silu", "gelu", "relu")


class Sorted(NamedTuple):
    """Slots of tokens sorted by expert.

    Attributes:
        slot_of_row: flat slot (``token * K + k``) of each row; behind the used ones, anything.
        row_of_slot: shape ``[T, K]``; for empty slots, the number of rows or more.
        counts: rows of each expert.
        full: no slot is empty.
    """

    slot_of_row: Tensor
    row_of_slot: Tensor
    counts: Tensor
    full: bool


def sort_slots(index_TK: Tensor, num_experts: int, *, full: bool) -> Sorted:
    """By expert, tokens in their order within one. On a GPU in two kernels, without waiting for it.

    Args:
        index_TK: expert of each slot; ``num_experts``: empty.
        num_experts: that there are.
        full: no slot is empty.
    """
    slot_of_row, row_of_slot, counts = torch.ops.mycel.sort_slots(index_TK, num_experts, triton_runs(index_TK))
    return Sorted(slot_of_row, row_of_slot, counts, full)


def experts_of_tokens(
    x_TD: Tensor,
    order: Sorted,
    weights_TK: Tensor,
    up_EOI: Tensor,
    down_EDF: Tensor,
    activation: str,
) -> Tensor:
    """For each token the weighted sum of what its experts make of it, shape ``[T, D]``.

    Args:
        x_TD: tokens.
        order: of their slots.
        weights_TK: of slots.
        up_EOI: gates and ups ``[E, 2F, D]``, without gates ``[E, F, D]``, in the type of ``x``.
        down_EDF: the second matrices, in the type of ``x``.
        activation: one of ``ACTIVATIONS``.
    """
    return _apply(x_TD, up_EOI, down_EDF, weights_TK, order, activation)


def experts_of_rows(rows_RD: Tensor, counts_E: Tensor, up_EOI: Tensor, down_EDF: Tensor, activation: str) -> Tensor:
    """Every row through its expert, shape ``[R, D]``; rows after the last expert's are zeros.

    Args:
        rows_RD: sorted by expert.
        counts_E: rows of each.
        up_EOI: as in ``experts_of_tokens``.
        down_EDF: likewise.
        activation: likewise.
    """
    order = Sorted(counts_E.new_empty(0), counts_E.new_empty(0, 0), counts_E, True)
    return _apply(rows_RD, up_EOI, down_EDF, None, order, activation)


def _apply(x: Tensor, up: Tensor, down: Tensor, weights: Tensor | None, order: Sorted, activation: str) -> Tensor:
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, up, down, weights))
    y: Tensor = torch.ops.mycel.experts(x, up, down, weights, *order, activation, keep, triton_takes(x))[0]
    return y


# -- the operators: opaque to torch.compile, since numbers of rows are data -----------------------------------------


@library.custom_op("mycel::sort_slots", mutates_args=())
def _sort_slots(index: Tensor, num_experts: int, by_triton: bool) -> tuple[Tensor, Tensor, Tensor]:
    if not by_triton:
        return reference.place(index, num_experts)
    from mycel.moe.kernels import operations

    index = index.contiguous()
    slots = torch.empty(index.numel(), dtype=torch.int32, device=index.device)
    rows = torch.empty(index.shape, dtype=torch.int32, device=index.device)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=index.device)
    spans, counting = operations.count(index, num_experts)
    counting.run()
    operations.place(index, spans, slots, rows, counts).run()
    return slots, rows, counts


@_sort_slots.register_fake
def _(index: Tensor, num_experts: int, by_triton: bool) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.int32 if by_triton else torch.int64
    numbers = index.new_empty(index.shape, dtype=dtype)
    return numbers.flatten(), torch.empty_like(numbers), index.new_empty(num_experts, dtype=torch.int64)


@library.custom_op("mycel::experts", mutates_args=())
def _experts(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    weights: Tensor | None,
    slot_of_row: Tensor,
    row_of_slot: Tensor,
    counts: Tensor,
    full: bool,
    activation: str,
    keep: bool,
    by_triton: bool,
) -> tuple[Tensor, Tensor]:
    of_tokens = weights is not None
    order = slot_of_row if of_tokens else None
    slots = max(1, row_of_slot.shape[1])
    if not by_triton:
        z, a = reference.gate_up(x, order, slots, up, counts, activation)
        y = reference.rows_times(a, None, 0, down.transpose(1, 2), counts)
        y = reference.combine(y, row_of_slot, weights, full=full) if of_tokens else y
        return y, z if keep else z.new_empty(0, z.shape[1])
    from mycel.moe.kernels import operations

    x, up, down, num_rows, tiles = _prepared(x, up, down, order)
    z = x.new_empty(num_rows if keep else 0, up.shape[1])
    a = x.new_empty(num_rows, down.shape[2])
    rows = x.new_empty(num_rows, down.shape[1])
    plan, planning = operations.make_kernel_args(counts, num_rows, tiles.rows.m, tail=not of_tokens)
    planning.run()
    operations.gate_up(x, order, slots, up, z if keep else None, a, plan, activation, tiles.gate_up).run()
    operations.rows_times(a, None, 0, down.transpose(1, 2), rows, plan, tiles.rows).run()
    if weights is None:
        return rows, z
    y = torch.empty_like(x)
    operations.combine(rows, row_of_slot, weights.contiguous(), y).run()
    return y, z


@_experts.register_fake
def _(x: Tensor, up: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    weights, slot_of_row, keep = rest[1], rest[2], rest[7]
    rows = x.shape[0] if weights is None else slot_of_row.shape[0]
    return torch.empty_like(x), x.new_empty(rows if keep else 0, up.shape[1])


@library.custom_op("mycel::experts_backward", mutates_args=())
def _experts_backward(
    grad: Tensor,
    x: Tensor,
    z: Tensor,
    up: Tensor,
    down: Tensor,
    weights: Tensor | None,
    slot_of_row: Tensor,
    row_of_slot: Tensor,
    counts: Tensor,
    full: bool,
    activation: str,
    wanted: list[bool],
    by_triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of ``x``, both matrices and weights; empty ones in place of those not wanted."""
    of_tokens = weights is not None
    order = slot_of_row if of_tokens else None
    slots = max(1, row_of_slot.shape[1])
    of_x, of_up, of_down, of_weights = (x.new_empty(0) for _ in range(4))
    if not by_triton:
        of_a = reference.rows_times(grad, order, slots, down, counts)
        of_z, a, of_w = reference.activation_backward(of_a, z, order, weights, activation)
        if wanted[0]:
            of_x = reference.rows_times(of_z, None, 0, up, counts)
            of_x = reference.combine(of_x, row_of_slot, None, full=full) if of_tokens else of_x
        if wanted[1]:
            of_up = reference.outer(of_z, x, order, (0, slots if of_tokens else 0), counts)
        if wanted[2]:
            of_down = reference.outer(grad, a, order, (slots if of_tokens else 0, 0), counts)
        return of_x, of_up, of_down, of_weights if of_w is None else of_w
    from mycel.moe.kernels import operations

    x, up, down, num_rows, tiles = _prepared(x, up, down, order)
    of_a, a, of_z = (x.new_empty(num_rows, width) for width in (down.shape[2], down.shape[2], up.shape[1]))
    weights = None if weights is None else weights.contiguous()
    gather = slots if of_tokens else 0
    plan, planning = operations.make_kernel_args(counts, num_rows, tiles.rows.m, tail=not of_tokens)
    planning.run()
    operations.rows_times(grad, order, slots, down, of_a, plan, tiles.rows).run()
    of_weights = of_weights if weights is None else torch.zeros_like(weights)
    operations.activation_backward(of_a, z, order, weights, of_z, a, of_weights, plan, activation).run()
    del of_a
    if wanted[2]:
        of_down = torch.empty_like(down)
        operations.outer(grad, a, order, (gather, 0), of_down, plan, tiles.outer).run()
    if wanted[1]:
        of_up = torch.empty_like(up)
        operations.outer(of_z, x, order, (0, gather), of_up, plan, tiles.outer).run()
    if wanted[0]:
        of_x = rows = x.new_empty(num_rows, x.shape[1])
        operations.rows_times(of_z, None, 0, up, rows, plan, tiles.rows).run()
        if of_tokens:
            of_x = torch.empty_like(x)
            operations.combine(rows, row_of_slot, None, of_x).run()
    return of_x, of_up, of_down, of_weights


@_experts_backward.register_fake
def _(grad: Tensor, x: Tensor, z: Tensor, up: Tensor, down: Tensor, weights: Tensor | None, *rest: Any) -> Any:
    wanted = rest[5]
    likes = (x, up, down, x if weights is None else weights)
    return tuple(torch.empty_like(t) if w else x.new_empty(0) for t, w in zip(likes, wanted, strict=True))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, up, down, weights, slot_of_row, row_of_slot, counts, full, activation, _, by_triton = inputs
    z = output[1]
    ctx.mark_non_differentiable(z)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, z, up, down, weights, slot_of_row, row_of_slot, counts)
    ctx.options = (full, activation, by_triton)


def _backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    full, activation, by_triton = ctx.options
    wanted = list(ctx.needs_input_grad[:4])
    results = torch.ops.mycel.experts_backward(
        grad.contiguous(), *ctx.saved_tensors, full, activation, wanted, by_triton
    )
    return *(result if want else None for result, want in zip(results, wanted, strict=True)), *([None] * 7)


_experts.register_autograd(_backward, setup_context=_keep)


def _prepared(x: Tensor, up: Tensor, down: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor, Tensor, int, Tiles]:
    num_rows = x.shape[0] if order is None else order.shape[0]
    capability = None
    if x.is_cuda:
        major, minor = torch.cuda.get_device_capability(x.device)
        capability = 10 * major + minor
    return (
        x.contiguous(),
        up.contiguous(),
        down.contiguous(),
        num_rows,
        choose_tiles(capability, num_rows, up.shape[0]),
    )
