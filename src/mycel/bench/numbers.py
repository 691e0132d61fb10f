"""What ranks contribute to a collective that is measured, and what must come out.

Numbers are whole, different on every rank, and small enough for every order of operations to be exact in their
type, so that a result is right or wrong and nothing between. A contribution that is missing, counted
twice or taken for another's changes some element. Averages alone are divided, and are right to the type's precision.
"""

from __future__ import annotations

import torch

from mycel.bench.case import WHOLE_NUMBERS

__all__ = ["contribution", "num_wrong", "reduced"]

#: Up to here a type counts exactly; wide ones up to what float32 does, so that all give the same numbers.
_EXACT = {"float16": 1 << 11, "bfloat16": 1 << 8, "int8": 127, "uint8": 255}
_USUALLY_EXACT = 1 << 24
_PERIODS = (8191, 1021, 251, 61, 13, 7, 5, 3, 2)
#: Of least and greatest: how many ranks are told apart, and after how many elements numbers come again. Their sum
#: fits into a byte.
_TOLD_APART, _LATER = 60, 61


def contribution(
    start: int, stop: int, rank: int, world_size: int, *, dtype: str = "float32", op: str = "sum"
) -> torch.Tensor:
    """Elements ``start .. stop-1`` of what a rank contributes.

    Args:
        start, stop: elements of the whole array.
        rank, world_size: whose part of how many.
        dtype: one of ``mycel.bench.case.DTYPES``.
        op: what the contributions are for, one of ``mycel.bench.case.OPERATIONS``.

    Examples:
        >>> [contribution(0, 4, rank, 2, op="max", dtype="int8").tolist() for rank in (0, 1)]
        [[1, 3, 3, 5], [2, 2, 4, 4]]
    """
    index = torch.arange(start, stop, dtype=torch.int64)
    if op == "prod":
        made = torch.where(index % world_size == rank, 2, 1)
        made *= torch.where((index // world_size) % world_size == rank, 3, 1)
        if rank == 0:
            made *= index % 5 + 1  # else every product would be 6
    elif op in ("min", "max"):
        made = ((index + rank) % world_size).clamp(max=_TOLD_APART - 1) + index % _LATER + 1
    else:
        weights = _weights(world_size, dtype)
        made = (index % _period(sum(weights), dtype) + 1) * weights[rank]
    return made.to(getattr(torch, dtype))


def reduced(start: int, stop: int, world_size: int, *, dtype: str = "float32", op: str = "sum") -> torch.Tensor:
    """Elements ``start .. stop-1`` of what all contributions make together; averages in float64."""
    index = torch.arange(start, stop, dtype=torch.int64)
    kind = getattr(torch, dtype)
    if op == "prod":
        return (6 * (index % 5 + 1)).to(kind)
    if op in ("min", "max"):
        most = min(world_size, _TOLD_APART) - 1 if op == "max" else 0
        return (index % _LATER + 1 + most).to(kind)
    total = sum(_weights(world_size, dtype))
    made = (index % _period(total, dtype) + 1) * total
    return made.to(torch.float64) / world_size if op == "avg" else made.to(kind)


def num_wrong(found: torch.Tensor, expected: torch.Tensor) -> int:
    """Elements that are not what they must be; averages, given in float64, are right to two units of their type."""
    if found.dtype == expected.dtype:
        return 0 if torch.equal(found, expected) else int((found != expected).sum())
    wide = found.to(torch.float64)
    near = (wide - expected).abs() <= 2 * torch.finfo(found.dtype).eps * expected.abs()
    return int((~near).sum())  # not a number is near to nothing


def _weights(world_size: int, dtype: str) -> list[int]:
    """Of each rank. Powers of two tell every mistake apart; narrow types have room for less."""
    exact = _EXACT.get(dtype, _USUALLY_EXACT)
    powers = [1 << (rank % 12) for rank in range(world_size)]
    thirds = [rank % 3 + 1 for rank in range(world_size)]
    for weights in (powers, thirds):
        if sum(weights) * _PERIODS[4] < exact:
            return weights
    if sum(thirds) < exact:
        return thirds
    # So many ranks that even ones do not fit: floating-point ranks beyond give nothing, whole numbers go round.
    return [1 if dtype in WHOLE_NUMBERS or rank < exact - 1 else 0 for rank in range(world_size)]


def _period(total: int, dtype: str) -> int:
    """After how many elements numbers come again: a prime, so that no block looks like another; 1 if none fits."""
    exact = _EXACT.get(dtype, _USUALLY_EXACT)
    return next((period for period in _PERIODS if period * total < exact), 1)
