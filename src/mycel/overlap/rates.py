"""How fast a group's ranks multiply, and its network moves: what the choice of tiles is made of.

Products are measured, on all ranks at once, so that ranks that share processors are measured sharing them. The
network's times come from the topology where the group is mycel's and knows its bandwidths, and from two measured
sizes where not. All ranks keep the slowest rank's figures, so that all choose alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.comm.messages import all_gather_single, reduce_scatter_single
from mycel.comm.nodes import with_bandwidths
from mycel.cost import Line
from mycel.errors import UsageError

__all__ = ["Network", "Products", "Rates", "group_rates"]

#: A collective whose time is asked for.
Exchange = Literal["all_gather", "reduce_scatter", "all_reduce"]

#: Rows of measured products, and their other two sizes: large enough for a kernel's full rate, milliseconds each.
_ROWS = (16, 64, 256, 1024)
_INNER, _COLUMNS = 512, 512
#: Bytes of measured collectives, of the whole array.
_SMALL, _LARGE = 1 << 13, 1 << 20
_REPEATS = 7
#: Seconds that a measured exchange of many bytes may take.
_LONGEST_S = 0.025
#: Exchanges one after the other, for what each costs beyond its bytes.
_TURNS = 4

K = TypeVar("K")


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """Seconds of matrix products, by their rows.

    Attributes:
        rows: of measured products, ascending.
        flops: operations a second at so many rows.
        bytes_per_second: at which rows are added to others, one array into another.

    Raises:
        UsageError: nothing measured, or a rate that is not positive.

    Examples:
        >>> products = Products(rows=(64, 256), flops=(1e9, 2e9), bytes_per_second=1e10)
        >>> products.seconds(256, 1000, 1000), products.seconds(8, 1000, 1000)
        (0.256, 0.016)
    """

    rows: tuple[int, ...]
    flops: tuple[float, ...]
    bytes_per_second: float

    def __post_init__(self) -> None:
        if not self.rows or len(self.rows) != len(self.flops) or list(self.rows) != sorted(set(self.rows)):
            raise UsageError(f"rates of products at {self.rows} rows: {self.flops}; one for each, rows ascending")
        if not all(0 < rate < float("inf") for rate in (*self.flops, self.bytes_per_second)):
            raise UsageError(f"{self}: rates are above 0")

    def seconds(self, rows: int, inner: int, columns: int) -> float:
        """Of ``[rows, inner]`` times ``[inner, columns]``, at the rate of the nearest number of rows below it."""
        flops = next((f for r, f in zip(self.rows[::-1], self.flops[::-1], strict=True) if rows >= r), self.flops[0])
        return 2 * rows * inner * columns / flops


@dataclass(frozen=True, kw_only=True)
class Network:
    """Seconds of a group's collectives.

    Attributes:
        seconds: of an exchange of an array of so many bytes.
        source: where that comes from, in words.
        host_s: that a rank is held up by starting and awaiting one more exchange beside a product.
        turn_s: between the end of an exchange and the beginning of the next one that was started meanwhile.
        hidden: of what a product and an exchange could save by going on at the same time, the share that they do:
            what moves bytes may need the processors that multiply.
    """

    seconds: Callable[[Exchange, int], float]
    source: str
    host_s: float = 1.5e-4
    turn_s: float = 0.0
    hidden: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Of one group: of its processors by type of element, and of its network."""

    network: Network
    products: dict[torch.dtype, Products] = field(default_factory=dict)


_RATES: WeakKeyDictionary[dist.ProcessGroup, Rates] = WeakKeyDictionary()


@torch.no_grad()
def group_rates(group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device) -> tuple[Products, Network]:
    """Rates of a group, measured when they are first asked for: then all of its ranks call this.

    Args:
        group: of two ranks or more.
        dtype: of the products' elements.
        device: where they are.
    """
    rates = _RATES.get(group)
    if rates is None:
        network = _of_topology(group) or _measured(group, device)
        rates = _RATES[group] = Rates(network=_with_overheads(network, group, device))
    if dtype not in rates.products:
        rates.products[dtype] = _measured_products(group, dtype, device)
    return rates.products[dtype], rates.network


def _of_topology(group: dist.ProcessGroup) -> Network | None:
    """What the model says of the schedules that run; ``None``: nothing knows bandwidths. The same on all ranks."""
    communicator = with_bandwidths(group)
    if communicator is None:
        return None
    name = communicator.topology.name

    def seconds(exchange: Exchange, num_bytes: int) -> float:
        return communicator.planner.choice(exchange, None, num_bytes).seconds if num_bytes else 0.0

    return Network(seconds=seconds, source=f"topology {name}")


