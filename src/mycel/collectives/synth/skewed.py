"""Skewed: all_to_all of unlike blocks over boxes that are alike, planned in milliseconds.

Where tokens choose their experts, some ranks have much more to send than others, and the matrix is a new one every
time. The cables between boxes are what binds, and a box is over soonest if all of its ranks send, and get, equally
much. So what box A has for box B leaves A over all of its ranks in equal parts, first moved between them over the
fast links inside; the rank of the same place in B takes a part in and passes on what is for others. Then only boxes
count: their matrix is taken apart into matchings, in each of which a box sends to one box and gets from one (Birkhoff
and von Neumann), and parts go in that order, so that nobody is sent to by many at once.

Blocks are divided in whole units so that parts are exactly equal; those that need not be moved to get there are not.

References:
    Y. Lei, D. Lee, L. Zhao, D. Kurniawan, C. Kim, H. Jeong, C. Kim, H. Choi, L. Yu, A. Krishnamurthy, J. Sherry, E.
    Nurvitadhi, "FAST: An Efficient Scheduler for All-to-All GPU Communication", arXiv 2505.09764 (balance inside
    nodes, Birkhoff-von Neumann between them).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from mycel.collectives.boxes import Boxes, find_boxes
from mycel.collectives.columns import Columns, starts
from mycel.collectives.maxflow import IntArray
from mycel.collectives.schedule import Chunk, Schedule
from mycel.collectives.spec import Collective, CollectiveName
from mycel.compiled import compiled_at_once
from mycel.errors import SynthesisError, UsageError
from mycel.topology.model import Topology

__all__ = ["SERVES", "SkewedPlan", "plan_skewed", "serves", "synthesize"]

SERVES: tuple[CollectiveName, ...] = ("all_to_all",)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SkewedPlan:
    """Which part of each block goes by which rank of its box, and in which order.

    Attributes:
        boxes: of the fabric.
        unit: units of a block of weight 1.
        source, target: rank that a part is from, and rank that it is for; shape ``[parts]``.
        via: place in its box by which it leaves one box and enters the other; of blocks inside a box, their
            target's. Shape ``[parts]``.
        units: of each part, shape ``[parts]``.
        begins: where it stands between what its boxes exchange before and after; shape ``[parts]``.
    """

    boxes: Boxes
    unit: int
    source: IntArray
    target: IntArray
    via: IntArray
    units: IntArray
    begins: IntArray

    def busiest(self) -> Fraction:
        """Time of the network's busiest rank, in blocks of weight 1 over capacity."""
        box, place = self.boxes.box_of, self.boxes.num_places
        apart = box[self.source] != box[self.target]
        times = []
        for end in (self.source, self.target):
            load = np.bincount(
                box[end][apart] * place + self.via[apart], self.units[apart], minlength=self.boxes.ranks.size
            )
            times.append(Fraction(int(load.max()), self.unit * self.boxes.width))
        return max(times)


def serves(topology: Topology) -> bool:
    """Whether there are boxes that are alike, joined place by place."""
    return find_boxes(topology) is not None


def synthesize(topology: Topology, collective: Collective) -> Schedule:
    """A schedule in which each box's network links carry equally much.

    Args:
        topology: of boxes that are alike, each rank with a way to those of its place in the others.
        collective: an all_to_all of uneven blocks.

    Raises:
        UsageError: the collective is over another number of ranks.
        SynthesisError: another collective, equal blocks, or no such boxes.
    """
    n = topology.num_ranks
    if collective.num_ranks != n:
        raise UsageError(f"{collective.name} over {collective.num_ranks} ranks, but {topology.name} has {n}")
    if collective.name not in SERVES or collective.weights is None:
        raise SynthesisError(
            f"skewed plans uneven blocks of all_to_all, not {collective.to_text()}; flow and direct plan equal ones"
        )
    boxes = find_boxes(topology)
    if boxes is None:
        raise SynthesisError(
            f"skewed on {topology.name}: no boxes that are alike and joined rank by rank; flow needs none"
        )
    plan = plan_skewed(boxes, np.array(collective.weights, dtype=np.int64).reshape(n, n))
    return _schedule(topology, collective, plan)


def plan_skewed(boxes: Boxes, demands: IntArray) -> SkewedPlan:
    """The plan of one matrix; at 256 ranks in some milliseconds.

    Args:
        boxes: of a fabric (``mycel.collectives.boxes.find_boxes``), found once.
        demands: weight of the block from each rank to each, shape ``[ranks, ranks]``; whole numbers, not negative.

    Examples:
        >>> from mycel.topology import load_topology
        >>> boxes = find_boxes(load_topology("dgx_h100:boxes=2"))
        >>> tokens = np.zeros((16, 16), dtype=np.int64)
        >>> tokens[0, 8:] = 100  # one rank has all there is to send
        >>> plan = plan_skewed(boxes, tokens)
        >>> plan.busiest()  # 800 over eight network interfaces of 50 GB/s
        Fraction(2, 1)
    """
    between = _between(boxes, demands)
    begin, done, times = _matchings(between)
    source, target, via, units, begins = _divide(boxes.ranks, demands, between, begin, done, times)
    return SkewedPlan(
        boxes=boxes, unit=boxes.num_places, source=source, target=target, via=via, units=units, begins=begins
    )


def _between(boxes: Boxes, demands: IntArray) -> IntArray:
    """What each box has for each other, shape ``[boxes, boxes]``."""
    count, places = boxes.ranks.shape
    order = boxes.ranks.reshape(-1)
    sums: IntArray = demands[np.ix_(order, order)].reshape(count, places, count, places).sum(axis=(1, 3))
    np.fill_diagonal(sums, 0)
    return sums


