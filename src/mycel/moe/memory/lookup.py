"""Matrices of 4-bit codes, and products with them by tables of sums instead of multiplications.

Of two neighbouring columns and a vector ``x`` there are only ``16 x 16`` sums ``v x_0 + w x_1``. A table has them,
each made from another by one addition; then every row of the matrix looks one up, with the byte that holds its two
codes, and adds it. For ``d`` columns at a time, ``m`` rows and ``k`` columns of ``b``-bit codes that is
``k/d (sum_t 2^(bt) + m)`` operations in place of ``2 m k``. Look-ups read memory, so fewer operations are not always
less time: ``CodedProducts`` measures, and takes what is faster.

References:
    S. Maleki, "msGeMM: Look-Up-Table GeMM", 2023, arXiv 2310.06178, sections 3 (tables made incrementally) and 4
    (operation counts).
"""

# ruff: noqa: N803  (the shape suffixes are capitals on purpose)
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mycel.arguments import whole_number
from mycel.compiled import compiled_without_lock
from mycel.errors import UsageError
from mycel.names import spelled

__all__ = ["METHODS", "CodedMatrix", "code_matrix", "table_operations"]

#: Ways of a product: tables; codes multiplied one by one; a float32 matrix made first, which torch multiplies.
METHODS = ("tables", "dequantise", "expand")
#: Codes are -8 to 7, kept with this added.
_ZERO = 8
#: Columns that share a scale, of each row; also those whose tables are in the cache together.
_GROUP = 64


def table_operations(rows: int, columns: int, *, bits: int = 4, together: int = 2) -> tuple[int, int]:
    """Additions and multiplications of a product with one vector: by tables, and as it is.

    Args:
        rows: of the matrix, ``m``.
        columns: ``k``, a multiple of ``together``.
        bits: of a code.
        together: columns of a table, ``d``.

    Raises:
        UsageError: columns that are no such multiple.

    Examples:
        >>> by_tables, plain = table_operations(4096, 4096)
        >>> round(plain / by_tables, 2)
        3.75
    """
    together = whole_number(together, "columns of a table", least=1)
    if columns % together:
        raise UsageError(f"{columns} columns are not a multiple of {together}, the columns of a table")
    entries = sum(2 ** (bits * t) for t in range(1, together + 1))
    return columns // together * (entries + rows), 2 * rows * columns


class CodedMatrix(NamedTuple):
    """A matrix in 4 bits; made by ``code_matrix``.

    Attributes:
        codes: two columns a byte, the first in the low half; ``uint8``, shape ``[rows, columns / 2]``.
        scales: of 64 columns each, ``float32``, shape ``[rows, ceil(columns / 64)]``.
    """

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.codes.shape[0], 2 * self.codes.shape[1]

    @property
    def num_bytes(self) -> int:
        """Of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers that the codes stand for, shape ``[rows, columns]``.

        Args:
            dtype: of them.
        """
        rows, columns = self.shape
        both = torch.stack([self.codes & 15, self.codes >> 4], dim=2).flatten(1).to(dtype).sub_(_ZERO)
        if columns % _GROUP:
            return both.mul_(self.scales.to(dtype).repeat_interleave(_GROUP, dim=1)[:, :columns])
        return both.view(rows, -1, _GROUP).mul_(self.scales.to(dtype).unsqueeze(2)).view(rows, columns)

    def product(self, x_RK: Tensor, method: str) -> Tensor:
        """Rows times the transposed matrix, as ``torch.nn.functional.linear``; on the CPU.

        The difference from exact arithmetic is at most ``columns`` times float32's rounding times the sum of the
        absolute products, as for any order of adding up.

        Args:
            x_RK: ``float32``, shape ``[R, columns]``.
            method: a key of ``METHODS``.

        Returns:
            Shape ``[R, rows]``.

        Raises:
            UsageError: an unknown method, or rows of another width or type.
        """
        method = spelled(method, METHODS, "way of a product")
        rows, columns = self.shape
        if x_RK.dim() != 2 or x_RK.shape[1] != columns or x_RK.dtype != torch.float32:
            raise UsageError(
                f"a product with {columns} columns of codes needs float32 [rows, {columns}], got {x_RK.dtype} "
                f"{list(x_RK.shape)}"
            )
        if method == "expand":
            return torch.nn.functional.linear(x_RK, self.dequantised())
        y = torch.zeros(len(x_RK), rows)
        multiply = _by_tables if method == "tables" else _one_by_one
        multiply(self.codes.numpy(), self.scales.numpy(), x_RK.detach().contiguous().numpy(), y.numpy())
        return y


