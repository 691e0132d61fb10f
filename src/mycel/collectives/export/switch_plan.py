"""Schedules of switches that add, as plans with switch channels: what a switch adds, one rank asks it to.

In such a schedule every rank sends a chunk to the switch, which adds and sends the sum to all. In a plan one thread
block says so by one operation on the switch channel. The chunks are dealt out to the ranks. Before, every rank must
know that all others have begun, and after, that all others are through; the signals of both go over memory channels.
"""

from __future__ import annotations

from itertools import combinations

from mycel.collectives.channels import ChannelPlan
from mycel.collectives.schedule import Schedule
from mycel.errors import ScheduleError

__all__ = ["switch_plan"]


def switch_plan(schedule: Schedule) -> ChannelPlan:
    """The plan of an all_reduce whose chunks are each added by one switch and sent to all ranks by it.

    Raises:
        ScheduleError: another collective, or a chunk that goes another way.
    """
    c = schedule.collective
    if c.name != "all_reduce":
        raise ScheduleError(
            f"MSCCL++ plans express all_reduce through switches that add, and not {c.name}; synthesize it without "
            "'computes'"
        )
    _check_ways(schedule)
    plan = ChannelPlan(
        "all_reduce", c.num_ranks, name=f"mycel_{schedule.method}_switch", chunks=schedule.num_units, in_place=True
    )
    blocks = [rank.block() for rank in plan.ranks]
    ends = [end for pair in combinations(blocks, 2) for end in plan.memory(*pair)]
    for end in ends:
        end.signal(is_relaxed=True)
    for end in ends:
        end.wait(is_relaxed=True)
    behind = plan.switch(blocks, "input")
    for number, chunk in enumerate(schedule.chunks):
        behind[number % c.num_ranks].reduce_broadcast(chunk.start, chunk.stop - chunk.start)
    for end in ends:
        end.signal()
    for end in ends:
        end.wait()
    return plan


def _check_ways(schedule: Schedule) -> None:
    """Refuse chunks that are not added up, whole, by one switch next to all ranks."""
    n = schedule.collective.num_ranks
    into: dict[int, set[tuple[int, int]]] = {}
    out: dict[int, set[tuple[int, int]]] = {}
    for number, t in enumerate(schedule.transfers):
        if (t.src < n) == (t.dst < n):
            where = "from rank to rank" if t.src < n else "from switch to switch"
            raise ScheduleError(
                f"MSCCL++ plan: transfer {number} goes {where} with chunk {t.chunk}, and a switch channel is one "
                "switch that all ranks reach; synthesize without 'computes'"
            )
        side = into if t.src < n else out
        side.setdefault(t.chunk, set()).add((t.dst, t.src) if t.src < n else (t.src, t.dst))
    for chunk in range(len(schedule.chunks)):
        switches = {switch for switch, _ in into.get(chunk, set()) | out.get(chunk, set())}
        ranks = [{rank for _, rank in side.get(chunk, set())} for side in (into, out)]
        if len(switches) != 1 or any(len(side) != n for side in ranks):
            raise ScheduleError(
                f"MSCCL++ plan: chunk {chunk} is added by {len(switches)} switches for {len(ranks[1])} of {n} ranks; "
                "a switch channel is one switch that all ranks reach"
            )
