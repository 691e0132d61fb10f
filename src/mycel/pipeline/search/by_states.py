"""Whole batches by states: the shortest way from the empty state to the last, with the makespan proved.

Where blocks wait for each other in a row, states are so few that looking at all of them is faster than reasoning: six
micro-batches of twelve blocks, four of them shared by all devices, with memory that binds, are 100,000 states. The
number of states is a limit that does not depend on how fast a machine is.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from mycel.pipeline.placement import Placement
from mycel.pipeline.search.solving import STATE_S, Clock
from mycel.pipeline.search.states import Moves, State, count_of_ideals
from mycel.pipeline.search.whole import Whole
from mycel.pipeline.timed import Timed

__all__ = ["find_by_states", "has_few_states", "has_some_states"]

#: States after which a walk ends: some ten seconds, and a few hundred MB.
_MOST_STATES = 1_000_000
#: Counts of started micro-batches up to which states are looked at before anything else, and at all.
_FEW_COUNTS, _MOST_COUNTS = 45_000, 60_000


def has_few_states(placement: Placement, num_micro_batches: int) -> bool:
    """Whether looking at all states is the first thing to do: a matter of seconds.

    Args:
        placement: blocks, devices and caps.
        num_micro_batches: of the batch.
    """
    return count_of_ideals(placement, num_micro_batches) <= _FEW_COUNTS


def has_some_states(placement: Placement, num_micro_batches: int) -> bool:
    """Whether looking at all states is worth trying when nothing else has proved anything.

    Args:
        placement: blocks, devices and caps.
        num_micro_batches: of the batch.
    """
    return count_of_ideals(placement, num_micro_batches) <= _MOST_COUNTS


def find_by_states(
    placement: Placement, num_micro_batches: int, *, clock: Clock, least: int, known: Timed | None = None
) -> Whole | None:
    """The shortest schedule of a batch, or ``None`` where there are too many states or time was up.

    Args:
        placement: blocks, devices and caps.
        num_micro_batches: of the batch.
        clock: for all of the search.
        least: that no makespan is below.
        known: a schedule; only shorter ones are looked for.
    """
    most = known.makespan - 1 if known is not None else None
    try:
        found = _walk(placement, num_micro_batches, clock, most)
    except KeyboardInterrupt:
        clock.stop()
        return None
    if found is None:
        return None
    if not found:
        return Whole(timed=known, bound=least if known is None else known.makespan, is_feasible=known is not None)
    timed = Timed(placement=placement, starts=_starts(placement, num_micro_batches, found))
    return Whole(timed=timed, bound=timed.makespan)


def _starts(placement: Placement, count: int, steps: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Starts by micro-batch, from blocks and times in the order of starts."""
    rows: list[list[int]] = [[0] * len(placement.blocks) for _ in range(count)]
    done = [0] * len(placement.blocks)
    for block, time in steps:
        rows[done[block]][block] = time
        done[block] += 1
    return tuple(map(tuple, rows))


def _walk(placement: Placement, count: int, clock: Clock, most: int | None) -> list[tuple[int, int]] | None:
    """Blocks and times of the shortest way in the order of starts; empty if there is none, ``None`` if not finished.

    States are taken in the order of time, as by Dijkstra; one from which the batch cannot end by ``most`` is left.
    """
    moves = Moves(placement)
    can_end = _Ends(placement, count)
    number: dict[State, int] = {moves.first: 0}
    times, before, started = array("q", [0]), array("q", [-1]), array("q", [-1])
    waiting: dict[int, list[State]] = {0: [moves.first]}
    looked_at = 0

    def reach(state: State, time: int, origin: int, block: int) -> bool:
        known = number.get(state)
        if known is None:
            number[state] = len(times)
            times.append(time)
            before.append(origin)
            started.append(block)
            return True
        if times[known] <= time:
            return False
        times[known], before[known], started[known] = time, origin, block
        return True

    while waiting:
        now = min(waiting)
        todo = waiting.pop(now)
        for state in todo:  # grows while it is gone through
            place = number[state]
            if times[place] < now:
                continue  # it was reached earlier since
            looked_at += 1
            clock.count(STATE_S)
            if looked_at > _MOST_STATES or (not looked_at & 1023 and clock.left_s <= 0):
                return None
            for block, after in moves.starts(state):
                if after[0][block] <= count and reach(after, now, place, block):
                    todo.append(after)
            further = moves.wait(state)
            if further is None:
                if min(state[0]) == count:
                    return _way(place, times, before, started)
                continue
            step, after = further
            if (most is None or can_end(after, now + step) <= most) and reach(after, now + step, place, -1):
                waiting.setdefault(now + step, []).append(after)
    return []


def _way(place: int, times: Sequence[int], before: Sequence[int], started: Sequence[int]) -> list[tuple[int, int]]:
    steps = []
    while place:
        if started[place] >= 0:
            steps.append((started[place], times[place]))
        place = before[place]
    return steps[::-1]


class _Ends:
    """When a batch can end at the earliest from a state on: by the work left on each device, and by chains."""

    def __init__(self, placement: Placement, count: int) -> None:
        blocks, longest = placement.blocks, placement.longest
        numbers = range(len(blocks))
        self._count = count
        self._times = [block.time for block in blocks]
        self._behind = [max(far for j in numbers if (far := longest[i][j]) is not None) for i in numbers]
        self._on = [(mine, min(self._behind[i] - blocks[i].time for i in mine)) for mine in placement.on]

    def __call__(self, state: State, now: int) -> int:
        counts, running, _ = state
        blocks, count, times = len(counts), self._count, self._times
        end = now
        for code, (mine, tail) in zip(running, self._on, strict=True):
            work = sum(times[i] * (count - counts[i]) for i in mine)
            if work or code:
                end = max(end, now + code // blocks + work + tail)
        for done, time, behind in zip(counts, times, self._behind, strict=True):
            if done < count:
                end = max(end, now + behind + (count - 1 - done) * time)
        return end
