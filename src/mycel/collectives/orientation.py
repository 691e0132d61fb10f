"""Orientation: which way each whole unit of a link goes, so that every rank is reached by as many trees as wanted.

A link that carries as much one way as the other has some units in all, and each goes one way. The parts that a linear
programme found say how, about; they are rounded, each link's two ways to all that it has. Switches are mended along
shortest ways to a rank, where what comes in need not be what goes out. Sets of vertices that are reached too seldom
are mended by turning round units of a way that leads from there to a rank which has them to spare in every set that
holds it and not the start: nothing that sufficed is spoiled, so that every such step is one forward.

What is found is a division of links that reaches a rate, shown by exact flows. So it counts for the bound as well,
where the linear programme stopped before its end.

References:
    A. Frank, "On disjoint trees and arborescences", 1978.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from heapq import heappop, heappush
from math import ceil, floor, inf, lcm

import numpy as np

from mycel.collectives.allreduce_bound import Division
from mycel.collectives.cutting_planes import unbalanced_switches
from mycel.collectives.level_trees import LevelTrees, grow_levels
from mycel.collectives.maxflow import BoolArray, FlowGraph, IntArray, as_int64, flow_on_arcs, shortfalls
from mycel.topology.model import Topology

__all__ = [
    "ENOUGH",
    "Oriented",
    "is_alike_both_ways",
    "level_forests",
    "numbers_of_trees",
    "orient",
    "with_whole_trees",
]

#: Ranks times links, summed over all times that flows to all ranks are solved; and where only a try is asked for.
_MOST_WORK = 400_000_000
_LITTLE_WORK = 20_000_000
#: Share of the limit that whole trees must reach where they do not fit exactly, or are too many.
ENOUGH = Fraction(98, 100)
#: Trees times ranks up to which numbers of trees are tried; of trees by levels, where they fit exactly and where not;
#: of these, numbers for which none are found; fewest and most trees that do not fit exactly, and how many numbers.
_LARGEST = 120_000
_LARGEST_LEVELS, _LARGEST_NEAR = 1 << 20, 1 << 19
_MOST_FAILURES = 3
#: Ranks up to which forests grown link by link are shallow too, and have fewer trees.
_SMALL = 32
_FEWEST = 16
_MOST = 1024
_NUMBERS = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Oriented:
    """Units of links, balanced at switches, that reach every rank often enough.

    Attributes:
        capacity: units of each link, in the order of the fabric's; a link and its opposite share what one has.
        roots: units of which each rank is the root.
    """

    capacity: IntArray
    roots: IntArray


def orient(
    topology: Topology,
    division: Division,
    *,
    scale: Fraction,
    wanted: int,
    least: Fraction,
    most_work: int = _MOST_WORK,
) -> Oriented | None:
    """Units near a division's parts and shares; ``None`` where fewer trees than wanted are reached.

    Args:
        topology: a fabric whose links are as wide as their opposites.
        division: how its links are divided, with shares.
        scale: units that a unit of capacity is.
        wanted: trees; may be more than the division has, which need not be the best.
        least: fewest trees that are enough.
        most_work: ranks times links, summed over all times that flows to all ranks are solved.
    """
    mending = _Mending(topology, division, scale, most_work)
    roots = _shares(division, wanted)
    if division.algbw * scale < wanted:  # the parts say little of what is wanted
        mending.even_out(roots)
    while roots.sum() >= least:
        lacking = mending.mend(roots)
        if not lacking:
            return Oriented(capacity=mending.capacity, roots=roots)
        # Whoever is the root of most has fewer.
        for _ in range(lacking):
            roots[int(roots.argmax())] -= 1
    return None


def is_alike_both_ways(topology: Topology) -> bool:
    """Whether every link is as wide as its opposite.

    Args:
        topology: the fabric.
    """
    capacity = topology.capacity
    return all(capacity.get((dst, src)) == size for (src, dst), size in capacity.items())


def with_whole_trees(
    topology: Topology, division: Division, *, composition: Division, is_try: bool = False
) -> Division:
    """The division, or one of whole trees that reaches more, where the programme did not come to its end.

    Args:
        topology: the fabric.
        division: what the programme found.
        composition: reduce-scatter and then all-gather, as a division; where to begin if the programme found nothing.
        is_try: with little work, and only what reaches the limit.

    Returns:
        A division with the same limit that reaches as much or more.
    """
    if division.reached == division.limit or not is_alike_both_ways(topology):
        return division
    by_levels = with_level_trees(topology, division)
    if by_levels.reached == division.limit:
        return by_levels
    made = division if division.shares else composition
    start = replace(made, limit=division.limit, groups=division.groups)
    division = division if is_try else by_levels
    for trees, scale, _ in numbers_of_trees(topology, start):
        if trees < scale * division.limit and by_levels.reached >= ENOUGH * division.limit:
            break
        least = max((1 if is_try else ENOUGH) * division.limit, division.reached) * scale
        if trees <= division.reached * scale or trees < least:
            continue
        work = _LITTLE_WORK if is_try else _MOST_WORK
        found = orient(topology, start, scale=scale, wanted=trees, least=least, most_work=work)
        if found is None or found.roots.sum() <= division.reached * scale:
            continue
        units = found.capacity.tolist()
        if unbalanced_switches(FlowGraph.of(topology), units):
            continue
        place = {(link.src, link.dst): number for number, link in enumerate(topology.links)}
        spread = tuple(count / scale for count in units)
        return replace(
            division,
            reached=int(found.roots.sum()) / scale,
            shares=tuple(count / scale for count in found.roots.tolist()),
            spread=spread,
            reduce=tuple(spread[place[link.dst, link.src]] for link in topology.links),
        )
    return division


def level_forests(
    topology: Topology, division: Division, *, fewest_first: bool = False
) -> Iterator[tuple[LevelTrees, Fraction]]:
    """Trees by levels, exactly at the limit, then nearly, and the most of them that a unit of capacity carries.

    Args:
        topology: a fabric whose links are as wide as their opposites.
        division: how its links are divided.
        fewest_first: in the order of how many trees there are, instead.
    """
    if topology.switches or topology.num_ranks <= _SMALL:
        return
    numbers = numbers_of_trees(topology, division, largest=_LARGEST_LEVELS, largest_near=_LARGEST_NEAR)
    failures = 0
    for trees, scale, _ in sorted(numbers) if fewest_first else numbers:
        units = as_int64([floor(link.capacity * scale) for link in topology.links])
        least = ceil(ENOUGH * division.limit * scale)
        found = grow_levels(topology, units, wanted=trees, least=min(trees, least))
        if found is not None:
            loads = zip(found.loads.tolist(), topology.links, strict=True)
            yield found, max(Fraction(load, link.capacity) for load, link in loads)
        elif (failures := failures + 1) == _MOST_FAILURES:
            return


def with_level_trees(topology: Topology, division: Division) -> Division:
    """The division, or one of trees by levels that reaches more.

    Args:
        topology: a fabric whose links are as wide as their opposites.
        division: what is known.
    """
    for found, scale in level_forests(topology, division):
        rate = len(found.roots) / scale
        if rate <= division.reached:
            continue
        place = {(link.src, link.dst): number for number, link in enumerate(topology.links)}
        used = np.bincount(found.entered_by[found.entered_by >= 0], minlength=len(topology.links)).tolist()
        return replace(
            division,
            reached=rate,
            shares=tuple(count / scale for count in np.bincount(found.roots, minlength=topology.num_ranks).tolist()),
            spread=tuple(count / scale for count in used),
            reduce=tuple(used[place[link.dst, link.src]] / scale for link in topology.links),
        )
    return division


def numbers_of_trees(
    topology: Topology, division: Division, *, largest: int | None = None, largest_near: int | None = None
) -> Iterator[tuple[int, Fraction, bool]]:
    """Numbers of trees to try, with the units that a unit of capacity is: what fits exactly, then nearly.

    And whether no fewer will do: where the division meets the limit, and whole trees can. Units that do not fit
    exactly are rounded down at every link. What a unit of capacity is follows from the link that loses least, as
    that one says how fast the trees may go.

    Args:
        topology: a fabric whose links are as wide as their opposites.
        division: how its links are divided.
        largest: trees times ranks that fit exactly, if other than usual.
        largest_near: the same of those that do not.
    """
    limit, largest, largest_near = division.limit, largest or _LARGEST, largest_near or _LARGEST
    unit = lcm(*((link.capacity / limit).denominator for link in topology.links))
    for trees in (unit, 2 * unit):
        if trees * topology.num_ranks <= largest:
            yield trees, trees / limit, division.algbw == limit
    group = {vertex: number for number, group in enumerate(division.groups) for vertex in group}
    between = np.array(
        [
            link.capacity
            for link in topology.links
            if not group or (link.dst in group and group.get(link.src) != group[link.dst])
        ],
        dtype=np.int64,
    )
    sizes, counts = np.unique(between, return_counts=True)
    near: list[tuple[Fraction, int, int]] = []
    for most in range(_FEWEST, min(unit, _MOST, largest_near // topology.num_ranks)):
        scale = most / limit
        used = sum(floor(size * scale) * count for size, count in zip(sizes.tolist(), counts.tolist(), strict=True))
        trees = floor(most * Fraction(used) / (scale * int(between.sum())))
        if trees >= ENOUGH * most:
            near.append((Fraction(trees, most), most, trees))
    every = {link.capacity for link in topology.links}
    for _, most, trees in sorted(near, key=lambda each: (-each[0], each[1]))[:_NUMBERS]:
        yield trees, max(Fraction(floor(size * most / limit), size) for size in every), False


def _shares(division: Division, wanted: int) -> IntArray:
    """Whole shares in about the proportions of a division's."""
    factor = wanted / division.algbw
    exact = [share * factor for share in division.shares]
    whole = as_int64([floor(share) for share in exact])
    by_rest = sorted(range(len(exact)), key=lambda rank: floor(exact[rank]) - exact[rank])
    whole[by_rest[: wanted - int(whole.sum())]] += 1
    return whole


