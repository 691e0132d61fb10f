"""What an order takes when everything begins as soon as it can: makespan, the span of each rank, memory held.

Messages take no time here; ``mycel.pipeline`` has a simulator for links. Two measures are not to be mixed up:
*makespan*, from the first start to the last end over all ranks, is what a step costs when ranks meet at its end, as
under torch. *Span*, each rank's own last end minus its own first start, is what the zero-bubble papers report; it is
a step's time only where no rank waits for another between steps.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import lcm

from mycel.brief import brief
from mycel.errors import ScheduleError
from mycel.pipeline.needs import Result, needs_of, result_of
from mycel.pipeline.order import Action, Kind, Order

__all__ = ["Replay", "chunks_of", "peaks", "replay", "unit_times"]

Times = Callable[[int, Action], int | Fraction]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """When each action of an order starts and ends, counted in ticks.

    Attributes:
        tick: length of one.
        starts: of every action, row by row.
        ends: of every action, row by row.
        work: ticks that each rank works.

    Examples:
        >>> done = replay(Order.from_csv("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1\\n"))
        >>> done.spans, done.work, done.span_bubble
        ((Fraction(9, 1), Fraction(6, 1)), (6, 6), Fraction(3, 1))
    """

    tick: Fraction
    starts: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, ...], ...]
    work: tuple[int, ...]

    __repr__ = brief

    @property
    def makespan(self) -> Fraction:
        """From the first start to the last end over all ranks."""
        return self.tick * (max(map(max, self.ends)) - min(map(min, self.starts)))

    @property
    def spans(self) -> tuple[Fraction, ...]:
        """From each rank's own first start to its own last end."""
        return tuple(
            self.tick * (max(ends) - min(starts)) for starts, ends in zip(self.starts, self.ends, strict=True)
        )

    @property
    def bubble(self) -> Fraction:
        """Makespan less the work of the busiest rank."""
        return self.makespan - self.tick * max(self.work)

    @property
    def span_bubble(self) -> Fraction:
        """The most that a rank idles between its own first start and its own last end."""
        return max(span - self.tick * work for span, work in zip(self.spans, self.work, strict=True))


def chunks_of(order: Order) -> tuple[int, ...]:
    """Of each rank, the most of its stages that one micro-batch visits: parts of its share of the model.

    Args:
        order: whose ranks are asked about.
    """
    if order.routes is None:
        return tuple(max(1, order.stage_ranks.count(rank)) for rank in range(order.ranks))
    most = [0] * order.ranks
    for route in set(order.routes):
        visits = [order.rank_of(stage) for stage in route]
        most = [max(so_far, visits.count(rank)) for rank, so_far in enumerate(most)]
    return tuple(max(1, count) for count in most)


def unit_times(order: Order, *, forward: int = 1, input_gradient: int = 1, weight: int = 1) -> Times:
    """Times in which forward, input gradient and weight gradient are given for a rank's whole share of the model.

    Args:
        order: whose ranks' chunks divide them.
        forward: of a micro-batch through all of a rank's stages.
        input_gradient: the same for the first half of the backward.
        weight: the same for the second half.
    """
    chunks = chunks_of(order)
    of_kind = {
        Kind.FORWARD: forward,
        Kind.INPUT: input_gradient,
        Kind.WEIGHT: weight,
        Kind.BACKWARD: input_gradient + weight,
        Kind.OVERLAP: forward + input_gradient + weight,
    }
    known = [{kind: Fraction(time, parts) for kind, time in of_kind.items()} for parts in chunks]
    for row in known:
        row[Kind.SHARED] = Fraction(1)

    def times(rank: int, action: Action) -> Fraction:
        return known[rank].get(action.kind, _NO_TIME)

    return times


_NO_TIME = Fraction(0)


