"""The shortest period by states: a schedule that goes on for ever in few states goes round in a circle.

States count how far each block is ahead of the one that is least far, and a step by which all are one further leads
back to the same state. So among schedules in which no block is more than so many micro-batches ahead of another, the
shortest period is the least ratio of time to micro-batches over all circles of the graph of states, with any number
of micro-batches in a repetend. From a period that is known each circle that beats it is a better one; when none does,
none exists (Newton's method on the ratio; circles are found by Bellman's and Ford's).

Where memory keeps blocks closer together than the limit says anyway, nothing was left out: the period is the least
of any schedule.

References:
    E. L. Lawler, "Combinatorial optimization: networks and matroids", 1976, chapter 3.13 (cycles of least ratio).
    A. Dasdan, "Experimental analysis of the fastest optimum cycle ratio and mean algorithms", ACM TODAES 9(4), 2004.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from mycel.pipeline.placement import Placement
from mycel.pipeline.search.modulo import Repetend
from mycel.pipeline.search.solving import STATE_S, Clock
from mycel.pipeline.search.states import Moves, State

__all__ = ["Circles", "find_circles"]

#: States of a graph, at most: a few seconds.
_MOST_STATES = 130_000
#: Rounds between two looks for a circle.
_ROUNDS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Circles:
    """What the states within a lead say about periods.

    Attributes:
        repetend: the best of those that are short enough to be used; ``None`` if none beats what was known.
        is_least: whether no circle within the lead beats the repetend, or what was known.
        is_all: whether nothing was left out, as no block can be further ahead than the lead.
    """

    repetend: Repetend | None
    is_least: bool
    is_all: bool


def find_circles(
    placement: Placement, lead: int, *, period: Fraction, most_micro_batches: int, clock: Clock
) -> Circles | None:
    """Repetends in which no block is further ahead of another, or ``None`` for too many states or no time.

    Args:
        placement: blocks, devices and caps.
        lead: micro-batches that one block may have started before another, at most.
        period: that is to be beaten.
        most_micro_batches: of a repetend.
        clock: for all of the search.
    """
    graph = _graph(placement, lead, clock)
    if graph is None:
        return None
    states, edges, is_all = graph
    best: Repetend | None = None
    while True:
        circle = _circle(len(states), edges, period, clock)
        if circle is None:
            return (
                None if clock.left_s <= 0 and best is None else Circles(repetend=best, is_least=False, is_all=False)
            )
        if not len(circle):
            return Circles(repetend=best, is_least=True, is_all=is_all)
        found = _repetend(placement, states[edges[circle[0], 0]], edges[circle])
        assert found.period < period
        if found.num_micro_batches > most_micro_batches:
            return Circles(repetend=best, is_least=False, is_all=False)
        best, period = found, found.period


def _graph(placement: Placement, lead: int, clock: Clock) -> tuple[list[State], np.ndarray, bool] | None:
    """States within a lead, and rows of (from, to, time, micro-batches further on, block that starts or -1)."""
    moves = Moves(placement)
    number, states = {moves.first: 0}, [moves.first]
    edges: list[tuple[int, int, int, int, int]] = []
    is_all = True
    for place, state in enumerate(states):  # grows while it is gone through
        clock.count(STATE_S)
        if len(states) > _MOST_STATES or (not place & 1023 and clock.left_s <= 0):
            return None
        following = [(block, 0, after) for block, after in moves.starts(state)]
        further = moves.wait(state)
        if further is not None:
            following.append((-1, *further))
        for block, time, after in following:
            counts = after[0]
            least = min(counts)
            if max(counts) - least > lead:
                is_all = False
                continue
            if least:
                after = (tuple(count - least for count in counts), *after[1:])
            where = number.get(after)
            if where is None:
                where = number[after] = len(states)
                states.append(after)
            edges.append((place, where, time, least, block))
    return states, np.array(edges, dtype=np.int64).reshape(-1, 5), is_all


def _circle(num_states: int, edges: np.ndarray, period: Fraction, clock: Clock) -> np.ndarray | None:
    """Edges of a circle of a shorter period, in order; none if there is none, ``None`` if time is up."""
    if not len(edges):
        return np.empty(0, dtype=np.int64)
    order = np.argsort(edges[:, 1], kind="stable")
    sources, ends = edges[order, 0], edges[order, 1]
    lengths = period.denominator * edges[order, 2] - period.numerator * edges[order, 3]
    into, first = np.unique(ends, return_index=True)
    group = np.repeat(np.arange(len(into)), np.diff(np.append(first, len(ends))))
    distance = np.zeros(num_states, dtype=np.int64)
    by = np.full(num_states, -1, dtype=np.int64)
    rounds = 0
    while clock.left_s > 0:
        rounds += 1
        clock.count(num_states * STATE_S / 100)
        ways = distance[sources] + lengths
        shortest = np.minimum.reduceat(ways, first)
        is_better = shortest < distance[into]
        if not is_better.any():
            return np.empty(0, dtype=np.int64)
        which = np.flatnonzero(ways == shortest[group])[::-1]
        chosen = np.empty(len(into), dtype=np.int64)
        chosen[group[which]] = which  # of equal ones the first stays
        by[into[is_better]] = chosen[is_better]
        distance[into[is_better]] = shortest[is_better]
        if not rounds % _ROUNDS and (round_ := _round(by, sources)):
            return order[round_]
    return None


def _round(by: np.ndarray, sources: np.ndarray) -> list[int]:
    """A circle among the edges by which states were reached last, in order; empty if there is none."""
    came: list[int] = by.tolist()
    origin: list[int] = sources.tolist()
    seen = [0] * len(came)
    for start in range(len(came)):
        place = start
        while place >= 0 and not seen[place]:
            seen[place] = start + 1
            place = origin[came[place]] if came[place] >= 0 else -1
        if place >= 0 and seen[place] == start + 1:
            found: list[int] = []
            here = place
            while not found or here != place:
                found.append(came[here])
                here = origin[came[here]]
            return found[::-1]
    return []


def _repetend(placement: Placement, state: State, edges: np.ndarray) -> Repetend:
    """The repetend that a circle is, begun in a state of it."""
    count, length = int(edges[:, 3].sum()), int(edges[:, 2].sum())
    done = list(state[0])
    starts = [[0] * len(placement.blocks) for _ in range(count)]
    now = 0
    for _, _, time, _, block in edges.tolist():
        now += time
        if block >= 0:
            turn, row = divmod(done[block], count)
            starts[row][block] = now - turn * length
            done[block] += 1
    first = min(map(min, starts))
    return Repetend(
        placement=placement, time=length, starts=tuple(tuple(start - first for start in row) for row in starts)
    )
