"""Host side of the kernels: shapes to launches. The function of a name in ``reference`` says what it computes."""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mycel.moe.kernels.device import grouped, routing, rows
from mycel.moe.kernels.tiles import Tile
from mycel.triton_kernels import Launch

__all__ = [
    "KernelArgs",
    "activation_backward",
    "combine",
    "count",
    "gate_up",
    "make_kernel_args",
    "outer",
    "place",
    "rows_times",
    "spread",
    "top_k",
    "top_k_backward",
]

#: Programs that count and place slots: each reads the counts of all others.
_SPANS = 128
#: Numbers that a program of those holds at a time.
_HELD = 8192


class KernelArgs(NamedTuple):
    """Groups of rows cut into tiles.

    Attributes:
        offsets: first row of each group, then the end of the last, then of all rows; ``int32``, shape ``[E + 2]``.
        tile_group: group of each tile, ``E`` for rows of none, -1 for tiles that are not needed.
        tile_row: first row of each tile.
        num_groups: E.
    """

    offsets: Tensor
    tile_group: Tensor
    tile_row: Tensor
    num_groups: int


def _power(n: int) -> int:
    """The least power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _precision(x: Tensor) -> str:
    """Float32 is multiplied exactly, as torch does where nobody allows TF32."""
    if x.is_cpu and x.dtype == torch.bfloat16:
        return "widened"
    allowed = x.dtype == torch.float32 and x.is_cuda and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if allowed else "ieee"


def make_kernel_args(counts_E: Tensor, num_rows: int, block_m: int, *, tail: bool) -> tuple[KernelArgs, Launch]:
    """Tiles for as many rows; ``tail``: with tiles for rows after the last group's."""
    E = counts_E.shape[0]
    num_tiles = num_rows // block_m + E + 1  # a group has at most one tile that is not full
    offsets, tile_group, tile_row = (
        torch.empty(length, dtype=torch.int32, device=counts_E.device) for length in (E + 2, num_tiles, num_tiles)
    )
    plan = KernelArgs(offsets, tile_group, tile_row, E)
    launch = Launch(
        kernel=routing.plan_kernel,
        grid=(E + 1,),
        arguments={
            "counts": counts_E,
            "offsets": plan.offsets,
            "tile_group": plan.tile_group,
            "tile_row": plan.tile_row,
            "num_rows": num_rows,
            "num_groups": E,
            "num_tiles": num_tiles,
            "TAIL": tail,
            "BLOCK_M": block_m,
            "BLOCK_E": max(16, _power(E)),
            "BLOCK": 128,
        },
        num_warps=1,
    )
    return plan, launch