def replay(order: Order, times: Times | None = None, *, overlaps: bool = False) -> Replay:
    """Start every action as soon as its rank is free and what it needs is there.

    Args:
        order: whose messages, if it has any, take no time and wait for nothing.
        times: of an action on a rank; unit times if not given.
        overlaps: whether the two parts of an action that overlaps them begin together, when both can, and take the
            time of the pair; if not, one follows the other, as torch does it.

    Raises:
        ScheduleError: the order stops; the message says at which actions. ``mycel.pipeline.check`` says why.

    Examples:
        >>> order = Order.from_csv("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1\\n")
        >>> replay(order).makespan, replay(order).bubble
        (Fraction(9, 1), Fraction(3, 1))
    """
    length = times or unit_times(order)
    turns = [[turn for action in row for turn in ((action,) if overlaps else action.leaves)] for row in order.rows]
    lengths = [[Fraction(length(rank, turn)) for turn in row] for rank, row in enumerate(turns)]
    scale = lcm(*{time.denominator for row in lengths for time in row})
    ticks = [[time.numerator * (scale // time.denominator) for time in row] for row in lengths]
    starts, ends = [], []
    for row, begins, lasting in zip(order.rows, _starts(order, turns, ticks), ticks, strict=True):
        stops = [begin + tick for begin, tick in zip(begins, lasting, strict=True)]
        sizes = [1 if overlaps else len(action.leaves) for action in row]
        last = list(accumulate(sizes))
        starts.append(tuple(begins[stop - size] for stop, size in zip(last, sizes, strict=True)))
        ends.append(tuple(stops[stop - 1] for stop in last))
    return Replay(tick=Fraction(1, scale), starts=tuple(starts), ends=tuple(ends), work=tuple(map(sum, ticks)))


def _starts(order: Order, turns: list[list[Action]], ticks: list[list[int]]) -> list[list[int]]:
    needs = needs_of(order)
    members = Counter(result_of(turn) for row in turns for turn in row if turn.kind is Kind.SHARED)
    done: dict[Result, int] = {}
    waiting: dict[Result, list[int]] = defaultdict(list)
    arrived: dict[Result, set[int]] = defaultdict(set)
    starts: list[list[int]] = [[] for _ in turns]
    free = [0] * order.ranks
    ready = list(range(order.ranks))

    def finish(rank: int, turn: Action, start: int) -> None:
        end = start + ticks[rank][len(starts[rank])]
        starts[rank].append(start)
        free[rank] = end
        for made in map(result_of, turn.leaves):
            if made is not None:
                done[made] = end
                ready.extend(waiting.pop(made, ()))

    while ready:
        rank = ready.pop()
        row = turns[rank]
        while len(starts[rank]) < len(row):
            turn = row[len(starts[rank])]
            needed = [result for leaf in turn.leaves for result in needs(leaf)]
            if turn.parts:  # of a pair, the backward may be that of the forward
                own = set(map(result_of, turn.parts))
                needed = [result for result in needed if result not in own]
            missing = next((result for result in needed if result not in done), None)
            if missing is not None:
                waiting[missing].append(rank)
                break
            start = max([free[rank], *(done[result] for result in needed)])
            made = result_of(turn)
            if turn.kind is not Kind.SHARED or made is None:
                finish(rank, turn, start)
                continue
            arrived[made].add(rank)
            if len(arrived[made]) < members[made]:
                break
            start = max([start, *(free[other] for other in arrived[made])])
            for other in arrived[made]:
                finish(other, turn, start)
                ready.append(other)
    stuck = [(rank, row[len(starts[rank])]) for rank, row in enumerate(turns) if len(starts[rank]) < len(row)]
    if stuck:
        places = ", ".join(f"rank {rank} at {turn}" for rank, turn in stuck[:8])
        raise ScheduleError(f"the order stops: {places} wait for what comes later; mycel plan check names the circle")
    return starts


def peaks(order: Order, *, input_frees: Fraction = Fraction(1, 2)) -> tuple[Fraction, ...]:
    """The most activations that each rank holds at once, in those of one micro-batch through its whole share.

    A forward takes its stage's part, the whole backward gives it back; of a backward in two halves the first gives
    back some and the second the rest. When things happen does not matter, only each rank's order.

    Args:
        order: whose ranks are asked about.
        input_frees: share that the input gradient alone gives back: one half if not given, nothing where the whole
            activation is kept for the weight gradient.
    """
    ends = {
        (leaf.stage, leaf.micro_batch)
        for row in order.rows
        for action in row
        for leaf in action.leaves
        if leaf.kind in (Kind.BACKWARD, Kind.WEIGHT)
    }
    whole, part = input_frees.denominator, input_frees.numerator
    moves = {Kind.FORWARD: whole, Kind.BACKWARD: -whole, Kind.INPUT: -part, Kind.WEIGHT: part - whole}
    found = []
    for row, chunks in zip(order.rows, chunks_of(order), strict=True):
        changes = [
            moves[leaf.kind]
            for action in row
            for leaf in action.leaves
            if leaf.kind in moves and (leaf.stage, leaf.micro_batch) in ends
        ]
        found.append(Fraction(max(accumulate(changes, initial=0)), whole * chunks))
    return tuple(found)
