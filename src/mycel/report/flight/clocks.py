"""Clocks of several machines, aligned by what the collectives themselves prove.

A rank cannot end an all_reduce before the last rank has begun it, whatever the clocks say. So every collective that
both machines took part in bounds the difference of their clocks from both sides, and the tightest of thousands of
them bounds it to about the time of a small collective. Bounds through third machines count too (shortest paths
over differences). No message is sent for it, and the figure comes with its uncertainty.

References:
    F. Cristian, "Probabilistic clock synchronization", Distributed Computing 3, 1989 (the middle of an interval).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mycel.report.flight.records import Call, Dump

__all__ = ["Clocks", "align"]

#: Collectives whose every output holds something of every input.
_ALL_TO_ALL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_FROM_ROOT = ("broadcast", "scatter")
_TO_ROOT = ("reduce", "gather")
_UNBOUNDED = np.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """How to read all ranks' times on one scale.

    Attributes:
        shift_ns: by rank; to be added to its readings.
        uncertainty_s: no reading is off by more, where ``how`` is a proof.
        how: in words.
    """

    shift_ns: dict[int, int]
    uncertainty_s: float
    how: str


def align(dumps: Sequence[Dump]) -> Clocks:
    """Shifts that put the times of all dumps on the scale of the first one's clock."""
    names = list(dict.fromkeys(dump.clock for dump in dumps))
    if len(names) == 1:
        return Clocks(shift_ns={d.rank: 0 for d in dumps}, uncertainty_s=0.0, how="all ranks read one clock")
    # Counted from the dump's own moment on the wall clock, so that what is searched for is small.
    wall = {d.clock: d.wall_ns - d.monotonic_ns for d in reversed(dumps)}
    limit = _limits(dumps, names, wall)
    for middle in range(len(names)):
        limit = np.minimum(limit, limit[:, middle, None] + limit[None, middle, :])
    # Clock c may be shifted by at most limit[0, c], and by at least -limit[c, 0], against the first one.
    most, least = limit[0], -limit[:, 0]
    known = np.isfinite(most) & np.isfinite(least)
    shift = np.where(known, (np.where(known, most, 0.0) + np.where(known, least, 0.0)) / 2, 0.0)
    width = np.abs(np.where(known, most, 0.0) - np.where(known, least, 0.0)) / 2
    if known.all():
        how = f"{len(names)} clocks, aligned by what their collectives prove"
        if (most < least).any():
            how += " (which contradict each other a little: the clocks drift)"
    else:
        some = "all" if not known[1:].any() else "some"
        how = f"{len(names)} clocks; {some} compared by wall-clock time only, for want of collectives in common"
    return Clocks(
        shift_ns={d.rank: wall[d.clock] - wall[names[0]] + round(float(shift[names.index(d.clock)])) for d in dumps},
        uncertainty_s=float(width.max()) / 1e9,
        how=how,
    )


def _limits(dumps: Sequence[Dump], names: Sequence[str], wall: dict[str, int]) -> npt.NDArray[np.float64]:
    """``[a, b]``: the most by which clock b may be shifted beyond clock a, in nanoseconds, after the wall's shift."""
    limit = np.full((len(names), len(names)), _UNBOUNDED)
    np.fill_diagonal(limit, 0.0)
    base = wall[names[0]]
    together: defaultdict[tuple[str, int, bool], list[tuple[int, int, Call]]] = defaultdict(list)
    for dump in dumps:
        number = names.index(dump.clock)
        for call in dump.calls:
            if call.state == "done" and call.even:
                place = dump.groups[call.group].ranks.index(dump.rank)
                together[call.key].append((number, place, call))
    shifts = [wall[name] - base for name in names]
    for sides in together.values():
        first = sides[0][2]
        begun = _extreme(max, ((n, c.started_ns) for n, p, c in sides if _gives(first, p)), shifts)
        ended = _extreme(min, ((n, c.ended_ns) for n, p, c in sides if _gets(first, p)), shifts)
        for a, end in ended.items():
            for b, start in begun.items():
                if a != b:
                    limit[a, b] = min(limit[a, b], end - start)
    return limit


def _gives(call: Call, place: int) -> bool:
    return call.collective in (*_ALL_TO_ALL, *_TO_ROOT) or place == call.root


def _gets(call: Call, place: int) -> bool:
    return call.collective in (*_ALL_TO_ALL, *_FROM_ROOT) or place == call.root


def _extreme(
    choose: Callable[[int, int], int], times: Iterable[tuple[int, int | None]], shifts: Sequence[int]
) -> dict[int, int]:
    found: dict[int, int] = {}
    for number, time_ns in times:
        if time_ns is not None:
            value = time_ns + shifts[number]
            found[number] = choose(found.get(number, value), value)
    return found
