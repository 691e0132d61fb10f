"""What every operator does with what it is given: leading dimensions, rows of ranks, types under autocast."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.errors import UsageError

__all__ = ["as_rows", "check_product", "in_type", "rows_of_ranks"]


def as_rows(x: Tensor) -> Tensor:
    """As a matrix: all dimensions but the last are rows, those of the first together."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def check_product(operator: str, x: Tensor, weight: Tensor) -> None:
    """Whether one can be multiplied with the other.

    Raises:
        UsageError: it cannot.
    """
    if x.dim() < 2 or weight.dim() != 2 or x.shape[-1] != weight.shape[0]:
        raise UsageError(
            f"{operator}: rows of shape {list(x.shape)} times a weight of {list(weight.shape)}; expected "
            "[..., inner] times [inner, columns]; a linear layer's weight is transposed: weight.t()"
        )
    if x.dtype != weight.dtype:
        raise UsageError(f"{operator}: rows of {x.dtype} times a weight of {weight.dtype}; cast one of them")


def in_type(x: Tensor, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    """Under autocast in its type, as torch's products would be."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return (x, *others)
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) if t is not None and t.is_floating_point() else t for t in (x, *others))


def rows_of_ranks(
    operator: str, rows: Sequence[int] | None, here: int, group: dist.ProcessGroup, *, total: int | None = None
) -> tuple[int, ...]:
    """Of each rank, along the first dimension.

    Args:
        operator: for messages.
        rows: as given; ``None``: all ranks have as many, or, of a total, as torch's ``chunk`` divides it.
        here: rows of this rank, where it has its own only.
        group: the ranks.
        total: rows of the whole array, where every rank has it.

    Raises:
        UsageError: what is given does not fit.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if rows is None:
        if total is None:
            return (here,) * size
        each = -(-total // size)  # as DTensor shards
        return tuple(max(0, min(each, total - r * each)) for r in range(size))
    given = tuple(rows)
    if len(given) != size:
        raise UsageError(f"{operator}: rows of {len(given)} ranks, the group has {size}")
    if total is not None and sum(given) != total:
        raise UsageError(f"{operator}: rows of ranks are {sum(given)} together, the array has {total}")
    if total is None and given[rank] != here:
        raise UsageError(f"{operator}: rank {rank} has {here} rows, rows says {given[rank]}")
    return given
