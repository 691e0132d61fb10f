"""What exchanges along a sequence take between the ranks of a group.

A topology says what wires carry, and schedules how they are used. What headers, connections that share a link and
processors leave of that is measured once, for each kind of exchange. Where there is no topology, two measured sizes
are all that is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median
from time import perf_counter
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from mycel.collectives.routes import Routes
from mycel.comm import ByteMeter, nodes_of
from mycel.comm.exchange import start_permute, start_swap
from mycel.comm.messages import all_gather_single, reduce_scatter_single
from mycel.comm.nodes import with_bandwidths
from mycel.cost import Line, bytes_per_second
from mycel.runtime.communicator import Communicator

__all__ = ["Fabric", "agreed", "fabric_of"]

#: Bytes that each rank has from each, where no topology says how fast links are.
_SMALL, _LARGE = 1 << 12, 1 << 18
#: Where it does: so many that an all_gather of them takes so long, within these bounds.
_CORRECTED_S, _LEAST_CORRECTED, _MOST_CORRECTED = 0.06, 1 << 14, 1 << 20
_REPEATS = 3
#: Of bytes, from each rank to each.
Matrix = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """Seconds of exchanges between some ranks; the same on all of them.

    Attributes:
        gather: of an all_gather, of the bytes that a rank has in the end.
        scatter: of a reduce_scatter, of the bytes that a rank has at first.
        exchange: of an uneven all_to_all, of the bytes from each rank to each.
        permute: the same where each has one block, for one other, and all ranks know how long they are.
        nodes: ranks of each node.
        source: where this is from.
    """

    gather: Callable[[int], float]
    scatter: Callable[[int], float]
    exchange: Callable[[Matrix], float]
    permute: Callable[[Matrix], float]
    nodes: tuple[tuple[int, ...], ...]
    source: str


_FABRICS: WeakKeyDictionary[dist.ProcessGroup, Fabric] = WeakKeyDictionary()


def fabric_of(group: dist.ProcessGroup, device: torch.device) -> Fabric:
    """What is known of a group's wires, and measured at first: all ranks call this.

    Args:
        group: of two ranks or more.
        device: of the tensors that travel.
    """
    if group not in _FABRICS:
        known = _of_topology(group)
        _FABRICS[group] = _measured(group, device) if known is None else _corrected(known, group, device)
    return _FABRICS[group]


def agreed(values: Sequence[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """The greatest of each value on any rank. All ranks call it with as many."""
    own = torch.tensor([*values], dtype=torch.float64).to(device)
    whole = own.new_empty(len(values) * group.size())
    all_gather_single(whole, own, group=group)
    return whole.view(group.size(), -1).amax(0).tolist()


def _of_topology(group: dist.ProcessGroup) -> Fabric | None:
    communicator = with_bandwidths(group)
    if communicator is None:
        return None
    choice = communicator.planner.choice
    return Fabric(
        gather=lambda num_bytes: choice("all_gather", None, num_bytes).seconds if num_bytes else 0.0,
        scatter=lambda num_bytes: choice("reduce_scatter", None, num_bytes).seconds if num_bytes else 0.0,
        exchange=_exchanges(communicator),
        permute=partial(_permute, communicator),
        nodes=nodes_of(communicator.topology),
        source=f"topology {communicator.topology.name}",
    )


def _exchanges(communicator: Communicator) -> Callable[[Matrix], float]:
    """Uneven parts go straight where even ones do, and as even ones go otherwise."""
    topology, size = communicator.topology, communicator.topology.num_ranks
    routes, rate = Routes(topology), bytes_per_second(topology)

    def even(num_bytes: int) -> float:
        return communicator.planner.choice("all_to_all", None, num_bytes).seconds

    def seconds(matrix: Matrix) -> float:
        if not any(map(any, matrix)):
            return 0.0
        if not communicator.exchanges_directly:
            most = max(*(sum(row) for row in matrix), *(sum(column) for column in zip(*matrix, strict=True)))
            return even(most * size)
        load: dict[tuple[int, int], int] = {}
        for src, row in enumerate(matrix):
            for dst, num_bytes in enumerate(row):
                if num_bytes and src != dst:
                    for hop in pairwise(routes.vertices(src, dst)):
                        load[hop] = load.get(hop, 0) + num_bytes
        slowest = max((count / (topology.capacity[hop] * rate) for hop, count in load.items()), default=0.0)
        return even(size * size) + slowest

    return seconds


def _permute(communicator: Communicator, matrix: Matrix) -> float:
    """By the schedules that there are for exactly this permutation."""
    weights = tuple(
        int(num_bytes > 0 and src != dst) for src, row in enumerate(matrix) for dst, num_bytes in enumerate(row)
    )
    if not any(weights):
        return 0.0
    num_bytes = max(map(max, matrix)) * sum(weights)
    return communicator.planner.weighted_choice("all_to_all", weights, num_bytes).seconds


def _corrected(fabric: Fabric, group: dist.ProcessGroup, device: torch.device) -> Fabric:
    """The same, as many times slower or faster as exchanges of two sizes show. Starts are not in it."""
    size, large = group.size(), _LEAST_CORRECTED
    while large < _MOST_CORRECTED and fabric.gather(size * large) < _CORRECTED_S:
        large *= 2
    points = _points(group, device, (_SMALL, large))

    def all_to_all(num_bytes: int) -> Matrix:
        return [[num_bytes * (src != dst) for dst in range(size)] for src in range(size)]

    def shift(num_bytes: int) -> Matrix:
        return [[size * num_bytes * (dst == (src + 1) % size) for dst in range(size)] for src in range(size)]

    expected: dict[str, Callable[[int], float]] = {
        "gather": lambda num_bytes: fabric.gather(size * num_bytes),
        "scatter": lambda num_bytes: fabric.scatter(size * num_bytes),
        "exchange": lambda num_bytes: fabric.exchange(all_to_all(num_bytes)),
        "shift": lambda num_bytes: fabric.permute(shift(num_bytes)),
    }
    off = {
        kind: max(points[kind, large] - points[kind, _SMALL], 0.0) / more
        if (more := at(large) - at(_SMALL)) > 0
        else 1.0
        for kind, at in expected.items()
    }
    return replace(
        fabric,
        gather=lambda num_bytes: off["gather"] * fabric.gather(num_bytes),
        scatter=lambda num_bytes: off["scatter"] * fabric.scatter(num_bytes),
        exchange=lambda matrix: off["exchange"] * fabric.exchange(matrix),
        permute=lambda matrix: off["shift"] * fabric.permute(matrix),
        source=f"{fabric.source}, corrected by what was measured",
    )


def _points(group: dist.ProcessGroup, device: torch.device, sizes: Sequence[int]) -> dict[tuple[str, int], float]:
    """Seconds of each kind of exchange, by bytes from each rank to each; the slowest rank's medians.

    ``shift`` is of as many bytes to the next rank as ``exchange`` is to all.
    """
    size = group.size()
    meter = ByteMeter()
    points: dict[tuple[str, int], float] = {}
    for num_bytes in sizes:
        part = torch.zeros(num_bytes // 4, device=device)
        whole = part.new_zeros(part.numel() * size)
        even = [part.numel()] * size
        following = [(rank + 1) % size for rank in range(size)]
        runs: dict[str, Callable[[], object]] = {
            "gather": lambda whole=whole, part=part: all_gather_single(whole, part, group=group),  # type: ignore[misc]
            "scatter": lambda whole=whole, part=part: reduce_scatter_single(part, whole, group=group),  # type: ignore[misc]
            "exchange": lambda whole=whole, even=even: start_swap(  # type: ignore[misc]
                whole, even, even, group, meter, "measure"
            ).wait(),
            "shift": lambda whole=whole, following=following: start_permute(  # type: ignore[misc]
                whole, following, [whole.numel()] * size, group, meter, "measure"
            ).wait(),
        }
        for name, run in runs.items():
            agreed([0.0], group, device)  # together
            points[name, num_bytes] = _seconds(run, device)
    return dict(zip(points, agreed(list(points.values()), group, device), strict=True))


def _measured(group: dist.ProcessGroup, device: torch.device) -> Fabric:
    """Collectives at two sizes."""
    size = group.size()
    points = _points(group, device, (_SMALL, _LARGE))
    lines = {kind: Line.through((_SMALL, points[kind, _SMALL]), (_LARGE, points[kind, _LARGE])) for kind, _ in points}

    def exchange(matrix: Matrix) -> float:
        if not any(map(any, matrix)):
            return 0.0
        rows = [*matrix, *zip(*matrix, strict=True)]
        if all(sum(map(bool, row)) <= 1 for row in rows):
            return lines["shift"].at(max(map(sum, rows)) / size)
        return lines["exchange"].at(max(map(sum, rows)) / max(1, size - 1))

    return Fabric(
        gather=lambda num_bytes: lines["gather"].at(num_bytes / size) if num_bytes else 0.0,
        scatter=lambda num_bytes: lines["scatter"].at(num_bytes / size) if num_bytes else 0.0,
        exchange=exchange,
        permute=exchange,
        nodes=(tuple(range(size)),),
        source="two measured sizes",
    )


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(_REPEATS + 1):
        began = perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(perf_counter() - began)
    return median(times[1:])
