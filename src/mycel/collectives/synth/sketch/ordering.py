"""Ordering: when each transfer of given routes starts, so that nothing is used twice at once, as early as possible.

A *job* is a transfer, a *lane* the logical link it takes, a *machine* something that lanes share; machines serve one
message at a time. A message carries one or several jobs of one lane: it pays the lane's latency once, waits until
the last of its chunks is there, and delivers all of them when it ends.

First come list schedules: what can start soonest and has the longest way on goes first, for several weights of the
two and several lengths of messages. Each is repeated backwards in time and forwards again, a job being as urgent as
the schedule before made it. Last, an exact search (``refine``) moves whole orders, starting from the best of these.

References:
    K. Y. Li, R. J. Willis, "An iterative scheduling technique for resource-constrained project scheduling",
    European J. Operational Research 56(3), 1992 (forward and backward passes).
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mycel.collectives.cp_sat import cp_sat, solve

__all__ = [
    "Lane",
    "Message",
    "Problem",
    "finish_of",
    "least_time",
    "list_schedules",
    "mirrored",
    "refine",
    "start_all",
    "turned",
]

#: How much of a tick of a chunk's way on a tick of delay is worth, and messages of at most how many chunks.
_WEIGHTS = (0.0, 0.05, 0.15, 0.3, 0.6, 1.0, 2.0, 8.0)
_LENGTHS = (1, 2, 4, 8, 64)
#: Times that a list schedule is made backwards and forwards again.
_SWINGS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A logical link; all times in ticks.

    Attributes:
        alpha: latency of a message.
        beta: a chunk adds this to a message.
        machines: each with what a chunk adds to the time it is busy.
    """

    alpha: int
    beta: int
    machines: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Jobs to be put in order.

    Attributes:
        lanes: logical links.
        lane_of: of each job.
        needs: of each job, those that must have arrived before it starts.
        firsts: of each job, those of its lane that must not start after it.
        num_machines: machines are ``0 .. num_machines-1``.
    """

    lanes: tuple[Lane, ...]
    lane_of: tuple[int, ...]
    needs: tuple[tuple[int, ...], ...]
    firsts: tuple[tuple[int, ...], ...]
    num_machines: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Jobs of one lane that travel together from ``start`` on."""

    start: int
    jobs: tuple[int, ...]


def _took(problem: Problem, jobs: Sequence[int]) -> int:
    lane = problem.lanes[problem.lane_of[jobs[0]]]
    return lane.alpha + lane.beta * len(jobs)


def finish_of(problem: Problem, messages: Iterable[Message]) -> int:
    """When the last message has arrived."""
    return max((m.start + _took(problem, m.jobs) for m in messages), default=0)


def start_all(problem: Problem, order: Iterable[tuple[int, ...]]) -> list[Message]:
    """The given messages, in the given order on every machine, each as early as that allows.

    Args:
        problem: its jobs, each in one message.
        order: messages, each after those it waits for.
    """
    free = [0] * problem.num_machines
    arrived = [0] * len(problem.lane_of)
    found = []
    for jobs in order:
        lane = problem.lanes[problem.lane_of[jobs[0]]]
        start = max((free[m] for m, _ in lane.machines), default=0)
        start = max([start, *(arrived[need] for job in jobs for need in problem.needs[job])])
        for m, beta in lane.machines:
            free[m] = start + lane.alpha + beta * len(jobs)
        for job in jobs:
            arrived[job] = start + lane.alpha + lane.beta * len(jobs)
        found.append(Message(start=start, jobs=jobs))
    return found


def _ways_on(problem: Problem) -> list[int]:
    """Of each job, the least time from its start until all that waits for it has arrived."""
    waiting: list[list[int]] = [[] for _ in problem.needs]
    open_needs = [0] * len(problem.needs)
    for job, needs in enumerate(problem.needs):
        for need in needs:
            waiting[need].append(job)
            open_needs[job] += 1
    order = [job for job, count in enumerate(open_needs) if not count]
    for job in order:
        for later in waiting[job]:
            open_needs[later] -= 1
            if not open_needs[later]:
                order.append(later)
    way = [0] * len(problem.needs)
    for job in reversed(order):
        way[job] = _took(problem, (job,)) + max((way[later] for later in waiting[job]), default=0)
    return way


def least_time(problem: Problem) -> int:
    """No order takes less: the longest way, and the work of the busiest machine."""
    work = [0] * problem.num_machines
    for number in problem.lane_of:
        for machine, beta in problem.lanes[number].machines:
            work[machine] += beta
    return max([*_ways_on(problem), *work], default=0)


