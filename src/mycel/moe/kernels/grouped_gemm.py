"""Linear maps of consecutive groups of rows, each with a matrix of its own: the arithmetic of experts.

Torch's ``grouped_mm`` does it for float32 and half types whose rows are multiples of 16 bytes; a loop over groups,
which multiplies into one output, does it for the rest. On a CPU both sit inside one operator
(``mycel::grouped_linear``), so that ``torch.compile`` keeps it whole although the groups' lengths are data. On a GPU
``grouped_mm`` is called in the open, and no lengths are needed on the host. A table of measured products
(``use_products``) chooses among this one, a product for each group and a batched one by the groups' lengths.
"""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library
from torch.nn import functional

from mycel.moe.kernels.choice import chosen_kernels
from mycel.moe.kernels.products import batched, chosen_product, knows, one_each, padded

__all__ = ["grouped_linear", "grouped_outer", "groups_with_rows"]


def grouped_linear(x_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """``x W_e^T`` for the rows of each group.

    Args:
        x_RI: rows, those of group 0 first.
        weight_EOI: a matrix a group.
        counts_E: rows of each group, ``int64``; they add up to at most ``R``.

    Returns:
        Shape ``[R, O]``; rows after the last group are zero.
    """
    if x_RI.is_cuda and _kernel_takes(x_RI, weight_EOI.shape[1]) and not knows(weight_EOI):
        return _by_grouped_mm(x_RI, weight_EOI, counts_E)
    mapped: Tensor = torch.ops.mycel.grouped_linear(x_RI, weight_EOI, counts_E)
    return mapped


def grouped_outer(left_RI: Tensor, right_RO: Tensor, counts_E: Tensor) -> Tensor:
    """``left^T right`` over the rows of each group, shape ``[E, I, O]``: the gradient of a group's matrix.

    Args:
        left_RI: rows, those of group 0 first.
        right_RO: as many rows.
        counts_E: rows of each group, ``int64``; they add up to at most ``R``.
    """
    product: Tensor = torch.ops.mycel.grouped_outer(left_RI, right_RO, counts_E)
    return product


def _kernel_takes(x: Tensor, *widths: int) -> bool:
    """Whether torch's kernel multiplies such rows; it wants a known type, and rows of multiples of 16 bytes."""
    known = x.dtype in (torch.bfloat16, torch.float16, torch.float32) and chosen_kernels() != "loop"
    return known and all(width and width * x.element_size() % 16 == 0 for width in (x.shape[1], *widths))


def _by_grouped_mm(x_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    ends_E = counts_E.cumsum(0)
    # The kernel leaves rows after the last group as they were in memory, in results and in gradients of rows alike,
    # and wants upstream gradients contiguous.
    after_R1 = torch.arange(x_RI.shape[0], device=x_RI.device).unsqueeze(1) >= ends_E[-1]
    x_RI = x_RI.masked_fill(after_R1, 0.0)
    y_RO = functional.grouped_mm(x_RI, weight_EOI.transpose(1, 2), offs=ends_E.to(torch.int32))
    masked: Tensor = _Contiguous.apply(y_RO.masked_fill(after_R1, 0.0))  # type: ignore[no-untyped-call]
    return masked


class _Contiguous(torch.autograd.Function):
    """Identity; its gradient is contiguous (``expand``, as of ``sum``, has stride 0)."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        return None

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].contiguous()


def groups_with_rows(counts_E: Tensor) -> list[tuple[int, int, int]]:
    """Group, first row, row after the last one, of every group that has rows."""
    found, begin = [], 0
    for group, count in enumerate(counts_E.tolist()):
        if count:
            found.append((group, begin, begin + count))
        begin += count
    return found


_PRODUCTS = {"each": one_each, "batched": batched, "padded": padded}


@library.custom_op("mycel::grouped_linear", mutates_args=())
def _grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    if x.shape[0] and knows(weight):
        lengths = counts.tolist()
        chosen = chosen_product(weight, lengths)
        if chosen != "grouped":
            return _PRODUCTS[chosen](x, weight, lengths)
    if x.shape[0] and weight.shape[0] and _kernel_takes(x, weight.shape[1]):
        ends = counts.cumsum(0)
        y = functional.grouped_mm(x.contiguous(), weight.transpose(1, 2), offs=ends.to(torch.int32))
        y[int(ends[-1]) :].zero_()
        return y
    y = x.new_empty(x.shape[0], weight.shape[1])
    end = 0
    for group, begin, end in groups_with_rows(counts):
        torch.mm(x[begin:end], weight[group].t(), out=y[begin:end])
    y[end:].zero_()
    return y


@library.custom_op("mycel::grouped_outer", mutates_args=())
def _grouped_outer(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    """``left^T right`` of each group: the gradient of its matrix."""
    if left.shape[0] and counts.shape[0] and _kernel_takes(left, right.shape[1]):
        ends = counts.cumsum(0).to(torch.int32)
        return functional.grouped_mm(left.contiguous().t(), right.contiguous(), offs=ends)
    product = left.new_empty(counts.shape[0], left.shape[1], right.shape[1])
    next_group = 0
    for group, begin, end in groups_with_rows(counts):
        product[next_group:group].zero_()
        torch.mm(left[begin:end].t(), right[begin:end], out=product[group])
        next_group = group + 1
    product[next_group:].zero_()
    return product


@_grouped_linear.register_fake
def _(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@_grouped_outer.register_fake
def _(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    return left.new_empty(counts.shape[0], left.shape[1], right.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, counts = ctx.saved_tensors
    grad = grad.contiguous()
    of_x = torch.ops.mycel.grouped_linear(grad, weight.transpose(1, 2), counts) if ctx.needs_input_grad[0] else None
    of_weight = torch.ops.mycel.grouped_outer(grad, x, counts) if ctx.needs_input_grad[1] else None
    return of_x, of_weight, None


_grouped_linear.register_autograd(_backward, setup_context=_save)