def _schedule(topology: Topology, collective: Collective, plan: SkewedPlan) -> Schedule:
    """Every part along its way: inside its box, between boxes, inside the other."""
    n, boxes = topology.num_ranks, plan.boxes
    numbers = np.full((n, n), -1, dtype=np.int64)
    ways = sorted(boxes.paths)
    numbers[tuple(np.array(ways).T)] = np.arange(len(ways))
    chunks, chunk_of = _chunks(collective, plan)
    # A part's stops: where it is, its box's rank of the place, that of the other box, and where it goes.
    stops = np.stack(
        [
            plan.source,
            boxes.ranks[boxes.box_of[plan.source], plan.via],
            boxes.ranks[boxes.box_of[plan.target], plan.via],
            plan.target,
        ]
    )
    moves = stops[:-1] != stops[1:]
    hop, part = np.nonzero(moves)
    order = np.lexsort((part, hop, plan.begins[part]))
    place = np.full(moves.shape, -1, dtype=np.int64)
    place[hop[order], part[order]] = np.arange(len(order))
    # The move before: that of the last stop but one, where it was one.
    before = np.full(moves.shape, -1, dtype=np.int64)
    before[1] = place[0]
    before[2] = np.where(place[1] >= 0, place[1], place[0])
    hop, part = hop[order], part[order]
    after = before[hop, part]
    src, dst = stops[hop, part], stops[hop + 1, part]
    columns = Columns(
        chunk=chunk_of[part],
        src=src,
        dst=dst,
        reduce=np.zeros(len(order), dtype=np.bool_),
        path=numbers[src, dst],
        paths=tuple(boxes.paths[pair] for pair in ways),
        after_start=starts((after >= 0).astype(np.int64)),
        after=after[after >= 0],
    )
    return Schedule.of_columns(
        collective=collective,
        topology=topology,
        method="skewed",
        num_units=collective.total_weight * plan.unit,
        chunks=chunks,
        columns=columns,
    )


def _chunks(collective: Collective, plan: SkewedPlan) -> tuple[tuple[Chunk, ...], IntArray]:
    """A chunk for each part, and for each block that stays; and the number of each part's."""
    n = collective.num_ranks
    weights = np.array(collective.weights, dtype=np.int64)
    kept = np.arange(n) * (n + 1)
    kept = kept[weights[kept] > 0]
    blocks = np.concatenate([plan.source * n + plan.target, kept])
    units = np.concatenate([plan.units, weights[kept] * plan.unit])
    order = np.argsort(blocks, kind="stable")
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.arange(len(order))
    ends = np.cumsum(units[order])
    begins = ends - units[order]
    chunks = tuple(Chunk(start=a, stop=b) for a, b in zip(begins.tolist(), ends.tolist(), strict=True))
    return chunks, number[: len(plan.units)]


# -- kernels ------------------------------------------------------------------------------------------------------


@compiled_at_once
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


@compiled_at_once
def _longer(values: IntArray) -> IntArray:
    longer = np.empty(2 * len(values), dtype=np.int64)
    longer[: len(values)] = values
    return longer


@compiled_at_once
def _divide(
    ranks: IntArray, demands: IntArray, between: IntArray, begin: IntArray, done: IntArray, times: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
    """Parts of all blocks: source, target, place by which, units of a block's ``1 / places``, and when.

    Of what a box has for another each place takes an equal part: first what is at that place on both sides, then what
    is there on one, then the rest.
    """
    boxes, places = ranks.shape
    room = boxes * boxes * (places * places + places)
    source, target, via = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int64)
    units, begins = np.empty(room, np.int64), np.empty(room, np.int64)
    count = 0
    left, space = np.empty((places, places), np.int64), np.empty(places, np.int64)
    last = max(between.sum(axis=0).max(), between.sum(axis=1).max())
    at = np.empty(places, np.int64)
    for a in range(boxes):
        for b in range(boxes):
            if a == b:
                for i in range(places):
                    for j in range(places):
                        size = demands[ranks[a, i], ranks[a, j]] * places
                        if i != j and size > 0:
                            source[count], target[count], via[count] = ranks[a, i], ranks[a, j], j
                            units[count], begins[count] = size, last
                            count += 1
                continue
            if between[a, b] == 0:
                continue
            for i in range(places):
                for j in range(places):
                    left[i, j] = demands[ranks[a, i], ranks[b, j]] * places
            space[:] = between[a, b]
            at[:] = begin[a * boxes + b]
            for turn in range(4):
                for i in range(places):
                    for j in range(places):
                        if left[i, j] == 0 or (turn == 0 and i != j):
                            continue
                        low = j if turn == 2 else i if turn < 2 else 0
                        high = low + 1 if turn < 3 else places
                        for p in range(low, high):
                            size = min(left[i, j], space[p])
                            if size == 0:
                                continue
                            gone = between[a, b] - space[p]
                            while at[p] + 1 < begin[a * boxes + b + 1] and done[at[p] + 1] <= gone:
                                at[p] += 1
                            source[count], target[count], via[count] = ranks[a, i], ranks[b, j], p
                            units[count], begins[count] = size, times[at[p]] + gone - done[at[p]]
                            count += 1
                            left[i, j] -= size
                            space[p] -= size
    return source[:count], target[:count], via[:count], units[:count], begins[:count]