def list_schedules(problem: Problem) -> list[Message]:
    """The best of the list schedules, each improved by turns backwards and forwards."""
    way = _ways_on(problem)
    best: list[Message] | None = None
    lengths = _LENGTHS if any(lane.alpha for lane in problem.lanes) else _LENGTHS[:1]
    for length in lengths:
        for weight in _WEIGHTS:
            found = _swing(problem, _list_schedule(problem, way, weight, length), length)
            if best is None or finish_of(problem, found) < finish_of(problem, best):
                best = found
    return best or []


def _list_schedule(problem: Problem, way: Sequence[int], weight: float, length: int) -> list[Message]:
    """One list schedule.

    Args:
        problem: its jobs.
        way: see ``_ways_on``.
        weight: of a job's way on against its delay.
        length: most jobs a message.
    """
    count = len(problem.lane_of)
    free = [0] * problem.num_machines
    waiting: list[list[int]] = [[] for _ in range(count)]
    blocked = [len(needs) + len(firsts) for needs, firsts in zip(problem.needs, problem.firsts, strict=True)]
    for job in range(count):
        for other in (*problem.needs[job], *problem.firsts[job]):
            waiting[other].append(job)
    there = [0] * count
    ready: list[set[int]] = [set() for _ in problem.lanes]
    heap: list[tuple[float, int, int]] = []

    def earliest(job: int) -> int:
        machines = problem.lanes[problem.lane_of[job]].machines
        return max([there[job], *(free[m] for m, _ in machines)])

    def enter(job: int) -> None:
        ready[problem.lane_of[job]].add(job)
        heapq.heappush(heap, (earliest(job) - weight * way[job], -way[job], job))

    for job in range(count):
        if not blocked[job]:
            enter(job)
    done = [False] * count
    found = []
    while heap:
        key, _, job = heapq.heappop(heap)
        if done[job]:
            continue
        start = earliest(job)
        if start - weight * way[job] > key:
            heapq.heappush(heap, (start - weight * way[job], -way[job], job))
            continue
        number = problem.lane_of[job]
        jobs = [job]
        if length > 1:
            others = [other for other in ready[number] if other != job and there[other] <= start]
            jobs += sorted(others, key=lambda other: (-way[other], other))[: length - 1]
        lane = problem.lanes[number]
        for m, beta in lane.machines:
            free[m] = start + lane.alpha + beta * len(jobs)
        end = start + lane.alpha + lane.beta * len(jobs)
        found.append(Message(start=start, jobs=tuple(jobs)))
        for one in jobs:
            done[one] = True
            ready[number].discard(one)
        for one in jobs:
            for later in waiting[one]:
                if one in problem.needs[later]:
                    there[later] = max(there[later], end)
                blocked[later] -= 1
                if not blocked[later]:
                    enter(later)
    return found


def tightened(problem: Problem, messages: Iterable[Message]) -> list[Message]:
    """The same messages in the same order, each as early as that allows."""
    return start_all(problem, [m.jobs for m in sorted(messages, key=lambda m: (m.start, m.jobs))])


def turned(problem: Problem, messages: Iterable[Message]) -> list[Message]:
    """Messages that solve the mirrored problem, as messages that solve this one."""
    ends = {m.jobs: m.start + _took(problem, m.jobs) for m in messages}
    return start_all(problem, sorted(ends, key=lambda jobs: (-ends[jobs], jobs)))


def mirrored(problem: Problem) -> Problem:
    """The same jobs with time running backwards."""

    def backwards(table: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in table]
        for job, others in enumerate(table):
            for other in others:
                found[other].append(job)
        return tuple(map(tuple, found))

    return Problem(
        lanes=problem.lanes,
        lane_of=problem.lane_of,
        needs=backwards(problem.needs),
        firsts=backwards(problem.firsts),
        num_machines=problem.num_machines,
    )


def _swing(problem: Problem, messages: list[Message], length: int) -> list[Message]:
    """List schedules backwards and forwards in turn, each job as urgent as the last one made it; the best of them."""
    back, best, current = mirrored(problem), messages, messages
    for _ in range(_SWINGS):
        behind = _list_schedule(back, _ends(problem, current), 1.0, length)
        current = _list_schedule(problem, _ends(problem, behind), 1.0, length)
        best = min(best, turned(problem, behind), current, key=lambda found: finish_of(problem, found))
    return best


def _ends(problem: Problem, messages: Iterable[Message]) -> list[int]:
    ends = [0] * len(problem.lane_of)
    for m in messages:
        for job in m.jobs:
            ends[job] = m.start + _took(problem, m.jobs)
    return ends


