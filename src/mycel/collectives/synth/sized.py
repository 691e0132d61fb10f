"""Sized: of several forests, from the fullest links to the fewest steps, the one that is fastest at a given size.

A forest at the bound is best for arrays without end. For one of a size, a hair's breadth below the bound is often far
shallower. Which is faster is what the simulator says; of schedules too large to be simulated, the model by which the
runtime chooses.
"""

from __future__ import annotations

from collections.abc import Iterable

from mycel.collectives.cost import estimate_seconds
from mycel.collectives.schedule import Schedule
from mycel.collectives.simulate import simulate
from mycel.cost import link_costs

__all__ = ["SHARES", "fastest"]

#: Shares of the bound at which forests are grown for a size.
SHARES = (1.0, 0.98, 0.95, 0.9)
#: Most messages of a schedule that is simulated.
_MOST_MESSAGES = 200_000


def fastest(candidates: Iterable[Schedule], num_bytes: int, *, links: str | None = None) -> Schedule:
    """The schedule that takes the least time at a size; of equals the first.

    Args:
        candidates: schedules of one collective on one fabric.
        num_bytes: of the collective's whole array.
        links: class of all links, instead of those of the topology, as for ``mycel.cost.link_costs``.
    """
    schedules = list(candidates)
    if len(schedules) == 1:
        return schedules[0]
    costs = link_costs(schedules[0].topology, links=links)
    processors, pieces = costs.processors(), costs.pieces(num_bytes)
    is_large = any(_messages(schedule, num_bytes, pieces[0]) > _MOST_MESSAGES for schedule in schedules)

    def seconds(schedule: Schedule) -> float:
        if is_large:
            return min(estimate_seconds(schedule, num_bytes, piece, processors, links=links) for piece in pieces)
        return min(simulate(schedule, num_bytes, piece_bytes=piece, links=links).seconds for piece in pieces)

    return min(schedules, key=seconds)


def _messages(schedule: Schedule, num_bytes: int, piece_bytes: int) -> int:
    """Messages in the smallest pieces, about."""
    columns = schedule.columns
    units = (schedule.chunk_stops - schedule.chunk_starts)[columns.chunk]
    return int((units * num_bytes // (schedule.num_units * piece_bytes) + 1).sum())
