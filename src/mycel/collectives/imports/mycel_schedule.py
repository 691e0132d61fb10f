"""mycel's own schedules, in JSON or text form."""

from __future__ import annotations

from typing import Any

from mycel.collectives.imports.content import Content
from mycel.collectives.schedule import Schedule
from mycel.collectives.verify import verify_schedule
from mycel.errors import MycelError, ScheduleError

__all__ = ["check", "parse"]


def parse(content: Content) -> Schedule:
    """The schedule.

    Raises:
        ScheduleError: malformed.
    """
    try:
        if content.data is not None:
            return Schedule.from_json(content.data)
        return Schedule.from_text(content.text)
    except MycelError as error:
        raise ScheduleError(str(error)) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits
        raise ScheduleError(f"not a schedule: {error}") from None


def check(content: Content) -> dict[str, Any]:
    """Facts of a right schedule.

    Raises:
        ScheduleError: malformed.
        VerificationError: wrong.
    """
    schedule = parse(content)
    verify_schedule(schedule)
    facts = {
        "collective": schedule.collective.name,
        "num_ranks": schedule.collective.num_ranks,
        "method": schedule.method,
        "num_chunks": len(schedule.chunks),
        "num_transfers": len(schedule.transfers),
        "depth": schedule.depth,
        "algbw": float(schedule.algbw),
        "unit": schedule.topology.unit,
    }
    what = f"{facts['collective']} over {facts['num_ranks']} ranks on {schedule.topology.name}"
    summary = (
        f"{what}{schedule.collective.blocks_in_words}, {facts['num_transfers']} transfers, depth {facts['depth']}, "
        f"algbw {facts['algbw']:.6g} {facts['unit']}"
    )
    return {"summary": summary, **facts}
