"""The least time of all_to_all, gather and scatter: concurrent flows, with exact proofs from both sides.

Every byte of these collectives goes from one rank to one other, so that a schedule is a flow: one commodity a
source, as many units from it to each of its destinations as their block weighs, within ``capacity * time`` of every
link. A linear programme finds the least time, in floating point; what is reported rests on whole numbers only.

- *From below:* give every link a price per unit. Each unit pays at least the cheapest way from its source to its
  destination, and no link can be paid for more than ``capacity * time`` units. So any prices prove
  ``time >= (sum of cheapest ways) / (sum of capacity * price)``; the programme's dual gives the best ones.
- *From above:* the flows, put on a common denominator, must conserve and fit in exact arithmetic.

Where both meet, the value is the optimum. Where the flows have no small common denominator, the value from below
is still a bound, and ``is_exact`` is false. Where one shortest path a pair is already optimal (one switch, nodes
with one way out), the prices of its busiest links show it and no programme is solved. Of shortest ways, the widest is
taken. Fabrics too large for the programme are bracketed (``mycel.collectives.concurrent_flow``).

References:
    F. Shahrokhi, D. W. Matula, "The maximum concurrent flow problem", Journal of the ACM 37(2), 1990 (the duality).
    P. Basu, L. Zhao, J. Fantl, S. Pal, A. Krishnamurthy, J. Khoury, "Efficient all-to-all collective communication
    schedules for direct-connect topologies", HPDC 2024 (all-to-all by multi-commodity flow).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import inf

import numpy as np
import numpy.typing as npt

from mycel.collectives.boxes import find_boxes
from mycel.collectives.concurrent_flow import FlowInterval, bracket_flow, flow_costs, proven_time
from mycel.collectives.single_source import least_time, whole_flow
from mycel.collectives.skewed_plan import plan_skewed
from mycel.collectives.spec import Collective
from mycel.errors import SynthesisError
from mycel.topology.model import Topology

__all__ = ["FlowOptimum", "is_large", "solve_flow"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Largest common denominator that is looked for.
_MOST_UNITS = 5040
#: How far from a whole number a multiple of a floating-point optimum may be.
_SLACK = 1e-6
#: Commodities times links beyond which the linear programme would take minutes.
_MOST_VARIABLES = 100_000
#: Units that floating point counts exactly, with room for what is calculated with them.
_MOST_COUNTED = 1 << 40
#: Prices without a small common denominator are rounded to this many parts.
_PRICE_PARTS = 10**9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlowOptimum:
    """Flows that carry out a collective in the least time.

    Attributes:
        fabric: the topology; turned round for gather, where everything comes to one rank.
        sources: ranks of ``fabric`` from which flows start.
        demands: weight of the block from each source to each rank of ``fabric``, shape ``[sources, ranks]``; 0 to
            itself.
        flows: units over each link for each source, shape ``[sources, links]``; ``num_units`` of them for each unit
            of demand. Empty where the fabric is too large for the programme.
        num_units: units of a block of weight 1; 0 if the flows have no small common denominator and are fractions.
        inverse_x: least time, in blocks of weight 1 over capacity; exact, or a lower bound.
        prices: of each link, non-negative whole numbers that prove it.
        is_exact: the flows reach ``inverse_x`` exactly.
        inverse_x_reached: the time that flows are known to take: ``inverse_x`` if they are exact.
    """

    fabric: Topology
    sources: tuple[int, ...]
    demands: Ints
    flows: Floats
    num_units: int
    inverse_x: Fraction
    prices: tuple[int, ...]
    is_exact: bool
    inverse_x_reached: Fraction


@lru_cache(maxsize=32)
def solve_flow(topology: Topology, collective: Collective) -> FlowOptimum:
    """The least time of an all_to_all, gather or scatter, and flows that take it.

    Args:
        topology: the fabric.
        collective: over all of its ranks.

    Raises:
        SynthesisError: the linear programme cannot be solved.
    """
    fabric = topology.reversed() if collective.name == "gather" else topology
    task = _task(fabric, collective)
    if is_large(fabric, collective):
        return _bracketed(task)
    flows = _shortest(task)
    prices = _busiest(fabric, flows)
    below = _proven(task, prices)
    if _time(fabric, flows, 1) == below:
        return _optimum(task, flows, 1, below, prices)
    if len(task.sources) == 1 and (found := _from_one_source(task)) is not None:
        return found
    prices = _solve_prices(task)
    below = max(below, _proven(task, prices))
    flows = _solve_flows(task, below)
    num_units = _common_denominator(flows)
    return _optimum(task, flows, num_units, below, prices)


def is_large(topology: Topology, collective: Collective) -> bool:
    """Whether the linear programme would take minutes, so that both ends of an interval are looked for instead."""
    sources = np.array(collective.block_weights).reshape(-1, collective.num_ranks).any(axis=1).sum()
    return collective.root is None and sources * len(topology.links) > _MOST_VARIABLES


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """What has to flow: ``demands[i, rank]`` from ``sources[i]`` to each rank of the fabric."""

    fabric: Topology
    sources: tuple[int, ...]
    demands: Ints


def _task(fabric: Topology, collective: Collective) -> _Task:
    """The sources that have something to send, and how much to whom."""
    n = collective.num_ranks
    weights = np.array(collective.block_weights, dtype=np.int64)
    demands = np.zeros((n, n), dtype=np.int64)
    if collective.root is None:
        demands[:] = weights.reshape(n, n)
    else:
        demands[collective.root] = weights
    np.fill_diagonal(demands, 0)
    sources = np.flatnonzero(demands.any(axis=1))
    return _Task(fabric, tuple(sources.tolist()), demands[sources])


def _optimum(task: _Task, flows: Floats, num_units: int, below: Fraction, prices: Sequence[int]) -> FlowOptimum:
    whole = np.round(flows * num_units)
    is_exact = bool(num_units) and _conserves(task, whole, num_units)
    if is_exact:
        flows, is_exact = whole, _time(task.fabric, whole, num_units) <= below
    else:
        num_units = 0
    return FlowOptimum(
        fabric=task.fabric,
        sources=task.sources,
        demands=task.demands,
        flows=flows,
        num_units=num_units,
        inverse_x=below,
        prices=tuple(prices),
        is_exact=is_exact,
        inverse_x_reached=below if is_exact else _nearly(task, flows, below),
    )


def _nearly(task: _Task, flows: Floats, below: Fraction) -> Fraction:
    """The time of flows in floating point, with room for what they lack; that of one way a pair where it is less."""
    capacity = np.array([float(link.capacity) for link in task.fabric.links])
    time = Fraction(float((flows.sum(axis=0) / capacity).max()) * (1 + _SLACK))
    return max(below, min(time, _time(task.fabric, _shortest(task), 1)))


def _bracketed(task: _Task) -> FlowOptimum:
    """Both ends of the least time where the programme is too large, without the flows."""
    fabric = task.fabric
    found = _by_boxes(task) or bracket_flow(fabric, np.array(task.sources, dtype=np.int64), task.demands)
    return FlowOptimum(
        fabric=fabric,
        sources=task.sources,
        demands=task.demands,
        flows=np.zeros((0, len(fabric.links))),
        num_units=0,
        inverse_x=found.inverse_x,
        prices=found.prices,
        is_exact=found.inverse_x == found.reached,
        inverse_x_reached=found.reached,
    )


def _by_boxes(task: _Task) -> FlowInterval | None:
    """Of unlike blocks, the plan by boxes: the optimum if the prices of its busiest links prove it, else ``None``."""
    fabric, n = task.fabric, task.fabric.num_ranks
    demands = np.zeros((n, n), dtype=np.int64)
    demands[list(task.sources)] = task.demands
    apart = demands[~np.eye(n, dtype=np.bool_)]
    boxes = find_boxes(fabric) if apart.any() and apart.min() < apart.max() else None
    if boxes is None:
        return None
    times = plan_skewed(boxes, demands).times(fabric)
    slowest = max(times)
    prices = np.array([time == slowest for time in times], dtype=np.int64)
    if proven_time(fabric, np.arange(n), demands, prices) < slowest:
        return None
    return FlowInterval(inverse_x=slowest, reached=slowest, prices=tuple(prices.tolist()))


def _from_one_source(task: _Task) -> FlowOptimum | None:
    """The exact optimum where one rank has everything; ``None`` where that is in more units than are counted here."""
    fabric, source, demand = task.fabric, task.sources[0], task.demands[0].tolist()
    least, cut = least_time(fabric, source, demand)
    if sum(demand) * least.denominator > _MOST_COUNTED:
        return None
    # Programmes of one commodity have whole-numbered vertices; the one that floating point finds has short ways.
    flows = np.round(_solve_flows(task, least) * least.denominator)
    if not _conserves(task, flows, least.denominator) or _time(fabric, flows, least.denominator) > least:
        flows = whole_flow(fabric, source, demand, least)[None].astype(np.float64)
    prices = np.zeros(len(fabric.links), dtype=np.int64)
    prices[cut] = 1
    return _optimum(task, flows / least.denominator, least.denominator, least, prices.tolist())


# -- exact checks -----------------------------------------------------------------------------------------


def _time(fabric: Topology, flows: Floats, num_units: int) -> Fraction:
    """Time that whole-numbered flows take."""
    load = flows.sum(axis=0)
    return max(Fraction(int(units), num_units * k.capacity) for units, k in zip(load, fabric.links, strict=True))


def _conserves(task: _Task, flows: Floats, num_units: int) -> bool:
    """Whether every rank gets its units of every source, and nothing is lost or made elsewhere."""
    fabric = task.fabric
    tail, head = _ends(fabric)
    for source, demand, flow in zip(task.sources, task.demands, flows, strict=True):
        net = np.zeros(len(fabric.vertices), dtype=np.int64)
        np.add.at(net, head, flow.astype(np.int64))
        np.subtract.at(net, tail, flow.astype(np.int64))
        net[fabric.ranks[source]] += num_units * demand.sum()
        net[list(fabric.ranks)] -= num_units * demand
        if net.any() or (flow < 0).any():
            return False
    return True


def _proven(task: _Task, prices: Sequence[int]) -> Fraction:
    """Time that prices prove."""
    fabric = task.fabric
    outgoing = _outgoing(fabric, prices)
    cheapest = 0
    for source, demand in zip(task.sources, task.demands.tolist(), strict=True):
        distance, _ = _distances(outgoing, fabric.ranks[source])
        cheapest += sum(units * distance[vertex] for units, vertex in zip(demand, fabric.ranks, strict=True))
    worth = sum(price * k.capacity for price, k in zip(prices, fabric.links, strict=True))
    return Fraction(cheapest, worth) if worth else Fraction(0)


# -- shortest paths ---------------------------------------------------------------------------------------


def _outgoing(fabric: Topology, weights: Sequence[int]) -> list[list[tuple[int, int, int, int]]]:
    """Of each vertex: ``(weight, head, link, capacity)`` of the links that leave it."""
    outgoing: list[list[tuple[int, int, int, int]]] = [[] for _ in fabric.vertices]
    for number, (weight, link) in enumerate(zip(weights, fabric.links, strict=True)):
        outgoing[link.src].append((weight, link.dst, number, link.capacity))
    return outgoing


def _distances(outgoing: list[list[tuple[int, int, int, int]]], start: int) -> tuple[dict[int, int], dict[int, int]]:
    """Least weight from a vertex to all others, and the last link of the way; of equal ways, of the widest."""
    distance: dict[int, int] = {}
    last: dict[int, int] = {}
    heap = [(0, -inf, start, -1)]
    while heap:
        far, narrow, vertex, link = heapq.heappop(heap)
        if vertex in distance:
            continue
        distance[vertex], last[vertex] = far, link
        for weight, head, number, capacity in outgoing[vertex]:
            if head not in distance:
                heapq.heappush(heap, (far + weight, max(narrow, -capacity), head, number))
    return distance, last


def _shortest(task: _Task) -> Floats:
    """Flows along one shortest path a pair."""
    fabric = task.fabric
    outgoing = _outgoing(fabric, flow_costs(fabric).tolist())
    flows = np.zeros((len(task.sources), len(fabric.links)))
    for row, (source, demand) in enumerate(zip(task.sources, task.demands.tolist(), strict=True)):
        _, last = _distances(outgoing, fabric.ranks[source])
        for units, vertex in zip(demand, fabric.ranks, strict=True):
            while units and vertex != fabric.ranks[source]:
                flows[row, last[vertex]] += units
                vertex = fabric.links[last[vertex]].src
    return flows


def _busiest(fabric: Topology, flows: Floats) -> list[int]:
    """Price one for the links that take longest, nothing for the others."""
    times = [Fraction(int(load), k.capacity) for load, k in zip(flows.sum(axis=0), fabric.links, strict=True)]
    return [int(time == max(times)) for time in times]


# -- the linear programmes --------------------------------------------------------------------------------


def _ends(fabric: Topology) -> tuple[Ints, Ints]:
    tail = np.array([link.src for link in fabric.links], dtype=np.int64)
    return tail, np.array([link.dst for link in fabric.links], dtype=np.int64)


def _solve(task: _Task, cost: Floats, time: float | None) -> tuple[Floats, Floats]:
    """Minimise ``cost`` of flows, or the time of them if ``time`` is not given.

    Returns:
        Flows, shape ``[sources, links]``, and what one more unit of each link's capacity would save.
    """
    from scipy.optimize import linprog
    from scipy.sparse import block_diag, coo_matrix, csr_matrix, hstack, identity

    fabric, sources = task.fabric, task.sources
    tail, head = _ends(fabric)
    links, rows = len(fabric.links), np.arange(len(fabric.links))
    incidence = csr_matrix(
        (np.r_[np.ones(links), -np.ones(links)], (np.r_[head, tail], np.r_[rows, rows])),
        shape=(len(fabric.vertices), links),
    )
    blocks, demand = [], []
    for source, wanted in zip(sources, task.demands, strict=True):
        others = [v for v in range(len(fabric.vertices)) if v != fabric.ranks[source]]
        blocks.append(incidence[others])
        arriving = np.zeros(len(fabric.vertices))
        arriving[list(fabric.ranks)] = wanted
        demand += arriving[others].tolist()
    # Scaled to at most 1: the solver's tolerances are absolute.
    capacity = np.array([float(link.capacity) for link in fabric.links])
    capacity /= capacity.max()
    conserve = block_diag(blocks, format="csr")
    within = hstack([identity(links)] * len(sources), format="csr")
    limit = np.zeros(links) if time is None else capacity * time
    if time is None:
        conserve = hstack([conserve, coo_matrix((len(demand), 1))], format="csr")
        within = hstack([within, coo_matrix(-capacity[:, None])], format="csr")
    result = linprog(cost, A_ub=within, b_ub=limit, A_eq=conserve, b_eq=demand, method="highs")
    if result.status != 0:
        raise SynthesisError(f"{fabric.name}: the flow problem has no solution: {result.message}")
    flows = np.asarray(result.x[: len(sources) * links], dtype=np.float64).reshape(len(sources), links)
    return np.maximum(flows, 0.0), -np.asarray(result.ineqlin.marginals, dtype=np.float64)


def _solve_prices(task: _Task) -> list[int]:
    """Whole-numbered prices that prove the least time, as nearly as floating point finds them."""
    cost = np.zeros(len(task.sources) * len(task.fabric.links) + 1)
    cost[-1] = 1.0
    _, prices = _solve(task, cost, None)
    prices = np.where(prices > 1e-9 * prices.max(), prices, 0.0) / prices.max()
    parts = _common_denominator(prices) or _PRICE_PARTS
    return [int(price) for price in np.round(prices * parts)]


def _solve_flows(task: _Task, least: Fraction) -> Floats:
    """Among the flows that take the least time, those over the shortest ways: few relays, no cycles."""
    cost = np.tile(flow_costs(task.fabric).astype(np.float64), len(task.sources))
    largest = max(link.capacity for link in task.fabric.links)
    try:
        return _solve(task, cost, float(least * largest))[0]
    except SynthesisError:
        # Rounding of the prices may have put what they prove below what flows can reach.
        return _solve(task, cost, float(least * largest) * (1 + 1e-8))[0]


def _common_denominator(values: Floats) -> int:
    """The least number of parts, up to a limit, of which every value is a whole number; 0 if there is none."""
    different = np.unique(np.round(values, 7))
    for parts in range(1, _MOST_UNITS + 1):
        if np.abs(different * parts - np.round(different * parts)).max() <= _SLACK * parts:
            return parts
    return 0
