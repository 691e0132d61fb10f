"""In how many tiles a product and its collective go, by a model of both; one is an answer.

A tile's collective takes as long as the model says of that many bytes, and follows the one before it; a tile's
product waits for its rows, or its collective for the product (``mycel.cost.makespan``). Every tile has work of its
own, and shorter products are slower, so that many tiles lose again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from mycel.brief import brief
from mycel.cost import makespan
from mycel.errors import UsageError
from mycel.overlap.rates import Network, Products, group_rates
from mycel.units import format_seconds

__all__ = ["MOST_TILES", "Shape", "Tiling", "choose_tiling", "count_tiles", "plan_tiles"]

#: Which operator is cut.
Operator = Literal["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "update"]

MOST_TILES = 16
_TILES = (1, 2, 4, 8, MOST_TILES)
#: Part of the plain program's time that tiles have to save by the model: what it does not know of costs about that.
_WORTH = 0.03
#: Of numbers of tiles whose modelled times are within this part of the least, the smallest is taken: every tile has
#: costs that the model does not know.
_ALIKE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is computed and sent.

    Attributes:
        operator: which.
        rows: of the whole array, on all ranks together.
        inner: columns of what is multiplied; of an update, 0.
        columns: of the product; of an update, 1.
        item_bytes: of an element.
        num_ranks: of the group.

    Raises:
        UsageError: a negative size, or no rank.
    """

    operator: Operator
    rows: int
    inner: int
    columns: int
    item_bytes: int
    num_ranks: int

    def __post_init__(self) -> None:
        if min(self.rows, self.inner, self.columns, self.item_bytes) < 0 or self.num_ranks < 1:
            raise UsageError(f"{self}: sizes are 0 or more, and there is a rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """A number of tiles, and why.

    Attributes:
        shape: of what.
        tiles: how many.
        seconds: modelled, by number of tiles, those that were weighed.
        compute_s: of the whole product, or update.
        exchange_s: of the collective in one piece.
        source: of the network's times.
        is_given: the number was not chosen, but given.

    Examples:
        >>> shape = Shape(operator="matmul_reduce_scatter", rows=8, inner=8, columns=8, item_bytes=4, num_ranks=2)
        >>> tiling = Tiling(shape=shape, tiles=2, seconds=((1, 2.0), (2, 1.5)), compute_s=1.0, exchange_s=1.0)
        >>> print(tiling.explain().partition("; ")[2])
        product 1 s, exchange 1 s; 1 tile 2 s, 2 tiles 1.5 s
    """

    shape: Shape
    tiles: int
    seconds: tuple[tuple[int, float], ...] = ()
    compute_s: float = 0.0
    exchange_s: float = 0.0
    source: str = ""
    is_given: bool = False

    __repr__ = brief

    @property
    def plain_s(self) -> float:
        """Modelled seconds in one tile."""
        return dict(self.seconds).get(1, self.compute_s + self.exchange_s)

    @property
    def chosen_s(self) -> float:
        """Modelled seconds in as many tiles as were chosen."""
        return dict(self.seconds).get(self.tiles, self.plain_s)

    def explain(self) -> str:
        """Why so many, in a line."""
        shape = self.shape
        work = "update" if shape.operator == "update" else "product"
        sizes = (
            f"{shape.rows} elements"
            if shape.operator == "update"
            else f"{shape.rows} x {shape.inner} @ {shape.inner} x {shape.columns}"
        )
        what = f"{shape.operator} of {sizes} over {shape.num_ranks} rank{'s' * (shape.num_ranks > 1)}"
        if self.is_given or not self.seconds:
            return f"{what}: {_tiles(self.tiles)}, {'as given' if self.is_given else 'nothing to overlap'}"
        told = ", ".join(f"{_tiles(tiles)} {format_seconds(s)}" for tiles, s in self.seconds)
        by = f" ({self.source})" if self.source else ""
        times = f"{work} {format_seconds(self.compute_s)}, exchange {format_seconds(self.exchange_s)}{by}"
        return f"{what}: {_tiles(self.tiles)}; {times}; {told}"


def _tiles(count: int) -> str:
    return f"{count} tile{'s' * (count > 1)}"


def choose_tiling(shape: Shape, products: Products, network: Network) -> Tiling:
    """The fewest tiles whose modelled time is about the least, if that is worth it.

    Args:
        shape: of what.
        products: rates of the slowest rank.
        network: times of collectives.
    """
    if shape.num_ranks == 1 or not shape.rows or not shape.columns:
        return Tiling(shape=shape, tiles=1)
    model = _MODELS[shape.operator]
    most = shape.rows // shape.num_ranks
    seconds = tuple((tiles, model(shape, tiles, products, network)) for tiles in _TILES if tiles <= max(1, most))
    best_s = min(modelled for _, modelled in seconds)
    tiles = next(count for count, modelled in seconds if modelled <= (1 + _ALIKE) * best_s)
    if best_s > (1 - _WORTH) * seconds[0][1]:
        tiles = 1
    return Tiling(
        shape=shape,
        tiles=tiles,
        seconds=seconds,
        compute_s=_compute(shape, products),
        exchange_s=_exchange(shape, network),
        source=network.source,
    )


def _compute(shape: Shape, products: Products) -> float:
    if shape.operator == "update":  # reads and writes some ten arrays of the slice
        return 10 * shape.rows * shape.item_bytes / shape.num_ranks / products.bytes_per_second
    return products.seconds(shape.rows, shape.inner, shape.columns)


def _moved(shape: Shape) -> int:
    """Bytes of the array that travels."""
    width = shape.inner if shape.operator == "all_gather_matmul" else shape.columns
    return shape.rows * width * shape.item_bytes


def _exchange(shape: Shape, network: Network) -> float:
    moved = _moved(shape)
    if shape.operator == "update":
        return network.seconds("reduce_scatter", moved) + network.seconds("all_gather", moved)
    if shape.operator == "all_gather_matmul":
        return network.seconds("all_gather", moved)
    return network.seconds("reduce_scatter" if shape.operator == "matmul_reduce_scatter" else "all_reduce", moved)


def _blocks_s(shape: Shape, tiles: int, products: Products, blocks: int) -> float:
    """Of the products of a tile, one for each of some ranks' rows."""
    rows = shape.rows / shape.num_ranks / tiles
    return blocks * products.seconds(max(1, int(rows)), shape.inner, shape.columns)


def _gather_first(shape: Shape, tiles: int, products: Products, network: Network) -> float:
    moved_s = network.seconds("all_gather", _moved(shape) // tiles) + network.turn_s
    if tiles == 1:
        return makespan([(0.0, moved_s), (_compute(shape, products), 0.0)], 1)
    others = _blocks_s(shape, tiles, products, shape.num_ranks - 1)
    own = products.seconds(shape.rows // shape.num_ranks, shape.inner, shape.columns)
    return makespan([(network.host_s, moved_s), (others, 0.0)], tiles, beside_s=own, hidden=network.hidden)


def _product_first(shape: Shape, tiles: int, products: Products, network: Network) -> float:
    moved_s = network.seconds("reduce_scatter", _moved(shape) // tiles) + network.turn_s
    work_s = _compute(shape, products) if tiles == 1 else _blocks_s(shape, tiles, products, shape.num_ranks)
    return makespan([(work_s + network.host_s * (tiles > 1), moved_s)], tiles, hidden=network.hidden)


def _everywhere(shape: Shape, tiles: int, products: Products, network: Network) -> float:
    moved_s = network.seconds("all_reduce", _moved(shape) // tiles) + network.turn_s
    work_s = products.seconds(max(1, shape.rows // tiles), shape.inner, shape.columns)
    return makespan([(work_s + network.host_s * (tiles > 1), moved_s)], tiles, hidden=network.hidden)


def _update(shape: Shape, tiles: int, products: Products, network: Network) -> float:
    moved = _moved(shape) // tiles
    there_s, back_s = (network.seconds(name, moved) + network.turn_s for name in ("reduce_scatter", "all_gather"))
    host_s = network.host_s
    stages = [(host_s, there_s), (_compute(shape, products) / tiles + host_s, back_s)]
    return makespan(stages, tiles, hidden=network.hidden)


_MODELS: dict[str, Callable[[Shape, int, Products, Network], float]] = {
    "all_gather_matmul": _gather_first,
    "matmul_reduce_scatter": _product_first,
    "matmul_all_reduce": _everywhere,
    "update": _update,
}

_CHOSEN: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Shape, torch.dtype], Tiling]] = WeakKeyDictionary()


def plan_tiles(
    operator: Operator,
    rows: int,
    inner: int,
    columns: int,
    *,
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    device: torch.device | None = None,
    tiles: int | None = None,
) -> Tiling:
    """In how many tiles an operator will go. The first call for a group measures: all of its ranks make it.

    Args:
        operator: ``"all_gather_matmul"``, ``"matmul_reduce_scatter"``, ``"matmul_all_reduce"`` or ``"update"``.
        rows: of the whole array, on all ranks together; of an update, elements.
        inner: columns of what is multiplied.
        columns: of the product.
        dtype: of the elements.
        group: the ranks.
        device: where the product is computed; the processor if not given.
        tiles: a number that is given instead.

    Raises:
        UsageError: an operator that does not exist, or no tile.

    Examples:
        On every rank::

            tiling = plan_tiles("all_gather_matmul", 1024, 1024, 768, dtype=torch.float32, group=group)
            print(tiling.tiles, tiling.explain())
    """
    if operator not in _MODELS:
        raise UsageError(f"unknown operator {operator!r}; known: {', '.join(_MODELS)}")
    if tiles is not None and (isinstance(tiles, bool) or not isinstance(tiles, int) or tiles < 1):
        raise UsageError(f"{tiles!r} tiles: a whole number from 1, or None to choose")
    shape = Shape(
        operator=operator,
        rows=rows,
        inner=inner,
        columns=columns,
        item_bytes=dtype.itemsize,
        num_ranks=dist.get_world_size(group),
    )
    if tiles is not None:
        return Tiling(shape=shape, tiles=tiles, is_given=True)
    if shape.num_ranks == 1:
        return Tiling(shape=shape, tiles=1)
    known = _CHOSEN.setdefault(group, {})
    key = (shape, dtype)
    if key not in known:
        rates = group_rates(group, dtype, device or torch.device("cpu"))
        known[key] = choose_tiling(shape, *rates)
    return known[key]


def count_tiles(
    operator: Operator,
    rows: Sequence[int],
    inner: int,
    columns: int,
    *,
    like: torch.Tensor,
    group: dist.ProcessGroup,
    tiles: int | None,
) -> int:
    """How many tiles ``plan_tiles`` comes to.

    Args:
        operator, inner, columns, group, tiles: as for ``plan_tiles``.
        rows: of each rank.
        like: of the elements' type, where the product is computed.
    """
    planned = plan_tiles(
        operator, sum(rows), inner, columns, dtype=like.dtype, group=group, device=like.device, tiles=tiles
    )
    return planned.tiles
