"""The error of the output as all stages get it: its rows, or projections of them, as they are or in three values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mycel.errors import UsageError
from mycel.names import spelled
from mycel.wire.digits import digits_bytes, pack_digits, unpack_digits
from mycel.wire.noise import uniform

__all__ = ["ERRORS", "ErrorForm", "check_rows", "feedback_bytes", "feedback_matrix"]

#: What travels of an error.
ERRORS = ("float32", "ternary")


def feedback_bytes(rows: int, classes: int, width: int, form: str = "float32") -> int:
    """Bytes of the one message that replaces a pipeline's backward pass.

    Args:
        rows: of the output: examples, or tokens.
        classes: numbers in a row of the output.
        width: of the widest block; where it is less than ``classes``, rows are projected to it first.
        form: ``float32``, or ``ternary``: five values a byte, and a scale a row.

    Returns:
        To each of the other ranks. A pipeline sends ``4 rows width`` back over each boundary.

    Raises:
        UsageError: an unknown form.

    Examples:
        >>> feedback_bytes(128, 10, 256), feedback_bytes(128, 10, 256, "ternary"), 4 * 128 * 256
        (5120, 768, 131072)
    """
    form = spelled(form, ERRORS, "form of errors")
    columns = min(classes, width)
    return 4 * rows * columns if form == "float32" else 4 * rows + digits_bytes(rows * columns, 3)


def feedback_matrix(seed: int, block: int, columns: int, features: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The fixed random matrix by which an error reaches a block; it never travels and is never trained.

    Args:
        seed: of the run, the same on all ranks.
        block: number of the block in the whole model; -1: the projection that all share.
        columns: of the error.
        features: numbers in a row of the block's output.
        dtype: of the result.

    Returns:
        Normal, with variance ``1 / columns``; shape ``[columns, features]``, the same wherever the block is.

    Examples:
        >>> feedback_matrix(0, 3, 10, 4).shape
        torch.Size([10, 4])
    """
    made = torch.Generator().manual_seed((seed * 1_000_003 + block + 1) % 2**63)
    return (torch.randn(columns, features, generator=made) / math.sqrt(columns)).to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorForm:
    """How rows of an error travel.

    A ternary error keeps a scale *a row*, its largest entry. With one for the whole batch, examples that are learnt
    already, whose errors are small, weigh as much as others or nothing at all, and an optimizer that divides by the
    size of gradients, such as Adam, undoes the rest: training fails. An entry is kept by chance, as often as it is
    large, so that the mean is the error. Where it is kept above a threshold, the error of a softmax, whose one large
    entry balances many small ones, comes out with another sum, always to one side, and deep models drift.

    Attributes:
        name: ``float32`` or ``ternary``.

    Raises:
        UsageError: an unknown name.

    Examples:
        >>> form = ErrorForm(name="ternary")
        >>> error = torch.tensor([[0.5, -1.0, 0.0], [0.0, 0.0, 0.0]])
        >>> form.decode(form.encode(error, 2), 2, 3).tolist(), form.decode(form.encode(error, 3), 2, 3).tolist()
        ([[0.0, -1.0, 0.0], [0.0, 0.0, 0.0]], [[1.0, -1.0, 0.0], [0.0, 0.0, 0.0]])
    """

    name: str

    def __post_init__(self) -> None:
        spelled(self.name, ERRORS, "form of errors")

    def num_bytes(self, rows: int, columns: int) -> int:
        """Of a message."""
        return feedback_bytes(rows, columns, columns, self.name)

    def encode(self, error: Tensor, seed: int = 0) -> Tensor:
        """Bytes of an error ``[rows, columns]``.

        Args:
            error: what is sent.
            seed: of the chances of a ternary one, another each time.
        """
        plain = error.float().contiguous()
        if self.name == "float32":
            return plain.view(-1).view(torch.uint8)
        sizes = plain.abs()
        scales = sizes.amax(1)
        chances = uniform(seed, plain.numel(), plain.device).view_as(plain)
        digits = (plain.sign() * (chances * scales.unsqueeze(1) < sizes) + 1).to(torch.uint8)
        return torch.cat([scales.contiguous().view(torch.uint8), pack_digits(digits.view(-1), 3)])

    def decode(self, payload: Tensor, rows: int, columns: int) -> Tensor:
        """The error that a message stands for, ``float32``, ``[rows, columns]``."""
        if self.name == "float32":
            return payload.clone().view(torch.float32).view(rows, columns)
        scales = payload[: 4 * rows].clone().view(torch.float32)
        digits = unpack_digits(payload[4 * rows :].contiguous(), rows * columns, 3)
        return (digits.to(torch.float32).view(rows, columns) - 1) * scales.unsqueeze(1)


def check_rows(rows: int, numel: int, block: int) -> None:
    """Refuse a block whose output has no row for each of the error's.

    Raises:
        UsageError: as said.
    """
    if numel % rows:
        raise UsageError(
            f"block {block} gives {numel} numbers for {rows} rows of the output's error, which is no whole number a "
            "row; direct feedback needs blocks that keep examples apart"
        )
