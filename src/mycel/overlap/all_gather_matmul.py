"""``all_gather_matmul``: the rows of all ranks times a matrix of one's own, tile by tile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mycel.comm.meter import ByteMeter
from mycel.comm.start import group_or_all
from mycel.overlap.engine import gather_product, product_scatter
from mycel.overlap.exchanges import Across, padded
from mycel.overlap.given import as_rows, check_product, in_type, rows_of_ranks
from mycel.overlap.tiling import count_tiles
from mycel.untraced import untraced

__all__ = ["all_gather_matmul"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """Everything but tensors.

    Attributes:
        across: the ranks.
        rows: of each of them.
        tiles: as given.
        keep: whether gathered rows are kept for the way back.
    """

    across: Across
    rows: tuple[int, ...]
    tiles: int | None
    keep: bool


@untraced
def all_gather_matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    rows: Sequence[int] | None = None,
    tiles: int | None = None,
    keep_gathered: bool = True,
    meter: ByteMeter | None = None,
) -> Tensor:
    """The product of all ranks' rows and this rank's matrix; rows travel while others are multiplied.

    It is ``all_gather`` along the first dimension, then ``@ weight + bias``. On the way back the product with the
    transposed weight and its ``reduce_scatter`` overlap, and the weight's gradient is computed while the last tile
    travels. All ranks of the group call it.

    Args:
        x: this rank's rows, shape ``[rows[rank], ..., inner]``.
        weight: this rank's, shape ``[inner, columns]``; of a linear layer ``weight.t()``.
        bias: shape ``[columns]``.
        group: the ranks; all if not given.
        rows: of each rank along the first dimension; if not given, all have as many as this one.
        tiles: in how many parts each rank's rows travel; if not given, as the model of cost says
            (``mycel.overlap.plan_tiles``). The same on all ranks.
        keep_gathered: keep the gathered rows for the way back, as the plain program does; if not, they are gathered
            once more then, and memory is saved.
        meter: counts bytes, as ``all_gather_matmul`` and ``all_gather_matmul.backward``.

    Returns:
        Shape ``[sum(rows), ..., columns]``. Rows are those of the plain program's product; kernels may differ by
        rounding where a tile has few of them.

    Raises:
        UsageError: shapes or types that do not fit.

    Examples:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank, for show
        >>> all_gather_matmul(torch.ones(2, 3), torch.ones(3, 4), torch.ones(4)).tolist()[0]
        [4.0, 4.0, 4.0, 4.0]
        >>> dist.destroy_process_group()

    References:
        S. Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
        Models", ASPLOS 2023, section 5 (a collective and a product, decomposed).
    """
    group = group_or_all(group, "all_gather_matmul")
    x_, weight_, bias = in_type(x, weight, bias)
    assert x_ is not None and weight_ is not None
    check_product("all_gather_matmul", x_, weight_)
    middle = x_.shape[1:-1]
    firsts = rows_of_ranks("all_gather_matmul", rows, x_.shape[0], group)
    each = math.prod(middle)
    call = _Call(
        across=Across.of(group, "all_gather_matmul", meter),
        rows=tuple(first * each for first in firsts),
        tiles=tiles,
        keep=keep_gathered,
    )
    product: Tensor = _AllGatherMatmul.apply(as_rows(x_), weight_, bias, call)  # type: ignore[no-untyped-call]
    return product.view(sum(firsts), *middle, weight_.shape[1])


class _AllGatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        wants_weight = ctx.needs_input_grad[1]
        product, gathered = gather_product(
            x,
            weight,
            bias,
            call.across,
            rows=call.rows,
            tiles=count_tiles(
                "all_gather_matmul",
                call.rows,
                x.shape[1],
                weight.shape[1],
                like=x,
                group=call.across.group,
                tiles=call.tiles,
            ),
            keep=wants_weight and call.keep,
        )
        ctx.call = call
        ctx.save_for_backward(x if wants_weight and not call.keep else None, weight, gathered)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gathered = ctx.saved_tensors
        call: _Call = ctx.call
        across = call.across.back()
        gradient = gradient.contiguous()
        x_grad: Tensor | None = None
        weight_grad: list[Tensor] = []
        again = None if x is None else across.gather(padded(x, max(call.rows)))

        def beside() -> None:
            if ctx.needs_input_grad[1]:
                whole = gathered
                if again is not None:
                    whole = torch.cat([part[:count] for part, count in zip(again.wait(), call.rows, strict=True)])
                weight_grad.append(whole.t() @ gradient)

        if ctx.needs_input_grad[0]:
            tiles = count_tiles(
                "matmul_reduce_scatter",
                call.rows,
                weight.shape[1],
                weight.shape[0],
                like=gradient,
                group=call.across.group,
                tiles=call.tiles,
            )
            x_grad = product_scatter(gradient, weight.t(), across, rows=call.rows, tiles=tiles, beside=beside)
        else:
            beside()
        bias_grad = gradient.sum(0) if ctx.needs_input_grad[2] else None
        return x_grad, weight_grad[0] if weight_grad else None, bias_grad, None