class _Mending:
    """Units of links while they are turned round."""

    def __init__(self, topology: Topology, division: Division, scale: Fraction, most_work: int) -> None:
        self.most_work = most_work
        self.graph = FlowGraph.of(topology)
        place = {(link.src, link.dst): number for number, link in enumerate(topology.links)}
        self.opposite = np.array([place[link.dst, link.src] for link in topology.links], dtype=np.int64)
        self.is_rank = np.zeros(self.graph.num_vertices, dtype=np.bool_)
        self.is_rank[self.graph.ranks] = True
        self.out: list[list[int]] = [[] for _ in range(self.graph.num_vertices)]
        for arc, vertex in enumerate(self.graph.tail.tolist()):
            self.out[vertex].append(arc)
        whole = as_int64([floor(link.capacity * scale) for link in topology.links])
        self._make_even(whole)
        back = self.opposite.tolist()
        more = [
            (spread - division.spread[other] - reduce + division.reduce[other]) * scale / 4
            for spread, reduce, other in zip(division.spread, division.reduce, back, strict=True)
        ]
        self.target = np.array(
            [float(extra + Fraction(size, 2)) for extra, size in zip(more, whole.tolist(), strict=True)]
        )
        self.capacity = np.zeros_like(whole)
        for arc, other in enumerate(back):
            if arc < other:
                part = floor(more[arc] + Fraction(int(whole[arc]) + 1, 2))
                self.capacity[arc] = min(max(part, 0), int(whole[arc]))
                self.capacity[other] = whole[arc] - self.capacity[arc]
        self._balance()
        self.work = 0

    def _make_even(self, whole: IntArray) -> None:
        """Leave units unused so that all of a switch's links together have an even number."""
        graph = self.graph
        total = np.zeros(graph.num_vertices, dtype=np.int64)
        np.add.at(total, graph.tail, whole)
        odd = (total % 2 == 1) & ~self.is_rank
        for start in np.flatnonzero(odd).tolist():
            if not odd[start]:
                continue
            way = self._way(start, self.is_rank | odd, lambda arc: 1 / whole[arc] if whole[arc] else inf)
            for arc in way:
                whole[[arc, self.opposite[arc]]] -= 1
            if way:
                odd[[start, graph.head[way[-1]]]] = False

    def _balance(self) -> None:
        """Turn units round until as much leaves every switch as enters it."""
        graph = self.graph
        excess = np.zeros(graph.num_vertices, dtype=np.int64)
        np.add.at(excess, graph.tail, self.capacity)
        np.subtract.at(excess, graph.head, self.capacity)
        excess[self.is_rank] = 0
        for start in np.flatnonzero(excess).tolist():
            while excess[start]:
                sign = 1 if excess[start] > 0 else -1
                ends = self.is_rank | (sign * excess < 0)
                way = self._way(start, ends, partial(self._price, sign))
                if not way:
                    break
                for arc in way:
                    self._turn(arc if sign > 0 else int(self.opposite[arc]))
                excess[start] -= 2 * sign
                end = int(graph.head[way[-1]])
                if not self.is_rank[end]:
                    excess[end] += 2 * sign

    def _price(self, sign: int, arc: int) -> float:
        """Of turning a unit of an arc round, or of its opposite: how much farther from the target it is then."""
        arc = arc if sign > 0 else int(self.opposite[arc])
        if not self.capacity[arc]:
            return inf
        gap = self.capacity[arc] - self.target[arc]
        return 1.125 + float(abs(gap - 1) - abs(gap))

    def _turn(self, arc: int, units: int = 1) -> None:
        self.capacity[arc] -= units
        self.capacity[self.opposite[arc]] += units

    def _way(self, start: int, ends: BoolArray, price: Callable[[int], float]) -> list[int]:
        """The cheapest way from a vertex to one of others, as arcs; empty if there is none."""
        cost: dict[int, float] = {start: 0.0}
        came: dict[int, int] = {}
        heap = [(0.0, start)]
        while heap:
            here, vertex = heappop(heap)
            if here > cost[vertex]:
                continue
            if vertex != start and ends[vertex]:
                way: list[int] = []
                while vertex != start:
                    way.append(came[vertex])
                    vertex = int(self.graph.tail[came[vertex]])
                return way[::-1]
            for arc in self.out[vertex]:
                there = here + price(arc)
                head = int(self.graph.head[arc])
                if there < cost.get(head, inf):
                    cost[head], came[head] = there, arc
                    heappush(heap, (there, head))
        return []

    def even_out(self, roots: IntArray) -> None:
        """Turn ways round until every rank by itself gets what it needs, as far as that is possible: one flow.

        Sets of ranks it does not ask about. Where all that links carry is needed, though, every rank then gets
        exactly what it needs, and so does every set within which links carry no more than trees can use, whichever
        way its links go.
        """
        graph, total = self.graph, int(roots.sum())
        entering = np.zeros(graph.num_vertices, dtype=np.int64)
        np.add.at(entering, graph.head, self.capacity)
        needs = total - roots - entering[graph.ranks]
        lacking, spare = needs > 0, needs < 0
        if not lacking.any() or not spare.any():
            return
        source, sink = graph.num_vertices, graph.num_vertices + 1
        givers, takers = graph.ranks[lacking], graph.ranks[spare]
        tail = np.concatenate([graph.tail, np.full(len(givers), source), takers])
        head = np.concatenate([graph.head, givers, np.full(len(takers), sink)])
        turned = flow_on_arcs(
            graph.num_vertices + 2,
            tail,
            head,
            np.concatenate([self.capacity, needs[lacking], -needs[spare]]),
            source,
            sink,
        )[: len(graph.tail)]
        self.capacity += turned[self.opposite] - turned

    def mend(self, roots: IntArray) -> int:
        """Turn ways round until the roots reach all ranks, as far as that is found; how many units a rank lacks."""
        graph = self.graph
        while True:
            deficit, sides = graph.check(self.capacity, roots)
            self.work += len(graph.tail) * len(graph.ranks)
            short = np.flatnonzero(deficit)
            if not len(short):
                return 0
            if self.work > self.most_work:
                return int(deficit.max())
            done = np.zeros(graph.num_vertices, dtype=np.bool_)
            is_better = False
            for number in short[np.argsort(sides[short].sum(axis=1), kind="stable")].tolist():
                if not (done & sides[number]).any():
                    is_better |= self._reach(int(graph.ranks[number]), sides[number], roots, int(deficit[number]))
                    done |= sides[number]
            if not is_better:
                return int(deficit.max())

    def _reach(self, start: int, side: BoolArray, roots: IntArray, wanted: int) -> bool:
        """Turn round a way from a rank to one outside of a set that can spare it; whether there is one.

        As many units of it as the set lacks, if the way is as wide and its end can spare them; or half, and so on.
        """
        graph, total = self.graph, int(roots.sum())
        tail, head, full = graph.with_source(self.capacity, roots)
        source, most = graph.num_vertices, total + wanted
        lacking, _ = shortfalls(
            *(source + 1, np.append(tail, source), np.append(head, start), np.append(full, most)),
            *(source, graph.ranks, most),
        )
        self.work += len(graph.tail) * len(graph.ranks)
        units = wanted
        while units:
            spare = np.zeros(graph.num_vertices, dtype=np.bool_)
            spare[graph.ranks[lacking <= wanted - units]] = True
            spare &= ~side
            way = self._way(start, spare, partial(self._is_wide, units)) if spare.any() else []
            for arc in way:
                self._turn(arc, units)
            if way:
                return True
            units //= 2
        return False

    def _is_wide(self, units: int, arc: int) -> float:
        """One where an arc has so many units, and no end to it where not."""
        return 1.0 if self.capacity[arc] >= units else inf
