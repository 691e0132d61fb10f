"""Which product multiplies the rows of each expert: one grouped, one for each, or one batched; chosen by the load.

Which is fastest depends on how many rows experts have and how unevenly. A table says how long each takes on this
machine; without one, torch's grouped product is taken wherever it can be.
"""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mycel.brief import brief
from mycel.errors import UsageError

__all__ = ["ProductShape", "ProductTable", "batched", "chosen_product", "knows", "one_each", "padded", "use_products"]

_FORMAT = {"format": "mycel.products", "version": 1}


class ProductShape(NamedTuple):
    """What a product is measured for: as many matrices of ``[out, in]``, their type, and where they are."""

    num_experts: int
    out_width: int
    in_width: int
    dtype: str
    device: str

    @staticmethod
    def of(weight_EOI: Tensor) -> ProductShape:
        """Of stacked matrices."""
        kind = str(weight_EOI.dtype).removeprefix("torch.")
        num_experts, out_width, in_width = weight_EOI.shape
        return ProductShape(num_experts, out_width, in_width, kind, weight_EOI.device.type)


#: Seconds an expert with as many rows as stand beside them; rows ascend.
Curve = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTable:
    """Measured times of products; ``mycel.moe.measure_products`` makes one, ``use_products`` puts it into force.

    Attributes:
        curves: for each shape and each of ``grouped``, ``each``, ``batched`` (all experts have equally many rows) and
            ``padded`` (they have not), seconds an expert by its rows.

    Raises:
        UsageError: a curve without points.

    Examples:
        >>> shape = ProductShape(2, 8, 4, "float32", "cpu")
        >>> curves = {"grouped": ((1, 2e-6), (9, 4e-6)), "each": ((1, 1e-6), (9, 8e-6)), "padded": ((1, 9e-6),)}
        >>> table = ProductTable(curves={shape: curves})
        >>> table.choose(shape, [1, 2]), table.choose(shape, [9, 8])
        ('each', 'grouped')
    """

    curves: Mapping[ProductShape, Mapping[str, Curve]]

    __repr__ = brief

    def __post_init__(self) -> None:
        if any(not curve for ways in self.curves.values() for curve in ways.values()):
            raise UsageError("a table of products has a curve without points; measure it again")

    def seconds(self, shape: ProductShape, counts: Sequence[int]) -> dict[str, float]:
        """Of each product that can be taken.

        Args:
            shape: one of ``curves``.
            counts: rows of each expert.
        """
        even = len(set(counts)) <= 1
        found = {}
        for way, curve in self.curves[shape].items():
            if way in ("grouped", "each"):
                found[way] = sum(_at(curve, rows) for rows in counts if rows)
            elif (way == "batched") == even:
                found[way] = len(counts) * _at(curve, max(counts, default=0))
        return found

    def choose(self, shape: ProductShape, counts: Sequence[int]) -> str:
        """The fastest for a load: the same for the same load and table, always."""
        if not any(counts):
            return "grouped"
        found = self.seconds(shape, counts)
        return min(found, key=lambda way: (found[way], way))

    def save(self, file: str | Path) -> None:
        """As JSON, for other runs and ranks: with the same table, the same products, and the same bits."""
        shapes = [{**shape._asdict(), "curves": dict(ways)} for shape, ways in self.curves.items()]
        Path(file).write_text(json.dumps({**_FORMAT, "shapes": shapes}) + "\n", encoding="utf-8")

    @staticmethod
    def load(file: str | Path) -> ProductTable:
        """What ``save`` wrote.

        Raises:
            UsageError: there is no such file, or it is another one.
        """
        try:
            content = json.loads(Path(file).read_text(encoding="utf-8"))
            if {key: content[key] for key in _FORMAT} != _FORMAT:
                raise ValueError(f"{_FORMAT['format']} of version {_FORMAT['version']} was expected")
            curves = {}
            for one in content["shapes"]:
                ways = one.pop("curves").items()
                curves[ProductShape(**one)] = {way: tuple((int(n), float(s)) for n, s in c) for way, c in ways}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{file}: no table of products that can be read: {error}") from error
        return ProductTable(curves=curves)


