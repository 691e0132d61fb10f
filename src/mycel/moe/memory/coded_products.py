"""Which way of a product with codes is the fastest here: measured once, looked up by shape and rows."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from mycel.arguments import whole_number
from mycel.brief import brief
from mycel.errors import UsageError
from mycel.moe.memory.lookup import METHODS, code_matrix

__all__ = ["CodedProducts", "measure_coded_products"]

#: Rows and columns of a matrix.
Shape = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedProducts:
    """Measured times of products with codes; made by ``measure_coded_products``.

    Attributes:
        seconds: by shape of the matrix and number of rows, of each way.

    Raises:
        UsageError: nothing measured for a shape.

    Examples:
        >>> few, many = {"tables": 1.0, "expand": 3.0}, {"tables": 90.0, "expand": 9.0}
        >>> products = CodedProducts(seconds={(64, 32): {1: few, 100: many}})
        >>> products.choose((64, 32), 2), products.choose((64, 32), 64)
        ('tables', 'expand')
    """

    seconds: Mapping[Shape, Mapping[int, Mapping[str, float]]]

    __repr__ = brief

    def __post_init__(self) -> None:
        if any(not ways for by_rows in self.seconds.values() for ways in (by_rows, *by_rows.values())):
            raise UsageError("times of products with codes without a time; measure them again")

    def choose(self, shape: Shape, rows: int) -> str:
        """The fastest way at the measured number of rows that is nearest, as a ratio.

        Args:
            shape: of the matrix.
            rows: to be multiplied.

        Returns:
            The same for the same load; ``expand`` for shapes that nobody measured.
        """
        by_rows = self.seconds.get(shape)
        if by_rows is None:
            return "expand"
        nearest = min(by_rows, key=lambda known: (abs(math.log(known / max(rows, 1))), known))
        return min(by_rows[nearest], key=lambda way: (by_rows[nearest][way], way))


def measure_coded_products(
    shapes: Iterable[Shape], rows: Sequence[int] = (1, 4, 16, 64), *, repeats: int = 3
) -> CodedProducts:
    """Time all ways of products with random codes, in turns, and keep the medians.

    Args:
        shapes: rows and columns of matrices.
        rows: numbers of vectors.
        repeats: of each, after one to warm up.

    Raises:
        UsageError: no rows, or numbers below 1.

    Examples:
        >>> measured = measure_coded_products([(8, 4)], [1], repeats=1)
        >>> measured.choose((8, 4), 1) in measured.seconds[8, 4][1]
        True
    """
    repeats = whole_number(repeats, "repeats", least=1)
    made = torch.Generator().manual_seed(0)
    found: dict[Shape, dict[int, dict[str, float]]] = {}
    for shape in dict.fromkeys(shapes):
        coded = code_matrix(torch.randn(shape, generator=made))
        found[shape] = {}
        for count in rows:
            x = torch.randn(whole_number(count, "rows", least=1), shape[1], generator=made)
            times: dict[str, list[float]] = {way: [] for way in METHODS}
            for repeat in range(repeats + 1):
                for way in METHODS:
                    begin = time.perf_counter()
                    coded.product(x, way)
                    if repeat:
                        times[way].append(time.perf_counter() - begin)
            found[shape][count] = {way: statistics.median(taken) for way, taken in times.items()}
    return CodedProducts(seconds=found)
