"""How long each product of experts takes here, by rows an expert."""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mycel.errors import UsageError
from mycel.moe.kernels.grouped_gemm import grouped_linear
from mycel.moe.kernels.products import (
    Curve,
    ProductShape,
    ProductTable,
    batched,
    one_each,
    padded,
    use_products,
)

__all__ = ["measure_products"]


@torch.no_grad()
def measure_products(
    model: nn.Module,
    *,
    rows: Sequence[int] = (1, 4, 16, 64, 256),
    trials: int = 5,
    dtype: torch.dtype | None = None,
) -> ProductTable:
    """Time the products of a model's experts, for ``use_products``.

    For each shape of stacked matrices and each number of rows, all products take turns; the shortest time counts,
    because whatever else the machine does only adds to it. Where ranks are joined, all call this and get the first
    one's table.

    Args:
        model: with experts whose matrices are stacked parameters ``gate_up_proj`` and ``down_proj``: MoE layers, or a
            Hugging Face model after ``mycel.moe.apply``.
        rows: an expert, ascending; between them times are interpolated.
        trials: of each.
        dtype: that is computed in, as under autocast; ``None``: that of the parameters.

    Returns:
        A table of every shape found.

    Raises:
        UsageError: no such experts, or rows that do not ascend.

    References:
        Qian et al., "EPS-MoE", 2024 (arXiv 2410.12247).

    Examples:
        >>> from mycel.moe import MoE
        >>> table = measure_products(MoE(dim=16, hidden=32, num_experts=4), rows=(1, 8), trials=1)
        >>> sorted(shape[:3] for shape in table.curves)
        [(4, 16, 32), (4, 64, 16)]
    """
    if not rows or min(rows) < 1 or list(rows) != sorted(set(rows)) or trials < 1:
        raise UsageError(f"measure_products: rows {tuple(rows)}, {trials} trials; expected rows ascending from 1 on")
    found: list[Any] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        before = use_products(None)
        try:
            found = [{shape: _curves(like, rows, trials) for shape, like in _stacks(model, dtype).items()}]
        finally:
            use_products(before)
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    if not found[0]:
        raise UsageError(
            f"{type(model).__name__}: no experts with stacked matrices gate_up_proj and down_proj to measure"
        )
    return ProductTable(curves=found[0])


def _stacks(model: nn.Module, dtype: torch.dtype | None) -> dict[ProductShape, Tensor]:
    """One stack of matrices, as experts multiply by them, of each shape."""
    found: dict[ProductShape, Tensor] = {}
    for module in model.modules():
        for name in ("gate_up_proj", "up_proj", "down_proj"):
            stack = getattr(module, name, None)
            if isinstance(stack, Tensor) and stack.dim() == 3 and stack.shape[0]:
                used = stack.detach().transpose(1, 2) if getattr(module, "is_transposed", False) else stack.detach()
                used = used.to(dtype)
                found.setdefault(ProductShape.of(used), used)
    return found


def _curves(weight_EOI: Tensor, rows: Sequence[int], trials: int) -> dict[str, Curve]:
    E = weight_EOI.shape[0]
    curves: dict[str, list[tuple[int, float]]] = {}
    for count in rows:
        x_RI = weight_EOI.new_ones(E * count, weight_EOI.shape[2]).normal_()
        counts, counts_E = [count] * E, torch.full((E,), count, device=x_RI.device)
        ways: dict[str, Callable[[], Tensor]] = {"grouped": partial(grouped_linear, x_RI, weight_EOI, counts_E)}
        for way, product in (("each", one_each), ("batched", batched), ("padded", padded)):
            ways[way] = partial(product, x_RI, weight_EOI, counts)
        times: dict[str, list[float]] = {way: [] for way in ways}
        for trial in range(trials + 1):
            for way, do in ways.items():
                spent = _seconds(do, x_RI)
                if trial:  # the first one warms up
                    times[way].append(spent)
        for way, spent_s in times.items():
            curves.setdefault(way, []).append((count, min(spent_s) / E))
    return {way: tuple(points) for way, points in curves.items()}


def _seconds(do: Callable[[], Tensor], like: Tensor) -> float:
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
    begin = time.perf_counter()
    do()
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
    return time.perf_counter() - begin