def refine(
    problem: Problem, messages: Sequence[Message], least: int, *, time_limit_s: float, close: float, seed: int = 0
) -> list[Message]:
    """The best messages an exact search finds, from given ones; repeated while it helps.

    Args:
        problem: its jobs.
        messages: where it starts.
        least: no schedule is shorter; the search stops when it is near.
        time_limit_s: seconds to search.
        close: near enough to ``least``, relative.
        seed: of the search.
    """
    best = list(messages)
    until = time.monotonic() + time_limit_s
    while finish_of(problem, best) > least * (1 + close) and until - time.monotonic() > 0.2:
        found = _search(problem, best, least, until - time.monotonic(), close, seed)
        found = tightened(problem, found)
        if finish_of(problem, found) >= finish_of(problem, best):
            break
        best = found
    return best


def _search(
    problem: Problem, messages: Sequence[Message], least: int, time_limit_s: float, close: float, seed: int
) -> list[Message]:
    """One exact search: intervals that do not overlap, and neighbours on a lane that may join into one message."""
    cp_model = cp_sat("method sketch")
    model: Any = cp_model.CpModel()
    horizon = finish_of(problem, messages)
    count = len(problem.lane_of)
    slot = [model.new_int_var(0, horizon, "") for _ in range(count)]
    start = [model.new_int_var(0, horizon, "") for _ in range(count)]
    end = [model.new_int_var(0, horizon, "") for _ in range(count)]
    total = model.new_int_var(min(least, horizon), horizon, "")
    on_lane: dict[int, list[int]] = {}
    joined_now: dict[int, int] = {}
    for message in sorted(messages, key=lambda m: (m.start, m.jobs)):
        on_lane.setdefault(problem.lane_of[message.jobs[0]], []).extend(message.jobs)
        joined_now.update({b: a for a, b in pairwise(message.jobs)})
    before = {b: a for jobs in on_lane.values() for a, b in pairwise(jobs)}
    mate: dict[int, Any] = {}
    for job, other in before.items():
        if problem.lanes[problem.lane_of[job]].alpha:
            mate[job] = model.new_bool_var("")
            lane = problem.lanes[problem.lane_of[job]]
            first = 1 if other not in mate else 1 - mate[other]
            model.add(slot[job] == slot[other] + lane.beta + lane.alpha * first).only_enforce_if(mate[job])
            model.add(start[job] == start[other]).only_enforce_if(mate[job])
            model.add(end[other] >= end[job]).only_enforce_if(mate[job])
            model.add(start[job] == slot[job]).only_enforce_if(~mate[job])
            model.add_hint(mate[job], joined_now.get(job) == other)
    intervals: list[list[Any]] = [[] for _ in range(problem.num_machines)]
    followed = {before[job] for job in mate}
    for job in range(count):
        lane = problem.lanes[problem.lane_of[job]]
        alone = 1 - mate[job] if job in mate else 1
        if job not in mate:
            model.add(start[job] == slot[job])
        model.add(end[job] >= slot[job] + lane.beta + lane.alpha * alone)
        model.add(total >= end[job])
        for need in problem.needs[job]:
            model.add(start[job] >= end[need])
        for other in problem.firsts[job]:
            model.add(slot[job] >= slot[other])
        for machine, beta in lane.machines:
            # Joined chunks follow each other at the pace of the slowest part of the lane.
            pace = lane.beta if job in mate or job in followed else beta
            size = pace + lane.alpha * alone
            over = slot[job] + size if job not in mate else model.new_int_var(0, horizon, "")
            intervals[machine].append(model.new_interval_var(slot[job], size, over, ""))
    for crowd in intervals:
        model.add_no_overlap(crowd)
    for message in messages:
        lane = problem.lanes[problem.lane_of[message.jobs[0]]]
        for position, job in enumerate(message.jobs):
            model.add_hint(start[job], message.start)
            model.add_hint(slot[job], message.start + (lane.alpha + position * lane.beta if position else 0))
            model.add_hint(end[job], message.start + _took(problem, message.jobs))
    model.add_hint(total, horizon)
    model.minimize(total)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 2
    solver.parameters.random_seed = seed
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.relative_gap_limit = close
    if solve(solver, model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return list(messages)
    found: dict[int, list[int]] = {}
    head: dict[int, int] = {}
    for jobs in on_lane.values():
        for job in jobs:
            joined = job in mate and solver.boolean_value(mate[job])
            head[job] = head[before[job]] if joined else job
            found.setdefault(head[job], []).append(job)
    return [Message(start=solver.value(start[first]), jobs=tuple(jobs)) for first, jobs in found.items()]
