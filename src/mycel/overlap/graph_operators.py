"""What stands in compiled graphs for a product and its collective: operators that are opaque to torch's compiler.

They take groups by name, as torch's functional collectives do, and what was decided when the graph was compiled: the
number of tiles, and whether a rank multiplies in these or all rows at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from mycel.overlap.engine import gather_product, product_scatter
from mycel.overlap.exchanges import Across

__all__ = ["gather_matmul", "gather_matmul_keep", "matmul_scatter"]


def _across(group_name: str) -> Across:
    find: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]  # as functional collectives do
    return Across.of(find(group_name), "compiled")


def _gathered(
    x: Tensor, weight: Tensor, bias: Tensor | None, group_name: str, tiles: int, at_once: bool, keep: bool
) -> tuple[Tensor, Tensor | None]:
    across = _across(group_name)
    rows = (x.shape[0],) * across.size
    return gather_product(x, weight, bias, across, rows=rows, tiles=tiles, keep=keep, at_once=at_once)


@torch.library.custom_op("mycel::gather_matmul", mutates_args=())
def gather_matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None, num_ranks: int, group_name: str, tiles: int, at_once: bool
) -> Tensor:
    """The product of all ranks' rows."""
    return _gathered(x, weight, bias, group_name, tiles, at_once, False)[0]


@gather_matmul.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, num_ranks: int, group_name: str, tiles: int, at_once: bool
) -> Tensor:
    return x.new_empty(x.shape[0] * num_ranks, weight.shape[1])


@torch.library.custom_op("mycel::gather_matmul_keep", mutates_args=())
def gather_matmul_keep(
    x: Tensor, weight: Tensor, bias: Tensor | None, num_ranks: int, group_name: str, tiles: int, at_once: bool
) -> tuple[Tensor, Tensor]:
    """The product of all ranks' rows, and these rows."""
    product, gathered = _gathered(x, weight, bias, group_name, tiles, at_once, True)
    assert gathered is not None
    return product, gathered


@gather_matmul_keep.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, num_ranks: int, group_name: str, tiles: int, at_once: bool
) -> tuple[Tensor, Tensor]:
    rows = x.shape[0] * num_ranks
    return x.new_empty(rows, weight.shape[1]), x.new_empty(rows, x.shape[1])


@torch.library.custom_op("mycel::matmul_scatter", mutates_args=())
def matmul_scatter(
    x: Tensor, weight: Tensor, bias: Tensor | None, num_ranks: int, group_name: str, tiles: int, at_once: bool
) -> Tensor:
    """This rank's rows of the ranks' sum of products."""
    rows = (x.shape[0] // num_ranks,) * num_ranks
    return product_scatter(x, weight, _across(group_name), rows=rows, tiles=tiles, bias=bias, at_once=at_once)


@matmul_scatter.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, num_ranks: int, group_name: str, tiles: int, at_once: bool
) -> Tensor:
    return x.new_empty(x.shape[0] // num_ranks, weight.shape[1])
