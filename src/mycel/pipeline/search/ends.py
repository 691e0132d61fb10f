"""Warm-up, cool-down and whatever else between two times of a schedule, put in a better order with the rest kept.

What stands before a window keeps its start times, and what stands behind it the order of each device, so that from
each of its blocks to the end of the batch there is a longest way that is known. The blocks in between are a small
batch of their own: each may start when what is before the window allows, the makespan is the largest sum of a start
and the way behind it, and each device begins with what it holds then. Nothing is approximated: what the solver calls
shorter is shorter by as much, and where it finds nothing there is nothing in that window.

References:
    P. Laborie, D. Godard, "Self-adapting large neighborhood search: application to single-mode scheduling problems",
    MISTA 2007 (time windows as neighbourhoods).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

from mycel.collectives.cp_sat import cp_sat
from mycel.pipeline.placement import Placement
from mycel.pipeline.search.solving import Clock
from mycel.pipeline.search.whole import limit_memory
from mycel.pipeline.timed import Place, Timed, earliest

__all__ = ["improve", "reorder"]

#: Blocks in a window: what CP-SAT orders and proves at once, and what it still does in about a second.
_WINDOWS = (36, 56)
#: Seconds for changing a window into another that is as good.
_SHAKE_S = 0.1


def improve(
    timed: Timed,
    *,
    clock: Clock,
    least: int,
    rounds: int = 12,
    most_s: float = 1.0,
    told: Callable[[int], None] | None = None,
) -> Timed:
    """Windows at both ends and along the schedule, as long as one makes it shorter and time is left.

    Args:
        timed: a schedule.
        clock: for all of the search.
        least: makespan at which nothing is left to gain.
        rounds: how often the schedule is changed into another of the same length, from which windows begin anew.
        most_s: seconds a window.
        told: called with each shorter makespan.

    Returns:
        A schedule that is no longer.
    """
    timed = _windows(timed, clock, least, most_s, told)
    chance = Random(1)
    for _ in range(rounds):
        if timed.makespan <= least or clock.left_s <= 0:
            return timed
        moved = timed
        size = _width(timed, _WINDOWS[0])
        for begin in range(0, timed.makespan, max(1, size * 2 // 3)):
            moved = reorder(moved, begin, begin + size, clock=clock, most_s=_SHAKE_S, chance=chance)
        timed = _windows(moved, clock, least, most_s, told)
    return timed


def _windows(timed: Timed, clock: Clock, least: int, most_s: float, told: Callable[[int], None] | None) -> Timed:
    """Windows over the whole schedule, until none makes it shorter."""
    for num_blocks in _WINDOWS:
        best = None
        while timed.makespan != best:
            best, size = timed.makespan, _width(timed, num_blocks)
            begins = range(0, max(1, timed.makespan - size // 2), max(1, size // 2))
            for begin in sorted(begins, key=partial(_from_ends, timed.makespan - size)):
                if timed.makespan <= least or clock.left_s <= 0:
                    return timed
                shorter = reorder(timed, begin, begin + size, clock=clock, most_s=most_s)
                if shorter.makespan < timed.makespan:
                    timed = shorter
                    if told is not None:
                        told(timed.makespan)
    return timed


def _from_ends(last: int, begin: int) -> int:
    """How far a window is from the nearer end: there most is to be gained."""
    return min(begin, abs(last - begin))


def _width(timed: Timed, num_blocks: int) -> int:
    """Time in which so many blocks start, about."""
    return max(1, timed.makespan * min(num_blocks, _count(timed)) // _count(timed))


def _count(timed: Timed) -> int:
    return timed.num_micro_batches * len(timed.placement.blocks)


def reorder(
    timed: Timed, begin: int, end: int, *, clock: Clock, most_s: float = float("inf"), chance: Random | None = None
) -> Timed:
    """The best schedule in which only blocks that start from ``begin`` to before ``end`` change places.

    Args:
        timed: a schedule.
        begin, end: time units.
        clock: for all of the search.
        most_s: seconds for this window.
        chance: if given, any other schedule that is no longer will do, and this draws in which direction.

    Returns:
        A shorter schedule (with ``chance`` one that is no longer); the given one where none was found in time.
    """
    placement, starts = timed.placement, timed.starts
    blocks = placement.blocks
    places = [(i, m) for m in range(timed.num_micro_batches) for i in range(len(blocks))]
    free = [place for place in places if begin <= starts[place[1]][place[0]] < end]
    if len(free) < 2:
        return timed
    inside = set(free)
    behind = _ways(timed, {place for place in places if starts[place[1]][place[0]] >= end})
    most = timed.makespan - (chance is None)
    model = cp_sat("the search for orders").CpModel()
    release = _releases(timed, free, begin)
    tail = _tails(timed, free, behind)
    begins: dict[Place, Any] = {}
    for place in free:
        latest = most - tail[place]
        if latest < release[place]:
            return timed  # on a way that nothing in the window shortens
        begins[place] = model.new_int_var(release[place], latest, "")
        model.add_hint(begins[place], min(latest, starts[place[1]][place[0]]))
    makespan = model.new_int_var(0, most, "")
    for place in free:
        model.add(begins[place] + tail[place] <= makespan)
        earlier = (place[0], place[1] - 1)
        if earlier in inside:
            model.add(begins[place] >= begins[earlier] + blocks[place[0]].time)
        for before, delay in placement.waits[place[0]]:
            if (source := (before, place[1])) in inside:
                model.add(begins[place] >= begins[source] + blocks[before].time + delay)
    for device, mine in enumerate(placement.on):
        here = [place for place in free if place[0] in mine]
        model.add_no_overlap(
            model.new_fixed_size_interval_var(begins[place], blocks[place[0]].time, "") for place in here
        )
        done = [place for place in places if place[0] in mine and starts[place[1]][place[0]] < begin]
        limit_memory(model, placement, device, begins, most, before=done)
    if chance is None:
        model.minimize(makespan)
    else:
        model.minimize(sum(chance.choice((-1, 1, 1)) * start for start in begins.values()))
    answer, solver = clock.solve(model, most_s=most_s)
    if answer not in ("optimal", "found"):
        return timed
    at = {place: (starts[place[1]][place[0]], 0) for place in places}
    for place, start in begins.items():
        at[place] = (solver.value(start), 1)
    group = {place: 0 if starts[place[1]][place[0]] < begin else 2 for place in places} | dict.fromkeys(inside, 1)
    rows = [
        sorted(((i, m) for i in mine for m in range(timed.num_micro_batches)), key=lambda p: (group[p], at[p][0]))
        for mine in placement.on
    ]
    return earliest(placement, rows)


def _ways(timed: Timed, kept: set[Place]) -> dict[Place, int]:
    """Of each block behind the window the time from its start to the end of the batch, in the order that is kept."""
    placement = timed.placement
    blocks = placement.blocks
    after = _successors(placement)
    next_on = _next_on_devices(timed)
    ways: dict[Place, int] = {}
    for place in sorted(kept, key=lambda p: -timed.starts[p[1]][p[0]]):
        i, m = place
        longest = blocks[i].time
        for j, delay in after[i]:
            longest = max(longest, blocks[i].time + delay + ways[j, m])
        for then in next_on[place]:
            longest = max(longest, blocks[i].time + ways[then])
        ways[place] = longest
    return ways


def _tails(timed: Timed, free: list[Place], ways: dict[Place, int]) -> dict[Place, int]:
    """Of each free block the time from its start to the end of the batch over what is behind the window."""
    placement = timed.placement
    blocks = placement.blocks
    after = _successors(placement)
    first_on = []
    for row in timed.rows:
        first = next((place for place in row if place in ways), None)
        first_on.append(0 if first is None else ways[first])
    tails = {}
    for i, m in free:
        behind = [first_on[device] for device in blocks[i].devices]
        behind += [delay + ways[j, m] for j, delay in after[i] if (j, m) in ways]
        tails[i, m] = blocks[i].time + max(behind)
    return tails


def _releases(timed: Timed, free: list[Place], begin: int) -> dict[Place, int]:
    """Of each free block the time before which what stands before the window does not let it start."""
    placement, starts = timed.placement, timed.starts
    blocks = placement.blocks
    through = []
    for row in timed.rows:
        ends = [starts[m][i] + blocks[i].time for i, m in row if starts[m][i] < begin]
        through.append(max(ends, default=0))
    inside = set(free)
    releases = {}
    for i, m in free:
        least = [through[device] for device in blocks[i].devices]
        least += [starts[m][j] + blocks[j].time + delay for j, delay in placement.waits[i] if (j, m) not in inside]
        releases[i, m] = max(least)
    return releases


def _successors(placement: Placement) -> list[list[tuple[int, int]]]:
    after: list[list[tuple[int, int]]] = [[] for _ in placement.blocks]
    for d in placement.dependencies:
        after[d.before].append((d.after, d.delay))
    return after


def _next_on_devices(timed: Timed) -> dict[Place, list[Place]]:
    found: dict[Place, list[Place]] = {}
    for row in timed.rows:
        for place, then in pairwise(row):
            found.setdefault(place, []).append(then)
        found.setdefault(row[-1], [])
    return found
