"""``matmul_all_reduce``: products of all ranks summed up and finished, on all of them, tile by tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mycel.comm.meter import ByteMeter
from mycel.comm.start import group_or_all
from mycel.errors import UsageError
from mycel.overlap.engine import product_everywhere, spread_product
from mycel.overlap.epilogue import Epilogue, Mask, Norm, draw_mask, norm_backward
from mycel.overlap.exchanges import Across
from mycel.overlap.given import as_rows, check_product, in_type
from mycel.overlap.rows import span_tiles
from mycel.overlap.tiling import plan_tiles
from mycel.untraced import untraced

__all__ = ["matmul_all_reduce"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """Everything but tensors that have gradients.

    Attributes:
        across: the ranks.
        tiles: in how many.
        mask: of dropout, of all rows.
        norm: at the end.
    """

    across: Across
    tiles: int
    mask: Mask | None
    norm: Norm | None


@untraced
def matmul_all_reduce(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    residual: Tensor | None = None,
    norm: Norm | None = None,
    generator: torch.Generator | None = None,
    group: dist.ProcessGroup | None = None,
    tiles: int | None = None,
    meter: ByteMeter | None = None,
) -> Tensor:
    """The ranks' sum of products, then bias, dropout, residual and norm; the same on all ranks.

    Bias, dropout, residual and norm are done by each rank on its slice of the sum, between the two halves of the
    all_reduce, and all of it in tiles that overlap the product. On the way back nothing travels, since all ranks have
    the gradient of the result; but for a norm, whose rows' gradients are gathered in tiles that overlap the product
    with the transposed weight, and whose parameters' gradients are summed. All ranks of the group call it.

    Args:
        x: shape ``[..., inner]``, where each rank has columns of its own.
        weight: shape ``[inner, columns]``, where each rank has rows of its own; of a linear layer ``weight.t()``.
        bias: shape ``[columns]``, the same on all ranks, added to the sum once.
        dropout: share of elements that become zero, with ``generator``; 0 while nothing is trained.
        residual: shape ``[..., columns]``, the same on all ranks.
        norm: of each row, at the end; its parameters are the same on all ranks.
        generator: of dropout; torch's own if not given. In the same state on all ranks, as the unfused program needs.
        group: the ranks; all if not given.
        tiles: in how many parts rows are made and sent; if not given, as the model of cost says.
        meter: counts bytes, as ``matmul_all_reduce`` and ``matmul_all_reduce.backward``.

    Returns:
        Shape ``[..., columns]``.

    Raises:
        UsageError: shapes or types that do not fit.

    Examples:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank, for show
        >>> matmul_all_reduce(torch.ones(2, 3), torch.ones(3, 4), bias=torch.ones(4)).tolist()[0]
        [4.0, 4.0, 4.0, 4.0]
        >>> dist.destroy_process_group()

    References:
        A. Jangda et al., "Breaking the Computation and Communication Abstraction Barrier in Distributed Machine
        Learning Workloads", ASPLOS 2022, section 2 (CoCoNet's overlap of a product and a fused all_reduce).
    """
    group = group_or_all(group, "matmul_all_reduce")
    x_, weight_, bias, residual = in_type(x, weight, bias, residual)
    assert x_ is not None and weight_ is not None
    check_product("matmul_all_reduce", x_, weight_)
    shape = (*x_.shape[:-1], weight_.shape[1])
    if residual is not None and residual.shape != shape:
        raise UsageError(f"matmul_all_reduce: a residual of shape {list(residual.shape)}, expected {list(shape)}")
    flat = as_rows(x_)
    planned = plan_tiles(
        "matmul_all_reduce",
        flat.shape[0],
        flat.shape[1],
        shape[-1],
        dtype=flat.dtype,
        group=group,
        device=flat.device,
        tiles=tiles,
    )
    call = _Call(
        across=Across.of(group, "matmul_all_reduce", meter),
        tiles=planned.tiles,
        mask=draw_mask(flat, flat.shape[0], shape[-1], dropout, generator),
        norm=norm,
    )
    weights = (None, None) if norm is None else (norm.weight, norm.bias)
    added = None if residual is None else as_rows(residual)
    made: Tensor = _MatmulAllReduce.apply(flat, weight_, bias, added, *weights, call)  # type: ignore[no-untyped-call]
    return made.view(shape)


class _MatmulAllReduce(torch.autograd.Function):
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
        finish = None if epilogue.is_empty else epilogue
        made = product_everywhere(x.contiguous(), weight, call.across, tiles=call.tiles, finish=finish)
        ctx.call, ctx.spans = call, [(begin, stop) for begin, stop, _ in epilogue.sums]
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, *(part for _, _, part in epilogue.sums))
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *sums = ctx.saved_tensors
        call: _Call = ctx.call

        def dropped(rows: Tensor, begin: int, stop: int) -> Tensor:
            return rows if call.mask is None else call.mask.apply_(rows.clone(), begin, stop)

        if call.norm is None or call.across.size == 1:
            norm_weight = norm_bias = None
            if call.norm is not None and sums:
                gradient, norm_weight, norm_bias = norm_backward(call.norm, sums[0], gradient)
            summed = dropped(gradient.contiguous(), 0, gradient.shape[0])
            x_grad = summed @ weight.t() if ctx.needs_input_grad[0] else None
        else:
            x_grad, gradient, norm_weight, norm_bias = _through_norm(ctx, call.norm, gradient, weight, sums, dropped)
            summed = dropped(gradient, 0, gradient.shape[0])
        weight_grad = x.t() @ summed if ctx.needs_input_grad[1] else None
        bias_grad = summed.sum(0) if ctx.needs_input_grad[2] else None
        residual = gradient if ctx.needs_input_grad[3] else None
        return x_grad, weight_grad, bias_grad, residual, norm_weight, norm_bias, None


def _through_norm(
    ctx: Any, norm: Norm, gradient: Tensor, weight: Tensor, sums: list[Tensor], dropped: Any
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of ``x``, of the rows before the norm, and of its parameters.

    Each rank goes back through the norm of its own rows.
    """
    call: _Call = ctx.call
    across, (num_rows, columns) = call.across.back(), gradient.shape
    none = gradient.new_empty(0, columns)
    cuts = span_tiles(num_rows, across.size, call.tiles)
    own = [tile.own(across.rank) for tile in cuts]
    rows = torch.cat([gradient[begin:stop] for begin, stop in own] or [none])
    before, norm_weight, norm_bias = norm_backward(norm, torch.cat([*sums, none]), rows)
    found = [t for t in (norm_weight, norm_bias) if t is not None]
    totals = across.total(torch.stack(found)) if found else None
    parts = list(torch.split(before, [stop - begin for begin, stop in own])) or [none]
    x_grad, everywhere = spread_product(
        parts, weight.t(), across, num_rows=num_rows, tiles=call.tiles, prepare=dropped
    )
    if totals is not None:
        told = list(totals.wait())
        norm_weight = None if norm_weight is None else told.pop(0)
        norm_bias = None if norm_bias is None else told.pop(0)
    return x_grad, everywhere, norm_weight, norm_bias
