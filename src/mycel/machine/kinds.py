"""Kinds of values that translated code knows: numbers as the processor has them, and arrays of them in memory.

Nothing is promoted behind anybody's back: two numbers are added if they are of one kind, and a program that wants
something else says so (``np.uint32(x)``), as in C without its conversions. Truths alone count as whole numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

__all__ = [
    "BOOL",
    "FLOAT64",
    "INT64",
    "NOTHING",
    "Array",
    "Kind",
    "Known",
    "Scalar",
    "Table",
    "Value",
    "element_of",
    "llvm_type",
]


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number.

    Attributes:
        name: as numpy has it.
        bits: its width.
        is_float, is_signed: what it is.
    """

    name: str
    bits: int
    is_float: bool = False
    is_signed: bool = True

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Array:
    """Numbers one after the other: an address and how many there are."""

    element: Scalar

    def __str__(self) -> str:
        return f"array of {self.element}"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of 64-bit integers: an address, how many rows, and how many in each."""

    def __str__(self) -> str:
        return "table"


@dataclass(frozen=True, slots=True)
class Known:
    """Something that is known while code is translated, and gone when it runs: a function, a type, a module."""

    what: Any

    def __str__(self) -> str:
        return f"{self.what!r}"


Kind = Scalar | Array | Table | Known | None


@dataclass(frozen=True, slots=True)
class Value:
    """What an expression gives.

    Attributes:
        kind: of what kind; ``None``: nothing.
        parts: LLVM's values: one of a number, an array's address and length, and so on.
    """

    kind: Kind
    parts: tuple[Any, ...] = ()

    @property
    def number(self) -> Any:
        """LLVM's value of a number."""
        return self.parts[0]


BOOL = Scalar("bool", 1, is_signed=False)
INT64 = Scalar("int64", 64)
FLOAT64 = Scalar("float64", 64, is_float=True)
NOTHING = Value(None)

_SCALARS: dict[Any, Scalar] = {
    np.float32: Scalar("float32", 32, is_float=True),
    np.float64: FLOAT64,
    np.int8: Scalar("int8", 8),
    np.int16: Scalar("int16", 16),
    np.int32: Scalar("int32", 32),
    np.int64: INT64,
    np.uint8: Scalar("uint8", 8, is_signed=False),
    np.uint16: Scalar("uint16", 16, is_signed=False),
    np.uint32: Scalar("uint32", 32, is_signed=False),
    np.uint64: Scalar("uint64", 64, is_signed=False),
    int: INT64,
    bool: BOOL,
}


def element_of(what: object) -> Scalar | None:
    """The number that a type of numpy's, or of Python's, stands for; ``None`` where it is none."""
    return _SCALARS.get(what) if isinstance(what, type) else None


@cache
def llvm_type(scalar: Scalar) -> Any:
    """LLVM's type of a number."""
    from llvmlite import ir

    if scalar.is_float:
        return ir.FloatType() if scalar.bits == 32 else ir.DoubleType()
    return ir.IntType(scalar.bits)
