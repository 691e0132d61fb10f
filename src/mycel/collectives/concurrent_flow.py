"""Concurrent flows of a thousand ranks: the least time of an all_to_all from both sides, within a stated gap.

The exact programme (``mycel.collectives.flow_bound``) has an unknown for each source and link. Here all pairs are
routed along their cheapest ways at some prices of links, which shares the flow evenly where ways are equally
cheap, short and wide, and gives two numbers:

- the sum of the cheapest ways over what all links are worth, a time that no flow goes below;
- the load of every link. Such loads can be mixed, and the busiest link of a mixture is a time that is reached.

Prices come from three searches, which are good at unlike fabrics. First, links are dearer the more they have carried
so far (multiplicative weights). Then, what hangs together without the busiest links shows cuts, whose links alone
get a price. Last, of all prices at which every routing so far would cost half as much again of what is missing, those
nearest to the best so far are taken (the level method). It ends where both numbers are close, or after some work.

Links that look alike and carry alike get one price, so that a fabric's numbering plays no part.

References:
    N. Garg, J. Koenemann, "Faster and simpler algorithms for multicommodity flow and other fractional packing
    problems", SIAM Journal on Computing 37(2), 2007 (multiplicative weights). C. Lemarechal, A. Nemirovskii, Y.
    Nesterov, "New variants of bundle methods", Mathematical Programming 69, 1995 (the level method).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from mycel.collectives.cheapest_ways import find_leaves
from mycel.collectives.maxflow import BoolArray, FlowGraph, IntArray, as_int64
from mycel.collectives.sparse_cuts import sparsest_cut
from mycel.collectives.symmetry import find_classes
from mycel.collectives.vertex_heap import pop, push
from mycel.compiled import compiled
from mycel.topology.model import Topology

__all__ = ["FlowInterval", "bracket_flow", "flow_costs", "proven_time"]

Floats = npt.NDArray[np.float64]

#: Routings times sources times links of the first search, and of the last: about 20 s of one core each. (Not seconds:
#: every rank must come to the same answer.)
_WORK = 500_000_000
_MOST_ROUNDS, _MOST_LEVELS = 600, 60
#: Classes of links times routings in all programmes of the last search, about 20 s.
_LEVEL_WORK = 2_500_000
#: Part of the time at which both ends count as one.
_CLOSE = 5e-4
#: How much dearer a link gets with what it carries, at first, and how fast that falls.
_STEP, _FALL = 1.5, 0.1
#: Routings that are kept for mixtures, the first one apart.
_KEPT = 40
#: Part of a load that sums in floating point may lack.
_ROUNDING = 1e-9
#: Parts of the busiest link's load from which links are taken away to find cuts.
_BUSY = (0.9999, 0.999, 0.99, 0.97, 0.95, 0.9, 0.8, 0.7, 0.5)
#: Parts of a unit of flow, so that shares of few ways are whole numbers, which floating point counts exactly.
_PARTS = 2**10 * 3**3 * 5 * 7
#: Whole numbers that the dearest link's price is cut into.
_PRICE_PARTS = 10**6
#: Parts of the largest load by which loads are told apart.
_LOAD_PARTS = 10**9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlowInterval:
    """What was found.

    Attributes:
        inverse_x: a time that no flow goes below, exact.
        reached: a time that flows take; equal to ``inverse_x`` only where whole numbers show it.
        prices: of each link, whole numbers that prove ``inverse_x``.
    """

    inverse_x: Fraction
    reached: Fraction
    prices: tuple[int, ...]


def bracket_flow(fabric: Topology, sources: IntArray, demands: IntArray) -> FlowInterval:
    """The least time in which demands can be met, from both sides.

    Args:
        fabric: the topology.
        sources: ranks from which flows start, shape ``[sources]``.
        demands: units from each to each rank, shape ``[sources, ranks]``.

    Examples:
        >>> from mycel.topology.builders import star
        >>> fabric = star(num_ranks=4, bandwidth="3 GB/s")
        >>> found = bracket_flow(fabric, np.arange(4), 1 - np.eye(4, dtype=np.int64))
        >>> found.inverse_x, found.reached  # three blocks leave each rank
        (Fraction(1, 1), Fraction(1, 1))
    """
    search = _Search(_Router(fabric, sources, demands))
    if not search.is_close():
        search.by_lines()
    if not search.is_close():
        search.by_weights()
    if not search.is_close():
        search.by_cuts()
    if not search.is_close():
        search.by_levels()
    reached = max(search.exact or Fraction(search.time * (1 + _ROUNDING)), search.proved)
    return FlowInterval(inverse_x=search.proved, reached=reached, prices=tuple(search.prices.tolist()))


def proven_time(fabric: Topology, sources: IntArray, demands: IntArray, prices: IntArray) -> Fraction:
    """A time that no flow goes below, by prices of links: whole numbers that are not negative.

    Args:
        fabric: the topology.
        sources: ranks from which flows start, shape ``[sources]``.
        demands: units from each to each rank, shape ``[sources, ranks]``.
        prices: of each link.
    """
    return _Router(fabric, sources, demands).route(prices)[0]


def flow_costs(fabric: Topology) -> IntArray:
    """Cost of passing over each link: a rank on the way must take in and send on, a switch need not."""
    return np.array([3 if fabric.vertices[link.dst].kind == "rank" else 1 for link in fabric.links], dtype=np.int64)


class _Search:
    """The best prices and loads so far."""

    def __init__(self, router: _Router) -> None:
        self.router = router
        self.proved, self.prices = Fraction(0), np.ones(len(router.capacity), dtype=np.int64)
        self.exact: Fraction | None = None
        self.time = np.inf
        self.columns: list[Floats] = []
        first, is_exact = self.route(np.zeros(len(router.capacity), dtype=np.int64))
        self.busy = first / router.capacity
        if is_exact:
            times = [
                Fraction(round(load * _PARTS), _PARTS * c)
                for load, c in zip(first.tolist(), router.whole.tolist(), strict=True)
            ]
            self.exact = max(times)
            self.route(np.array([time == self.exact for time in times], dtype=np.int64))
        else:
            self.route((self.busy > self.busy.max() * (1 - _ROUNDING)).astype(np.int64))
        if not self.is_close():
            self.route(router.as_prices((self.busy / self.busy.max()) ** 8 / router.capacity))

    def route(self, prices: IntArray) -> tuple[Floats, bool]:
        """Loads at these prices, noted with what they prove; whether they are exact."""
        proved, loads, is_exact = self.router.route(prices)
        self.columns.append(loads)
        self.note(loads)
        if proved > self.proved:
            self.proved, self.prices = proved, prices
        return loads, is_exact

    def note(self, loads: Floats) -> None:
        """Loads that flows have."""
        busy = loads / self.router.capacity
        if busy.max() < self.time * (1 - 1e-12):
            self.time, self.busy = float(busy.max()), busy
            self.exact = None if len(self.columns) > 1 else self.exact

    def is_close(self) -> bool:
        """Whether both ends count as one; where loads are exact, whether they are one."""
        return self.time <= float(self.proved) * (1 + (_CLOSE if self.exact is None else 1e-12))

    def rounds(self) -> int:
        router = self.router
        return max(10, min(_MOST_ROUNDS, _WORK // (len(router.starts) * len(router.capacity))))

    def by_lines(self) -> None:
        """A price on the links of the sparsest cut along lines through the fabric."""
        router = self.router
        cut = sparsest_cut(router.graph, router.whole, router.starts, router.demands)
        if cut is not None:
            self.route(cut.astype(np.int64))

    def by_weights(self) -> None:
        """Links get dearer with what they carry; each routing counts for as much as its busiest link allows."""
        capacity = self.router.capacity
        loads, carried, weight = self.columns[0], np.zeros(len(capacity)), 0.0
        logs = np.zeros(len(capacity))
        for number in range(self.rounds()):
            busiest = float((loads / capacity).max())
            step = _STEP / (1 + _FALL * number)
            logs += step * loads / capacity / busiest
            if number:
                # Late routings know more: each counts as often as there were others before it.
                carried, weight = carried + loads * (step * number / busiest), weight + step * number / busiest
                self.note(carried / weight)
            loads, _ = self.route(self.router.as_prices(np.exp(logs - logs.max()) / capacity))
            del self.columns[1:-_KEPT]
            if self.is_close():
                return

    def by_cuts(self) -> None:
        """A price on what enters or leaves a part that hangs together without the busiest links."""
        found = max(self.cuts(), key=lambda cut: cut[0], default=None)
        if found is not None and found[0] > float(self.proved):
            self.route(found[1].astype(np.int64))

    def cuts(self) -> Iterator[tuple[float, npt.NDArray[np.bool_]]]:
        """Times that cuts prove, and the links of each."""
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import connected_components

        router, graph = self.router, self.router.graph
        for least in _BUSY:
            kept = self.busy < self.busy.max() * least
            ends = (graph.tail[kept], graph.head[kept])
            joined = csr_array((np.ones(len(ends[0])), ends), shape=(graph.num_vertices,) * 2)
            count, part = connected_components(joined, connection="strong")
            demand = np.zeros((count, count))
            np.add.at(demand, (part[router.starts][:, None], part[router.ranks][None]), router.demands)
            crosses = part[graph.tail] != part[graph.head]
            for ends_of, units in ((graph.tail, demand.sum(axis=1)), (graph.head, demand.sum(axis=0))):
                across = units - np.diag(demand)
                width = np.bincount(part[ends_of[crosses]], router.capacity[crosses], minlength=count)
                if not (width > 0).any():
                    continue
                times = np.divide(across, width, out=np.zeros(count), where=width > 0)
                worst = int(np.argmax(times))
                yield float(times[worst]), crosses & (part[ends_of] == worst)

    def by_levels(self) -> None:
        """Of all prices at which every routing so far would cost enough, those nearest to the best so far."""
        work = 0
        for _ in range(min(_MOST_LEVELS, self.rounds())):
            classes = self.router.arc_class
            worth = np.bincount(classes, self.router.capacity).astype(np.float64)
            rows: Floats = np.array([np.bincount(classes, loads) for loads in self.columns]) / worth
            work += rows.size
            shares = self._mix(rows)
            if self.is_close() or work > _LEVEL_WORK:
                return
            nearest = self._nearest(rows, worth)
            if nearest is None:
                return
            self.route(self.router.as_prices((nearest / worth)[classes]))
            # Routings that no mixture uses are forgotten, those of late excepted.
            late = len(self.columns) - _KEPT
            self.columns = [
                loads for n, loads in enumerate(self.columns) if n >= min(late, len(shares)) or shares[n] > 0
            ]

    def _mix(self, rows: Floats) -> Floats:
        """Shares of the mixture that is over soonest, which is noted."""
        from scipy.optimize import linprog

        count, classes = rows.shape
        found = linprog(
            np.r_[np.zeros(count), 1.0],
            A_ub=np.c_[rows.T / self.time, -np.ones(classes)],
            b_ub=np.zeros(classes),
            A_eq=np.r_[np.ones(count), 0.0][None],
            b_eq=[1.0],
            method="highs-ds",
        )
        if found.x is None:
            return np.ones(count)
        shares: Floats = np.maximum(found.x[:count], 0.0)
        shares /= shares.sum()
        self.note(np.array(self.columns).T @ shares)
        return shares

    def _nearest(self, rows: Floats, worth: Floats) -> Floats | None:
        """What each class is worth at those prices, of 1 in all; ``None`` where there are none."""
        from scipy.optimize import linprog

        classes = len(worth)
        best = np.bincount(self.router.arc_class, self.prices * self.router.capacity).astype(np.float64)
        best = best / best.sum()
        level = (float(self.proved) + self.time) / 2
        found = linprog(
            np.ones(2 * classes),
            A_ub=np.hstack([-rows, rows]) / self.time,
            b_ub=(rows @ best - level) / self.time,
            A_eq=np.r_[np.ones(classes), -np.ones(classes)][None],
            b_eq=[0.0],
            bounds=np.c_[np.zeros(2 * classes), np.r_[np.full(classes, np.inf), best]],
            method="highs-ds",
        )
        if found.x is None:
            return None
        nearest: Floats = np.maximum(0.0, best + found.x[:classes] - found.x[classes:])
        return nearest


class _Router:
    """A fabric, what has to flow, and its classes of links."""

    def __init__(self, fabric: Topology, sources: IntArray, demands: IntArray) -> None:
        self.graph, self.demands, self.costs = FlowGraph.of(fabric), demands, flow_costs(fabric)
        self.whole = as_int64([link.capacity for link in fabric.links])
        self.capacity = self.whole.astype(np.float64)
        self.starts, self.ranks = self.graph.ranks[sources], self.graph.ranks
        self.unit = int(self.costs.max()) * (self.graph.num_vertices + 1)
        count, tail, head = self.graph.num_vertices, self.graph.tail, self.graph.head
        self.leaving, self.entering = (_by_end(ends, count) for ends in (tail, head))
        self.is_leaf = find_leaves(tail, head, count)
        self.arc_class = find_classes(self.graph, self.whole)[0]

    def route(self, prices: IntArray) -> tuple[Fraction, Floats, bool]:
        """What prices prove, the load of each link when all take their cheapest ways, and whether that is exact."""
        weights = prices * self.unit + self.costs
        (begin, out), (into_begin, into) = self.leaving, self.entering
        leaving = begin, self.graph.head[out], weights[out]
        entered = into_begin, self.graph.tail[into], weights[into], self.whole[into]
        cheapest, entering, is_exact = _route(
            *leaving, *entered, self.is_leaf, self.starts, self.ranks, self.demands, self.unit
        )
        loads = np.empty(len(weights))
        loads[into] = entering
        # Links that look alike and have unlike loads are told apart from now on, as no symmetry joins them.
        kinds = np.stack([self.arc_class, np.rint(loads / loads.max() * _LOAD_PARTS).astype(np.int64)])
        self.arc_class = np.unique(kinds, axis=1, return_inverse=True)[1].reshape(-1)
        worth = sum(p * c for p, c in zip(prices.tolist(), self.whole.tolist(), strict=True))
        return Fraction(int(cheapest), worth) if worth else Fraction(0), loads / _PARTS, bool(is_exact)

    def as_prices(self, weights: Floats) -> IntArray:
        """Whole numbers in proportion to weights, one a class."""
        mean = (np.bincount(self.arc_class, weights) / np.bincount(self.arc_class))[self.arc_class]
        parts: IntArray = np.rint(mean / mean.max() * _PRICE_PARTS).astype(np.int64)
        return parts


def _by_end(ends: IntArray, count: int) -> tuple[IntArray, IntArray]:
    """Where each vertex's arcs begin, and the arcs in that order."""
    order = np.argsort(ends, kind="stable")
    return np.searchsorted(ends[order], np.arange(count + 1)), order


