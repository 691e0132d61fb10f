"""Plans of unlike blocks over boxes that are alike: parts, the ways they take, and when.

``mycel.collectives.synth.skewed`` says how they are made, and makes schedules of them. Where what the busiest links
carry proves a plan optimal, it is the bound as well (``mycel.collectives.flow_bound``).

References:
    Y. Lei, D. Lee, L. Zhao, D. Kurniawan, C. Kim, H. Jeong, C. Kim, H. Choi, L. Yu, A. Krishnamurthy, J. Sherry, E.
    Nurvitadhi, "FAST: An Efficient Scheduler for All-to-All GPU Communication", arXiv 2505.09764 (balance inside
    nodes, Birkhoff-von Neumann between them).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np

from mycel.collectives.boxes import Boxes
from mycel.collectives.maxflow import IntArray
from mycel.compiled import compiled
from mycel.topology.model import Topology

__all__ = ["SkewedPlan", "plan_skewed"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SkewedPlan:
    """Which part of each block goes by which rank of its box, and in which order.

    Attributes:
        boxes: of the fabric.
        unit: units of a block of weight 1.
        source, target: rank that a part is from, and rank that it is for; shape ``[parts]``.
        via: place in its box by which it leaves one box and enters the other; of blocks inside a box, their
            target's. Shape ``[parts]``.
        way: of the ways between the two ranks of that place, 0 where there is one; shape ``[parts]``.
        units: of each part, shape ``[parts]``.
        begins: where it stands between what its boxes exchange before and after; shape ``[parts]``.
    """

    boxes: Boxes
    unit: int
    source: IntArray
    target: IntArray
    via: IntArray
    way: IntArray
    units: IntArray
    begins: IntArray

    def stops(self) -> IntArray:
        """Ranks that a part is at: its source, the places by which it crosses, its target; shape ``[4, parts]``."""
        ranks, box_of = self.boxes.ranks, self.boxes.box_of
        here, there = ranks[box_of[self.source], self.via], ranks[box_of[self.target], self.via]
        return np.stack([self.source, here, there, self.target])

    def legs(self) -> IntArray:
        """Numbers of the paths between these stops, -1 where two are the same rank; shape ``[3, parts]``."""
        stops = self.stops()
        legs: IntArray = self.boxes.first_path[stops[:-1], stops[1:]]
        legs[1] += np.where(self.boxes.box_of[stops[1]] != self.boxes.box_of[stops[2]], self.way, 0)
        return np.where(stops[:-1] != stops[1:], legs, -1)

    def time(self, topology: Topology) -> Fraction:
        """How long the busiest link is busy, in blocks of weight 1 over capacity.

        Args:
            topology: the fabric.
        """
        return max(self.times(topology), default=Fraction(0))

    def times(self, topology: Topology) -> list[Fraction]:
        """How long each link of the fabric is busy, in blocks of weight 1 over capacity.

        Args:
            topology: the fabric.
        """
        legs = self.legs()
        units = np.zeros(len(self.boxes.paths), dtype=np.int64)
        for leg in legs:
            np.add.at(units, leg[leg >= 0], self.units[leg >= 0])
        load: dict[tuple[int, int], int] = {}
        for path, count in zip(self.boxes.paths, units.tolist(), strict=True):
            for hop in pairwise(path if count else ()):
                load[hop] = load.get(hop, 0) + count
        return [Fraction(load.get((k.src, k.dst), 0), self.unit * k.capacity) for k in topology.links]


def plan_skewed(boxes: Boxes, demands: IntArray) -> SkewedPlan:
    """The plan of one matrix; at 256 ranks in some milliseconds.

    Args:
        boxes: of a fabric (``mycel.collectives.boxes.find_boxes``), found once.
        demands: weight of the block from each rank to each, shape ``[ranks, ranks]``; whole numbers, not negative.

    Examples:
        >>> from mycel.collectives.boxes import find_boxes
        >>> from mycel.topology import load_topology
        >>> fabric = load_topology("dgx_h100:boxes=2")
        >>> boxes = find_boxes(fabric)
        >>> tokens = np.zeros((16, 16), dtype=np.int64)
        >>> tokens[0, 8:] = 100  # one rank has all there is to send
        >>> plan = plan_skewed(boxes, tokens)
        >>> plan.time(fabric)  # 800 over eight network interfaces of 50 GB/s
        Fraction(2, 1)
    """
    between = _between(boxes, demands)
    begin, done, times = _matchings(between)
    # A part of each place's share for every way: as many units as all numbers of ways divide.
    cut = math.lcm(*np.unique(boxes.num_ways).tolist())
    source, target, via, way, units, begins = _divide(
        boxes.ranks, demands, between, begin, done, times, boxes.num_ways, cut
    )
    return SkewedPlan(
        boxes=boxes,
        unit=boxes.num_places * cut,
        source=source,
        target=target,
        via=via,
        way=way,
        units=units,
        begins=begins,
    )


def _between(boxes: Boxes, demands: IntArray) -> IntArray:
    """What each box has for each other, shape ``[boxes, boxes]``."""
    count, places = boxes.ranks.shape
    order = boxes.ranks.reshape(-1)
    sums: IntArray = demands[np.ix_(order, order)].reshape(count, places, count, places).sum(axis=(1, 3))
    np.fill_diagonal(sums, 0)
    return sums


# -- kernels ------------------------------------------------------------------------------------------------------


@compiled
def _matchings(between: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """What boxes exchange, taken apart into matchings.

    Returns:
        Where each pair's pieces begin (shape ``[boxes * boxes + 1]``); of each piece what of the pair went before it;
        and when it begins.
    """
    n = len(between)
    rows, columns = between.sum(axis=1), between.sum(axis=0)
    most = max(rows.max(), columns.max())
    # Rows and columns are filled up to equal sums: then there is a perfect matching, as long as anything is left.
    left, idle = between.copy(), np.zeros((n, n), dtype=np.int64)
    a, b = 0, 0
    missing, lacking = most - rows, most - columns
    while a < n and b < n:
        step = min(missing[a], lacking[b])
        idle[a, b] += step
        missing[a] -= step
        lacking[b] -= step
        if missing[a] == 0:
            a += 1
        else:
            b += 1
    partner, owner = np.full(n, -1, dtype=np.int64), np.full(n, -1, dtype=np.int64)
    seen, came = np.zeros(n, dtype=np.bool_), np.empty(n, dtype=np.int64)
    queue = np.empty(n, dtype=np.int64)
    pair_of, done_of, time_of = np.empty(n * n, np.int64), np.empty(n * n, np.int64), np.empty(n * n, np.int64)
    count, time = 0, 0
    done = np.zeros((n, n), dtype=np.int64)
    while time < most:
        for row in range(n):
            if partner[row] >= 0:
                continue
            # The shortest augmenting path, row by row.
            seen[:] = False
            queue[0], first, size, end = row, 0, 1, -1
            while end < 0 and first < size:
                here = queue[first]
                first += 1
                for column in range(n):
                    if not seen[column] and left[here, column] + idle[here, column] > 0:
                        seen[column], came[column] = True, here
                        if owner[column] < 0:
                            end = column
                            break
                        queue[size] = owner[column]
                        size += 1
            while end >= 0:
                here = came[end]
                before = partner[here]
                partner[here], owner[end] = end, here
                end = before if here != row else -1
        step = most - time
        for row in range(n):
            column = partner[row]
            whole = left[row, column] if left[row, column] > 0 else idle[row, column]
            step = min(step, whole)
        for row in range(n):
            column = partner[row]
            if left[row, column] > 0:
                if count == len(pair_of):
                    pair_of, done_of, time_of = _longer(pair_of), _longer(done_of), _longer(time_of)
                pair_of[count], done_of[count], time_of[count] = row * n + column, done[row, column], time
                count += 1
                done[row, column] += step
                left[row, column] -= step
            else:
                idle[row, column] -= step
            if left[row, column] + idle[row, column] == 0:
                partner[row], owner[column] = -1, -1
        time += step
    order = np.argsort(pair_of[:count] * (most + 1) + time_of[:count])
    begin = np.zeros(n * n + 1, dtype=np.int64)
    for i in range(count):
        begin[pair_of[i] + 1] += 1
    return np.cumsum(begin), done_of[order], time_of[order]


@compiled
def _longer(values: IntArray) -> IntArray:
    longer = np.empty(2 * len(values), dtype=np.int64)
    longer[: len(values)] = values
    return longer


@compiled
def _divide(
    ranks: IntArray,
    demands: IntArray,
    between: IntArray,
    begin: IntArray,
    done: IntArray,
    times: IntArray,
    num_ways: IntArray,
    cut: int,
) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray, IntArray]:
    """Parts of all blocks: source, target, place by which, way, units of a block's ``1 / (places * cut)``, and when.

    Of what a box has for another each place takes an equal part: first what is at that place on both sides, then what
    is there on one, then the rest. Of that, each way takes an equal part: the first of them another one at each place
    and of each pair, so that all ways are busy at any time.
    """
    boxes, places = ranks.shape
    room = boxes * boxes * (places * places + places) + places * num_ways.sum()
    source, target, via = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int64)
    way, units, begins = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int64)
    count = 0
    left, space = np.empty((places, places), np.int64), np.empty(places, np.int64)
    last = cut * max(between.sum(axis=0).max(), between.sum(axis=1).max())
    at = np.empty(places, np.int64)
    # Of each place, the way that it has come to, and what that still takes.
    turns, room_left = np.empty(places, np.int64), np.empty(places, np.int64)
    for a in range(boxes):
        for b in range(boxes):
            if a == b:
                for i in range(places):
                    for j in range(places):
                        size = demands[ranks[a, i], ranks[a, j]] * places * cut
                        if i != j and size > 0:
                            source[count], target[count], via[count] = ranks[a, i], ranks[a, j], j
                            way[count], units[count], begins[count] = 0, size, last
                            count += 1
                continue
            if between[a, b] == 0:
                continue
            for i in range(places):
                for j in range(places):
                    left[i, j] = demands[ranks[a, i], ranks[b, j]] * places * cut
            ways = num_ways[a, b]
            width = between[a, b] * cut // ways
            space[:] = between[a, b] * cut
            at[:] = begin[a * boxes + b]
            room_left[:] = width
            for p in range(places):
                turns[p] = (a + b + p) % ways
            for turn in range(4):
                for i in range(places):
                    for j in range(places):
                        if left[i, j] == 0 or (turn == 0 and i != j):
                            continue
                        low = j if turn == 2 else i if turn < 2 else 0
                        high = low + 1 if turn < 3 else places
                        for p in range(low, high):
                            while left[i, j] > 0 and space[p] > 0:
                                gone = between[a, b] * cut - space[p]
                                size = min(left[i, j], room_left[p])
                                while at[p] + 1 < begin[a * boxes + b + 1] and done[at[p] + 1] * cut <= gone:
                                    at[p] += 1
                                source[count], target[count], via[count] = ranks[a, i], ranks[b, j], p
                                way[count] = turns[p]
                                units[count], begins[count] = size, (times[at[p]] - done[at[p]]) * cut + gone
                                count += 1
                                left[i, j] -= size
                                space[p] -= size
                                room_left[p] -= size
                                if room_left[p] == 0:
                                    room_left[p], turns[p] = width, turns[p] + 1
                                    if turns[p] == ways:
                                        turns[p] = 0
    return source[:count], target[:count], via[:count], way[:count], units[:count], begins[:count]