def gate_up(
    x: Tensor,
    slot_of_row: Tensor | None,
    slots: int,
    weight: Tensor,
    z: Tensor | None,
    a: Tensor,
    plan: KernelArgs,
    activation: str,
    tile: Tile,
) -> Launch:
    """``z = x W^T`` and ``a`` of it; ``z`` is written where it is wanted."""
    hidden, width = a.shape[1], x.shape[1]
    num_tiles = plan.tile_group.shape[0]
    return Launch(
        kernel=grouped.gate_up_kernel,
        grid=(num_tiles * _ceil(hidden, tile.n),),
        arguments={
            "x": x,
            "slot_of_row": slot_of_row,
            "weight": weight,
            "z": z,
            "a": a,
            "tile_group": plan.tile_group,
            "tile_row": plan.tile_row,
            "offsets": plan.offsets,
            "num_tiles": num_tiles,
            "num_groups": plan.num_groups,
            "hidden": hidden,
            "width": width,
            "SLOTS": 0 if slot_of_row is None else slots,
            "GATED": activation == "swiglu",
            "ACTIVATION": activation,
            "KEEP_Z": z is not None,
            "EVEN": width % tile.k == 0,
            "PRECISION": _precision(x),
            "BLOCK_M": tile.m,
            "BLOCK_N": tile.n,
            "BLOCK_K": tile.k,
            "TILES_TOGETHER": 8,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def rows_times(
    left: Tensor, slot_of_row: Tensor | None, slots: int, right_EIO: Tensor, out: Tensor, plan: KernelArgs, tile: Tile
) -> Launch:
    """``left B_e`` of each row, at any strides of ``B``."""
    depth, columns = right_EIO.shape[1:]
    num_tiles = plan.tile_group.shape[0]
    return Launch(
        kernel=grouped.rows_kernel,
        grid=(num_tiles * _ceil(columns, tile.n),),
        arguments={
            "left": left,
            "slot_of_row": slot_of_row,
            "right": right_EIO,
            "out": out,
            "tile_group": plan.tile_group,
            "tile_row": plan.tile_row,
            "offsets": plan.offsets,
            "num_tiles": num_tiles,
            "num_groups": plan.num_groups,
            "columns_out": columns,
            "depth_all": depth,
            "stride_group": right_EIO.stride(0),
            "stride_depth": right_EIO.stride(1),
            "stride_column": right_EIO.stride(2),
            "SLOTS": 0 if slot_of_row is None else slots,
            "EVEN": depth % tile.k == 0,
            "PRECISION": _precision(left),
            "BLOCK_M": tile.m,
            "BLOCK_N": tile.n,
            "BLOCK_K": tile.k,
            "TILES_TOGETHER": 8,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def outer(
    left: Tensor,
    right: Tensor,
    slot_of_row: Tensor | None,
    slots: tuple[int, int],
    out_EIO: Tensor,
    plan: KernelArgs,
    tile: Tile,
) -> Launch:
    """``left^T right`` over each group's rows; ``slots``: of a token on the left and right side, 0: rows."""
    E, height, columns = out_EIO.shape
    return Launch(
        kernel=grouped.outer_kernel,
        grid=(E * _ceil(height, tile.m) * _ceil(columns, tile.n),),
        arguments={
            "left": left,
            "right": right,
            "slot_of_row": slot_of_row,
            "out": out_EIO,
            "offsets": plan.offsets,
            "height": height,
            "columns_out": columns,
            "LEFT_SLOTS": slots[0],
            "RIGHT_SLOTS": slots[1],
            "PRECISION": _precision(left),
            "BLOCK_M": tile.m,
            "BLOCK_N": tile.n,
            "BLOCK_K": tile.k,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def combine(rows_RD: Tensor, row_of_slot_TK: Tensor, weights_TK: Tensor | None, out_TD: Tensor) -> Launch:
    """Weighted sums of a token's rows; slots whose row is ``R`` or more are empty."""
    (T, K), (R, D) = row_of_slot_TK.shape, rows_RD.shape
    block_d = min(1024, _power(D))
    block_t = max(1, 1024 // block_d)
    return Launch(
        kernel=rows.combine_kernel,
        grid=(_ceil(T, block_t), _ceil(D, block_d)),
        arguments={
            "rows": rows_RD,
            "row_of_slot": row_of_slot_TK,
            "weights": weights_TK,
            "out": out_TD,
            "num_tokens": T,
            "num_rows": R,
            "width": D,
            "SLOTS": K,
            "WEIGHTED": weights_TK is not None,
            "BLOCK_T": block_t,
            "BLOCK_D": block_d,
        },
    )


def spread(
    grads_TD: Tensor,
    slot_of_row: Tensor,
    weights_TK: Tensor | None,
    rows_RD: Tensor | None,
    out_RD: Tensor,
    of_weights_TK: Tensor | None,
    slots: int,
) -> Launch:
    """The transpose of ``combine``."""
    R, D = out_RD.shape
    block_d = min(1024, _power(D))
    block_r = max(1, 1024 // block_d)
    return Launch(
        kernel=rows.spread_kernel,
        grid=(_ceil(R, block_r),),
        arguments={
            "grads": grads_TD,
            "slot_of_row": slot_of_row,
            "weights": weights_TK,
            "rows": rows_RD,
            "out": out_RD,
            "of_weights": of_weights_TK,
            "num_rows": R,
            "width": D,
            "SLOTS": slots,
            "WEIGHTED": weights_TK is not None,
            "BLOCK_R": block_r,
            "BLOCK_D": block_d,
        },
    )


def activation_backward(
    of_a: Tensor,
    z: Tensor,
    slot_of_row: Tensor | None,
    weights_TK: Tensor | None,
    of_z: Tensor,
    weighted_a: Tensor,
    of_weights_TK: Tensor | None,
    plan: KernelArgs,
    activation: str,
) -> Launch:
    """One pass over ``z``: its gradient, weighted activations, gradients of weights."""
    R, hidden = of_a.shape
    block_f = min(1024, _power(hidden))
    block_r = max(1, 1024 // block_f)
    return Launch(
        kernel=rows.activation_backward_kernel,
        grid=(_ceil(R, block_r),),
        arguments={
            "of_a": of_a,
            "z": z,
            "slot_of_row": slot_of_row,
            "weights": weights_TK,
            "of_z": of_z,
            "weighted_a": weighted_a,
            "of_weights": of_weights_TK,
            "offsets": plan.offsets,
            "num_groups": plan.num_groups,
            "hidden": hidden,
            "WEIGHTED": weights_TK is not None,
            "ACTIVATION": activation,
            "BLOCK_R": block_r,
            "BLOCK_F": block_f,
        },
    )


def top_k(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    index_TK: Tensor,
    weights_TK: Tensor,
    scores_TE: Tensor,
    score: str,
) -> tuple[Tensor, Launch]:
    """Scores, choice and, for each block of tokens, counts (the first result)."""
    (T, E), K = logits_TE.shape, index_TK.shape[1]
    block_e = max(16, _power(E))
    block_t = min(32, max(1, 4096 // block_e))
    blocks = _ceil(T, block_t)
    counts = torch.empty(blocks, E, dtype=torch.int32, device=logits_TE.device)
    launch = Launch(
        kernel=routing.top_k_kernel,
        grid=(blocks,),
        arguments={
            "logits": logits_TE,
            "bias": bias_E,
            "index": index_TK,
            "weights": weights_TK,
            "scores": scores_TE,
            "counts_of_blocks": counts,
            "num_tokens": T,
            "num_experts": E,
            "SLOTS": K,
            "SIGMOID": score == "sigmoid",
            "BIASED": bias_E is not None,
            "BLOCK_T": block_t,
            "BLOCK_E": block_e,
        },
    )
    return counts, launch


def top_k_backward(
    scores_TE: Tensor,
    index_TK: Tensor,
    of_weights_TK: Tensor,
    of_scores_TE: Tensor | None,
    of_logits_TE: Tensor,
    score: str,
) -> Launch:
    """Gradients of logits."""
    (T, E), K = scores_TE.shape, index_TK.shape[1]
    block_e = max(16, _power(E))
    block_t = min(32, max(1, 4096 // block_e))
    return Launch(
        kernel=routing.top_k_backward_kernel,
        grid=(_ceil(T, block_t),),
        arguments={
            "scores": scores_TE,
            "index": index_TK,
            "of_weights": of_weights_TK,
            "of_scores": of_scores_TE,
            "of_logits": of_logits_TE,
            "num_tokens": T,
            "num_experts": E,
            "SLOTS": K,
            "SIGMOID": score == "sigmoid",
            "WITH_SCORES": of_scores_TE is not None,
            "BLOCK_T": block_t,
            "BLOCK_E": block_e,
        },
    )


def _spans(num_slots: int, num_experts: int) -> tuple[int, int, int, int]:
    """Slots held at a time, slots of a span, spans, and the block of experts."""
    block_e = max(16, _power(num_experts))
    block_s = max(16, _HELD // block_e)
    span = _ceil(_ceil(num_slots, _SPANS), block_s) * block_s
    return block_s, span, _ceil(num_slots, max(1, span)), block_e


def count(index_TK: Tensor, num_experts: int) -> tuple[Tensor, Launch]:
    """For each span of slots, how many go to each expert."""
    block_s, span, spans, block_e = _spans(index_TK.numel(), num_experts)
    counts = torch.empty(spans, num_experts, dtype=torch.int32, device=index_TK.device)
    launch = Launch(
        kernel=routing.count_kernel,
        grid=(spans,),
        arguments={
            "index": index_TK,
            "counts_of_spans": counts,
            "num_slots": index_TK.numel(),
            "num_experts": num_experts,
            "span": span,
            "BLOCK_S": block_s,
            "BLOCK_E": block_e,
        },
    )
    return counts, launch


def place(
    index_TK: Tensor, counts_of_spans: Tensor, slot_of_row: Tensor, row_of_slot_TK: Tensor, counts_E: Tensor
) -> Launch:
    """Rows of slots, slots of rows, and counts of experts."""
    num_experts = counts_E.shape[0]
    block_s, span, spans, block_e = _spans(index_TK.numel(), num_experts)
    return Launch(
        kernel=routing.place_kernel,
        grid=(spans,),
        arguments={
            "index": index_TK,
            "counts_of_spans": counts_of_spans,
            "slot_of_row": slot_of_row,
            "row_of_slot": row_of_slot_TK,
            "counts": counts_E,
            "num_slots": index_TK.numel(),
            "num_experts": num_experts,
            "span": span,
            "num_spans": spans,
            "BLOCK_S": block_s,
            "BLOCK_E": block_e,
            "BLOCK_P": max(16, _HELD // block_e // 2),
        },
    )