def _measured(group: dist.ProcessGroup, device: torch.device) -> Network:
    size = dist.get_world_size(group)
    points: dict[tuple[Exchange, int], float] = {}
    for num_bytes in (_SMALL, _LARGE):
        part = torch.zeros(num_bytes // 4 // size, device=device)
        whole = part.new_zeros(part.numel() * size)
        ways: dict[Exchange, Callable[[], object]] = {
            "all_gather": lambda whole=whole, part=part: all_gather_single(whole, part, group=group),  # type: ignore[misc]
            "reduce_scatter": lambda whole=whole, part=part: reduce_scatter_single(part, whole, group=group),  # type: ignore[misc]
            "all_reduce": lambda whole=whole: dist.all_reduce(whole, group=group),  # type: ignore[misc]
        }
        for exchange, run in ways.items():
            points[exchange, num_bytes] = _middle(run, device)
    slowest = _slowest(points, group, device)
    lines: Mapping[str, Line] = {
        exchange: Line.through((_SMALL, slowest[exchange, _SMALL]), (_LARGE, slowest[exchange, _LARGE]))
        for exchange, _ in points
    }
    return Network(
        seconds=lambda exchange, num_bytes: lines[exchange].at(num_bytes) if num_bytes else 0.0,
        source="two measured sizes",
    )


def _with_overheads(network: Network, group: dist.ProcessGroup, device: torch.device) -> Network:
    """What exchanges cost beyond what the model says of each: many small ones, alone and beside products, and how
    much of a long one products hide. Ways are run in turns and compared turn by turn: what else runs on the
    processors comes and goes.
    """
    size, part = dist.get_world_size(group), torch.zeros(_SMALL // 4, device=device)
    wholes = [part.new_zeros(part.numel() * size) for _ in range(_TURNS)]
    weight = torch.ones(_INNER, _COLUMNS, device=device)
    x = weight.new_ones(_ROWS[-2], _INNER)  # not the longest: of two long times the difference is noise
    out = weight.new_empty(_ROWS[-2], _COLUMNS)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(x, weight, out=out)

    def small(each: int) -> None:
        works = [all_gather_single(whole, part, group=group, async_op=True) for whole in wholes]
        for work in works:
            products(each)
            work.wait()

    beside, alone, exchanges = _in_turns([lambda: small(1), lambda: products(_TURNS), lambda: small(0)], device)
    (product_s,) = _slowest({"product": statistics.median(alone) / _TURNS}, group, device).values()
    num_bytes = _LARGE
    while num_bytes > _SMALL and network.seconds("reduce_scatter", num_bytes) > _LONGEST_S:
        num_bytes //= 2
    count = max(1, round(network.seconds("reduce_scatter", num_bytes) / max(product_s, 1e-6)))
    own = torch.zeros(num_bytes // 4 // size, device=device)
    whole = own.new_zeros(own.numel() * size)

    def long(count: int) -> None:
        work = reduce_scatter_single(own, whole, group=group, async_op=True)
        products(count)
        work.wait()

    both, computed, moved = _in_turns([lambda: long(count), lambda: products(count), lambda: long(0)], device)
    shares = [(c + m - b) / max(min(c, m), 1e-9) for b, c, m in zip(both, computed, moved, strict=True)]
    found = _slowest(
        {
            "host": statistics.median(b - a for b, a in zip(beside, alone, strict=True)) / _TURNS,
            "exchange": statistics.median(exchanges) / _TURNS,
            "lost": 1 - statistics.median(shares),
        },
        group,
        device,
    )
    return replace(
        network,
        host_s=max(0.0, found["host"]),
        turn_s=max(0.0, found["exchange"] - network.seconds("all_gather", wholes[0].nbytes)),
        hidden=min(1.0, max(0.0, 1 - found["lost"])),
    )


def _in_turns(ways: Sequence[Callable[[], object]], device: torch.device) -> list[list[float]]:
    """Seconds of each way in each turn."""
    spent: list[list[float]] = [[] for _ in ways]
    for turn in range(_REPEATS + 1):  # the first one may have to connect, or to compile
        for found, way in zip(spent, ways, strict=True):
            begin = _now(device)
            way()
            if turn:
                found.append(_now(device) - begin)
    return spent


def _measured_products(group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device) -> Products:
    weight = torch.ones(_INNER, _COLUMNS, dtype=dtype, device=device)
    points: dict[int, float] = {}
    for rows in _ROWS:
        x = weight.new_ones(rows, _INNER)
        out = weight.new_empty(rows, _COLUMNS)
        points[rows] = _middle(lambda x=x, out=out: torch.mm(x, weight, out=out), device)  # type: ignore[misc]
    big = weight.new_ones(1 << 20)
    points[0] = _middle(lambda: big.add_(big), device)
    found = _slowest(points, group, device)
    flops = [2 * rows * _INNER * _COLUMNS / max(found[rows], 1e-9) for rows in _ROWS]
    # More rows are never slower a row: what says so is noise.
    rising = [max(flops[: i + 1]) for i in range(len(flops))]
    return Products(rows=_ROWS, flops=tuple(rising), bytes_per_second=big.nbytes / max(found[0], 1e-9))


def _slowest(points: Mapping[K, float], group: dist.ProcessGroup, device: torch.device) -> dict[K, float]:
    seconds = torch.tensor(list(points.values()), dtype=torch.float64, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
    return dict(zip(points, seconds.tolist(), strict=True))


def _middle(operation: Callable[[], Tensor | object], device: torch.device) -> float:
    """Median seconds: what else runs on the processors counts, as it will."""
    return statistics.median(_in_turns([operation], device)[0])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