@torch.no_grad()
def code_matrix(weight: Tensor) -> CodedMatrix:
    """A matrix in 4 bits: 15 equal steps, -7 to 7 times a scale of 64 columns, to the nearest.

    Args:
        weight: on the CPU, shape ``[rows, columns]``, an even number of columns.

    Returns:
        An eighth of float32's bytes, and a scale for 64 columns.

    Raises:
        UsageError: an odd number of columns, or numbers that are not finite.

    Examples:
        >>> coded = code_matrix(torch.tensor([[7.0, -3.0], [0.5, 0.0]]))
        >>> coded.dequantised().tolist(), coded.product(torch.tensor([[1.0, 1.0]]), "tables").tolist()
        ([[7.0, -3.0], [0.5, 0.0]], [[4.0, 0.5]])
    """
    if weight.dim() != 2 or weight.shape[1] % 2:
        raise UsageError(f"two codes share a byte: expected [rows, an even number of columns], got {weight.shape}")
    if not bool(weight.isfinite().all()):
        raise UsageError("a matrix with numbers that are not finite has no codes")
    rows, columns = weight.shape
    groups = -(-columns // _GROUP)
    padded = torch.nn.functional.pad(weight.float(), (0, groups * _GROUP - columns)).view(rows, groups, _GROUP)
    scales = padded.abs().amax(2) / 7
    steps = padded / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(2)
    codes = (steps.round().clamp(-7, 7) + _ZERO).to(torch.uint8).view(rows, -1)[:, :columns]
    return CodedMatrix((codes[:, ::2] | codes[:, 1::2] << 4).contiguous(), scales.contiguous())


@compiled_without_lock
def _by_tables(codes: Any, scales: Any, x: Any, y: Any) -> None:
    half = 32  # pairs that share a scale: their tables, 32 KB, stay in the nearest cache
    rows, pairs = codes.shape
    table = y[:1, :1].repeat(half * 256).reshape(half, 256)  # an array of the output's type
    for r in range(x.shape[0]):
        for first in range(0, pairs, half):
            last = min(first + half, pairs)
            for j in range(first, last):
                low, high = x[r, 2 * j], x[r, 2 * j + 1]
                value = -8 * low - 8 * high
                for v in range(16):  # each entry by one addition from another
                    table[j - first, v] = value
                    value += low
                for v in range(16, 256):
                    table[j - first, v] = table[j - first, v - 16] + high
            group = first // half
            for i in range(rows):
                total = y.dtype.type(0)
                for j in range(first, last):
                    total += table[j - first, codes[i, j]]
                y[r, i] += scales[i, group] * total


@compiled_without_lock
def _one_by_one(codes: Any, scales: Any, x: Any, y: Any) -> None:
    half = 32
    rows, pairs = codes.shape
    for r in range(x.shape[0]):
        for i in range(rows):
            sum_ = y.dtype.type(0)
            for first in range(0, pairs, half):
                total = y.dtype.type(0)
                for j in range(first, min(first + half, pairs)):
                    both = codes[i, j]
                    total += y.dtype.type((both & 15) - 8) * x[r, 2 * j]
                    total += y.dtype.type((both >> 4) - 8) * x[r, 2 * j + 1]
                sum_ += scales[i, first // half] * total
            y[r, i] = sum_
