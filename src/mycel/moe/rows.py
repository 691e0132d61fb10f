"""Between tokens and rows: one row for each used slot, in the order of experts, and back.

Both directions are written as gathers, forward and backward: no atomic additions, the same result every time.
"""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mycel.moe.kernels import sums

__all__ = ["SlotOrder", "combine_rows", "gather_rows", "order_slots", "permute_rows", "traceable"]


class SlotOrder(NamedTuple):
    """The slots of ``T`` tokens sorted by where they go.

    Attributes:
        slot_of_row: flat slot (``token * K + k``) of each row, shape ``[R]``.
        row_of_slot: shape ``[T, K]``; ``R`` and more for slots that are empty.
        full: no slot is empty.
    """

    slot_of_row: Tensor
    row_of_slot: Tensor
    full: bool


def order_slots(index_TK: Tensor, num_rows: int | None) -> SlotOrder:
    """Sort slots by index, tokens in their order within one.

    Args:
        index_TK: where each slot goes; empty slots have the largest index.
        num_rows: used slots; ``None``: all of them.
    """
    T, K = index_TK.shape
    order = index_TK.reshape(-1).argsort(stable=True)
    row_of_slot = torch.empty_like(order)
    row_of_slot[order] = torch.arange(T * K, device=order.device)
    full = num_rows is None or num_rows == T * K
    return SlotOrder(order if full else order[:num_rows], row_of_slot.view(T, K), full)


def gather_rows(x_TD: Tensor, order: SlotOrder) -> Tensor:
    """A copy of its token for every row, shape ``[R, D]``."""
    rows: Tensor = _Gather.apply(x_TD, order.slot_of_row, order.row_of_slot, order.full)  # type: ignore[no-untyped-call]
    return rows


def combine_rows(rows_RD: Tensor, weights_TK: Tensor | None, order: SlotOrder) -> Tensor:
    """For every token the weighted sum of its rows, added up in float32 at least, shape ``[T, D]``.

    Args:
        rows_RD: in the order's order.
        weights_TK: of slots; ``None``: all 1.
        order: of slots.
    """
    summed: Tensor = _Combine.apply(rows_RD, weights_TK, order.slot_of_row, order.row_of_slot, order.full)  # type: ignore[no-untyped-call]
    return summed


def permute_rows(rows_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
    """``rows[order]``, whose gradient is ``gradient[inverse]``: a gather where indexing would add up."""
    permuted: Tensor = _Permute.apply(rows_RD, order_R, inverse_R)  # type: ignore[no-untyped-call]
    return permuted


def traceable(result: Tensor) -> Tensor:
    """What the ``forward`` of an autograd function returns, in a form that ``torch.compile`` traces right.

    Torch 2.11 silently loses the gradient (it becomes zero) where ``forward`` returns what an operation in place gave
    back, or a ``to`` that had nothing to do. A view of it is traced right by every release.
    """
    return result.view_as(result) if torch.compiler.is_compiling() else result


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(x_TD: Tensor, slot_of_row: Tensor, row_of_slot: Tensor, full: bool) -> Tensor:
        return x_TD.index_select(0, slot_of_row // max(1, row_of_slot.shape[1]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])
        ctx.full = inputs[3]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (row_of_slot,) = ctx.saved_tensors
        return sums.combine(grads[0], row_of_slot, None, full=ctx.full), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        rows_RD: Tensor, weights_TK: Tensor | None, slot_of_row: Tensor, row_of_slot: Tensor, full: bool
    ) -> Tensor:
        return traceable(sums.combine(rows_RD, row_of_slot, weights_TK, full=full))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        rows_RD, weights_TK, slot_of_row, row_of_slot, _ = inputs
        weighted = weights_TK is not None
        ctx.save_for_backward(slot_of_row, *((rows_RD, weights_TK) if weighted else ()))
        ctx.num_slots = row_of_slot.shape[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        slot_of_row, *saved = ctx.saved_tensors
        rows_RD, weights_TK = saved or (None, None)
        of_rows, of_weights = sums.spread(grads[0], slot_of_row, weights_TK, rows_RD, ctx.num_slots)
        return of_rows, of_weights, None, None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(rows_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        return rows_RD.index_select(0, order_R)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None