def _at(curve: Curve, rows: int) -> float:
    """Between measured points in a straight line; beyond the last in proportion, below the first as there."""
    place = bisect_left(curve, (rows, 0.0))
    if place == 0:
        return curve[0][1] if rows else 0.0
    low, low_s = curve[place - 1]
    if place == len(curve):
        return low_s * rows / low
    high, high_s = curve[place]
    return low_s + (high_s - low_s) * (rows - low) / (high - low)


_table: ProductTable | None = None


def use_products(table: ProductTable | None) -> ProductTable | None:
    """Choose products by a table from now on, in this process, for the shapes that it has.

    It is asked where torch's grouped product would be taken: on CPUs, and on GPUs after
    ``use_kernels("grouped_mm")``, where the host then waits for the numbers of rows. Results differ by rounding
    between products; a table that is saved and loaded makes runs alike.

    Args:
        table: of ``mycel.moe.measure_products``; ``None``: the grouped product.

    Returns:
        What was in force before.

    References:
        Qian et al., "EPS-MoE: Expert Pipeline Scheduler for Cost-Efficient MoE Inference", 2024 (arXiv 2410.12247;
        choice of the GEMM by load).

    Examples:
        >>> from mycel.moe import MoE, measure_products
        >>> layer = MoE(dim=16, hidden=32, num_experts=4)
        >>> use_products(measure_products(layer, rows=(1, 8), trials=1))
        >>> layer(torch.randn(6, 16)).shape  # products are chosen by what arrives at each expert
        torch.Size([6, 16])
        >>> _ = use_products(None)
    """
    global _table
    before, _table = _table, table
    return before


def knows(weight_EOI: Tensor) -> bool:
    """Whether the table in force has such matrices."""
    return _table is not None and ProductShape.of(weight_EOI) in _table.curves


def chosen_product(weight_EOI: Tensor, counts: Sequence[int]) -> str:
    """Of the table in force, which knows such matrices."""
    assert _table is not None
    return _table.choose(ProductShape.of(weight_EOI), counts)


# -- products beside the grouped one ------------------------------------------------------------------------------


def one_each(x_RI: Tensor, weight_EOI: Tensor, counts: Sequence[int]) -> Tensor:
    """A product for each expert that has rows; rows after the last expert's are zero."""
    y_RO = x_RI.new_empty(x_RI.shape[0], weight_EOI.shape[1])
    end = 0
    for expert, count in enumerate(counts):
        begin, end = end, end + count
        if count:
            torch.mm(x_RI[begin:end], weight_EOI[expert].t(), out=y_RO[begin:end])
    y_RO[end:].zero_()
    return y_RO


def batched(x_RI: Tensor, weight_EOI: Tensor, counts: Sequence[int]) -> Tensor:
    """One product of all experts, which have equally many rows."""
    E, used = len(counts), sum(counts)
    y_EnO = torch.bmm(x_RI[:used].reshape(E, counts[0], x_RI.shape[1]), weight_EOI.transpose(1, 2))
    y_RO = y_EnO.reshape(used, weight_EOI.shape[1])
    return y_RO if used == x_RI.shape[0] else torch.cat([y_RO, y_RO.new_zeros(x_RI.shape[0] - used, y_RO.shape[1])])


def padded(x_RI: Tensor, weight_EOI: Tensor, counts: Sequence[int]) -> Tensor:
    """One product of all experts, each with rows of zeros up to the largest load."""
    E, most = len(counts), max(counts, default=0)
    x_EnI = x_RI.new_zeros(E, most, x_RI.shape[1])
    begin = 0
    for expert, count in enumerate(counts):
        x_EnI[expert, :count] = x_RI[begin : begin + count]
        begin += count
    y_EnO = torch.bmm(x_EnI, weight_EOI.transpose(1, 2))
    y_RO = x_RI.new_empty(x_RI.shape[0], weight_EOI.shape[1])
    begin = 0
    for expert, count in enumerate(counts):
        y_RO[begin : begin + count] = y_EnO[expert, :count]
        begin += count
    y_RO[begin:].zero_()
    return y_RO