@compiled
def _route(
    begin: IntArray,
    head: IntArray,
    weights: IntArray,
    into_begin: IntArray,
    tail: IntArray,
    into_weights: IntArray,
    capacity: IntArray,
    is_leaf: BoolArray,
    starts: IntArray,
    ranks: IntArray,
    demands: IntArray,
    unit: int,
) -> tuple[int, Floats, bool]:
    """All flows along ways of least weight, of these the widest, shared evenly between equals.

    Args:
        begin: where the arcs that leave each vertex begin in ``head`` and ``weights``, which is positive.
        into_begin: where those that enter it begin in ``tail``, ``into_weights`` and ``capacity``.
        is_leaf: vertices with one neighbour.
        starts, ranks, demands: as of ``bracket_flow``.
        unit: what weights are prices times, and something less.

    Returns:
        The sum over all pairs of units times (weight // unit), the load of each arc that enters each vertex in parts
        of a unit (``_PARTS``), and whether loads are exact: every share was a whole number of parts.
    """
    count, num_arcs = len(begin) - 1, len(head)
    loads = np.zeros(num_arcs, dtype=np.float64)
    far = np.empty(count, dtype=np.int64)
    wide = np.empty(count, dtype=np.int64)
    carried = np.empty(count, dtype=np.float64)
    done = np.empty(count, dtype=np.bool_)
    met = np.empty(count, dtype=np.int64)
    keys = np.empty(num_arcs + 1, dtype=np.int64)
    vertices = np.empty(num_arcs + 1, dtype=np.int64)
    used = np.empty(num_arcs, dtype=np.int64)
    used_begin = np.empty(count + 1, dtype=np.int64)
    cheapest, is_exact = 0, True
    most = np.int64(1) << 62
    for s in range(len(starts)):
        far[:] = most
        done[:] = False
        far[starts[s]] = 0
        keys[0], vertices[0] = 0, starts[s]
        size, last = 1, 0
        while size > 0:
            vertex = pop(keys, vertices, size)
            size -= 1
            if done[vertex]:
                continue
            done[vertex] = True
            met[last] = vertex
            last += 1
            for i in range(begin[vertex], begin[vertex + 1]):
                v, length = head[i], far[vertex] + weights[i]
                if length >= far[v]:
                    continue
                if is_leaf[v]:
                    if far[v] == most:
                        met[last] = v
                        last += 1
                    far[v] = length
                    continue
                far[v] = length
                push(keys, vertices, size, length, v)
                size += 1
        # Arcs of the ways to each vertex, of those equally long the widest; nearer vertices come first.
        wide[starts[s]] = most
        filled = 0
        for i in range(last):
            v = met[i]
            used_begin[i] = filled
            if v == starts[s]:
                continue
            width = np.int64(-1)
            for j in range(into_begin[v], into_begin[v + 1]):
                if far[tail[j]] + into_weights[j] == far[v]:
                    narrowest = min(wide[tail[j]], capacity[j])
                    if narrowest > width:
                        width, filled = narrowest, used_begin[i]
                    if narrowest == width:
                        used[filled] = j
                        filled += 1
            wide[v] = width
        used_begin[last] = filled
        carried[:] = 0.0
        for r in range(len(ranks)):
            if demands[s, r] > 0:
                carried[ranks[r]] += demands[s, r] * _PARTS
                cheapest += demands[s, r] * (far[ranks[r]] // unit)
        for i in range(last - 1, -1, -1):  # from the farthest back
            v = met[i]
            if carried[v] <= 0 or v == starts[s]:
                continue
            ways = used_begin[i + 1] - used_begin[i]
            is_exact = is_exact and np.int64(carried[v]) % ways == 0
            part = carried[v] / ways
            for k in range(used_begin[i], used_begin[i + 1]):
                loads[used[k]] += part
                carried[tail[used[k]]] += part
    return cheapest, loads, is_exact
