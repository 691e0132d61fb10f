"""The order of many events: one in which all can happen, or a circle of waits; and whether it orders accesses.

The second works on bitsets. Events are then numbered so that every event comes after those it waits for. An event
happens over an interval: it may touch memory only once the events it waits for are complete, and others wait for its
own completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Turn", "find_circle", "find_unordered", "sort_events"]

#: Bits held at once (32 MiB for each of two arrays); more events are traced in several passes.
_MAX_BITS = 1 << 28


@dataclass(frozen=True, slots=True)
class Turn:
    """Every event of ``now`` must begin after every event of ``before`` is complete."""

    before: tuple[int, ...]
    now: tuple[int, ...]


def sort_events(before: Sequence[Sequence[int]]) -> list[int]:
    """Events in an order in which each comes after those before it; those that can never happen are left out.

    Args:
        before: of each event, others (repeats count for nothing) that must be complete before it begins.
    """
    left = [len(others) for others in before]
    after: list[list[int]] = [[] for _ in before]
    for event, others in enumerate(before):
        for other in others:
            after[other].append(event)
    order = [event for event, count in enumerate(left) if not count]
    for event in order:  # grows while it is walked
        for other in after[event]:
            left[other] -= 1
            if not left[other]:
                order.append(other)
    return order


def find_circle(before: Sequence[Sequence[int]], order: Sequence[int]) -> list[int]:
    """Events of which each waits for the next, and the last for the first, among those that ``order`` leaves out."""
    stuck = set(range(len(before))) - set(order)
    at, walk = min(stuck), dict[int, int]()
    while at not in walk:
        walk[at] = len(walk)
        at = next(other for other in before[at] if other in stuck)
    return list(walk)[walk[at] :]


def find_unordered(
    waits: Sequence[Sequence[int]],
    turns: Sequence[Turn],
    *,
    completes_after: Sequence[int] | None = None,
    begins_after: Sequence[int] | None = None,
) -> tuple[int, int, int] | None:
    """The first turn that the order leaves open, with a pair of its events; ``None`` if all are kept.

    Costs one bitset union an edge and one intersection a turn, for each pass over ``_MAX_BITS``.

    Args:
        waits: of each event, smaller numbers that must be complete before it begins.
        turns: what to check.
        completes_after: of each event, a smaller number that is complete when this one is, or -1.
        begins_after: of each event, a smaller number that begins no later than this one, or -1.
    """
    count = len(waits)
    window = max(_MAX_BITS // max(count, 1), 64)
    for low in range(0, count, window):
        high = min(low + window, count)
        begun: list[int] = []  # of each event: bitset over low..high-1 of those complete when it begins
        done: list[int] = []  # ... when it completes
        for event in range(count):
            bits = 0
            for other in waits[event]:
                bits |= done[other]
            if begins_after is not None and begins_after[event] >= 0:
                bits |= begun[begins_after[event]]
            begun.append(bits)
            if completes_after is not None and completes_after[event] >= 0:
                bits |= done[completes_after[event]]
            if low <= event < high:
                bits |= 1 << (event - low)
            done.append(bits)
        for position, turn in enumerate(turns):
            wanted = 0
            for event in turn.before:
                if low <= event < high:
                    wanted |= 1 << (event - low)
            for event in turn.now if wanted else ():
                open_ = wanted & ~begun[event]
                if open_:
                    return position, low + (open_ & -open_).bit_length() - 1, event
    return None
