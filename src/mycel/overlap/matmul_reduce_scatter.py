"""``matmul_reduce_scatter``: products of all ranks summed up, each rank keeping its rows, tile by tile."""

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
from mycel.errors import UsageError
from mycel.overlap.engine import gather_product, product_scatter
from mycel.overlap.epilogue import Epilogue, Mask, Norm, draw_mask, norm_backward
from mycel.overlap.exchanges import Across
from mycel.overlap.given import as_rows, check_product, in_type, rows_of_ranks
from mycel.overlap.tiling import count_tiles
from mycel.untraced import untraced

__all__ = ["matmul_reduce_scatter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """Everything but tensors that have gradients.

    Attributes:
        across: the ranks.
        rows: of each of them.
        tiles: as given.
        mask: of dropout.
        norm: without its tensors.
    """

    across: Across
    rows: tuple[int, ...]
    tiles: int | None
    mask: Mask | None
    norm: Norm | None


@untraced
def matmul_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    residual: Tensor | None = None,
    norm: Norm | None = None,
    generator: torch.Generator | None = None,
    group: dist.ProcessGroup | None = None,
    rows: Sequence[int] | None = None,
    tiles: int | None = None,
    meter: ByteMeter | None = None,
) -> Tensor:
    """This rank's rows of the ranks' sum of products; sums travel while other rows are multiplied.

    It is ``x @ weight``, ``reduce_scatter`` along the first dimension, then bias, dropout, residual and norm on this
    rank's rows, done where a tile arrives. On the way back gradients are gathered in tiles that overlap the product
    with the transposed weight. All ranks of the group call it.

    Args:
        x: shape ``[sum(rows), ..., inner]``, where each rank has columns of its own.
        weight: shape ``[inner, columns]``, where each rank has rows of its own; of a linear layer ``weight.t()``.
        bias: shape ``[columns]``, the same on all ranks, added to the sum once. All ranks get its whole gradient.
        dropout: share of elements that become zero, with ``generator``; 0 while nothing is trained.
        residual: this rank's, shape ``[rows[rank], ..., columns]``.
        norm: of each row, at the end; its parameters are the same on all ranks, and get whole gradients.
        generator: of dropout, for this rank's rows; torch's own if not given.
        group: the ranks; all if not given.
        rows: of the result on each rank, along the first dimension; if not given, as ``torch.chunk`` divides them.
        tiles: in how many parts each rank's rows are made and sent; if not given, as the model of cost says.
        meter: counts bytes, as ``matmul_reduce_scatter`` and ``matmul_reduce_scatter.backward``.

    Returns:
        Shape ``[rows[rank], ..., columns]``. Between two ranks the bits are those of one tile; among more, sums may
        be formed in another order.

    Raises:
        UsageError: shapes or types that do not fit.

    Examples:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank, for show
        >>> matmul_reduce_scatter(torch.ones(2, 3), torch.ones(3, 4), residual=torch.ones(2, 4)).tolist()[0]
        [4.0, 4.0, 4.0, 4.0]
        >>> dist.destroy_process_group()

    References:
        A. Jangda et al., "Breaking the Computation and Communication Abstraction Barrier in Distributed Machine
        Learning Workloads", ASPLOS 2022, sections 3 and 5 (CoCoNet: computation on slices, overlap in tiles).
    """
    group = group_or_all(group, "matmul_reduce_scatter")
    x_, weight_, bias, residual = in_type(x, weight, bias, residual)
    assert x_ is not None and weight_ is not None
    check_product("matmul_reduce_scatter", x_, weight_)
    middle, columns = x_.shape[1:-1], weight_.shape[1]
    firsts = rows_of_ranks("matmul_reduce_scatter", rows, 0, group, total=x_.shape[0])
    across = Across.of(group, "matmul_reduce_scatter", meter)
    shape = (firsts[across.rank], *middle, columns)
    if residual is not None and residual.shape != shape:
        raise UsageError(
            f"matmul_reduce_scatter: a residual of shape {list(residual.shape)}, expected {list(shape)}: this rank's "
            "rows"
        )
    counts = tuple(first * math.prod(middle) for first in firsts)
    call = _Call(
        across=across,
        rows=counts,
        tiles=tiles,
        mask=draw_mask(x_, counts[across.rank], columns, dropout, generator),
        norm=norm,
    )
    weights = (None, None) if norm is None else (norm.weight, norm.bias)
    flat = None if residual is None else as_rows(residual)
    kept: Tensor = _MatmulReduceScatter.apply(as_rows(x_), weight_, bias, flat, *weights, call)  # type: ignore[no-untyped-call]
    return kept.view(shape)


class _MatmulReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        call: _Call,
    ) -> Tensor:
        epilogue = Epilogue(bias=bias, mask=call.mask, residual=residual, norm=call.norm, sums=[])
        kept = product_scatter(
            x.contiguous(),
            weight,
            call.across,
            rows=call.rows,
            tiles=count_tiles(
                "matmul_reduce_scatter",
                call.rows,
                x.shape[1],
                weight.shape[1],
                like=x,
                group=call.across.group,
                tiles=call.tiles,
            ),
            finish=None if epilogue.is_empty else epilogue,
        )
        sums = torch.cat([part for _, _, part in epilogue.sums]) if epilogue.sums else None
        ctx.call = call
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, sums)
        return kept

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, sums = ctx.saved_tensors
        call: _Call = ctx.call
        across = call.across.back()
        norm_weight = norm_bias = None
        totals = None
        if call.norm is not None:
            rows = gradient.new_empty(0, gradient.shape[1]) if sums is None else sums
            gradient, norm_weight, norm_bias = norm_backward(call.norm, rows, gradient)
            found = [t for t in (norm_weight, norm_bias) if t is not None]
            totals = across.total(torch.stack(found)) if found else None
        # Of rows whose gradient the residual gets as it is, a copy is dropped from.
        summed = gradient.contiguous()
        if call.mask is not None:
            summed = call.mask.apply_(summed.clone(), 0, summed.shape[0])
        x_grad = weight_grad = bias_grad = None
        if any(ctx.needs_input_grad[:3]):
            tiles = count_tiles(
                "all_gather_matmul",
                call.rows,
                weight.shape[1],
                weight.shape[0],
                like=gradient,
                group=call.across.group,
                tiles=call.tiles,
            )
            x_grad, everywhere = gather_product(
                summed, weight.t(), None, across, rows=call.rows, tiles=tiles, keep=True
            )
            assert everywhere is not None
            weight_grad = x.t() @ everywhere if ctx.needs_input_grad[1] else None
            bias_grad = everywhere.sum(0) if ctx.needs_input_grad[2] else None
        if totals is not None:
            parts = list(totals.wait())
            norm_weight = None if norm_weight is None else parts.pop(0)
            norm_bias = None if norm_bias is None else parts.pop(0)
        residual = gradient if ctx.needs_input_grad[3] else None
        return x_grad, weight_grad, bias_grad, residual, norm_weight, norm_bias, None
