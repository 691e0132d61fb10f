"""Programs are proved before they run, by every rank for itself: no verdict to wait for, and none that could be lost.

A rank lowers the schedule for all ranks, as every rank does, and verifies the programs together, once for each
schedule when it is first used: that holds for every size (``mycel.collectives.proof``). A rank that finds something
wrong sends nothing, and its error reaches the others over the control connections.
"""

from __future__ import annotations

from collections.abc import Callable

from mycel.collectives.lower import lower
from mycel.collectives.proof import prove_lowering
from mycel.collectives.schedule import Schedule
from mycel.collectives.verify import verify_programs
from mycel.errors import CommunicationError, ScheduleError
from mycel.runtime.calls import Call
from mycel.settings import read_settings

__all__ = ["Proofs"]


class Proofs:
    """What a group's rank has proved.

    Args:
        rank: in the group.
        poison: fails the group on every rank, and gives the error to raise; see ``Faults.poison``.
    """

    def __init__(self, rank: int, poison: Callable[[str, str], CommunicationError]) -> None:
        self._rank, self._poison = rank, poison
        self._level = read_settings().verify
        #: By identity; the schedule is kept, so that its identity stays its own.
        self._proved: dict[int, Schedule] = {}

    def require(self, schedule: Schedule, call: Call, pieces: int) -> None:
        """Return if the programs that a call needs are right; the first time, that takes a while.

        Args:
            schedule: a verified schedule, which the call is to run over.
            call: what is about to be prepared for the first time.
            pieces: elements of a piece.

        Raises:
            CommunicationError: they are not. So it is on all ranks, sooner or later.
        """
        try:
            if self._level != "schedules" and id(schedule) not in self._proved:
                prove_lowering(schedule)
                self._proved[id(schedule)] = schedule
            if self._level == "sizes" and call.knows_all:
                blocks = call.block_elements
                verify_programs(lower(schedule, call.num_elements, piece_elements=pieces, block_elements=blocks))
        except ScheduleError as error:
            raise self._poison(
                "failed", f"rank {self._rank} refuses to run {call.title or call.name} ({schedule.method}): {error}"
            ) from error

    def forget(self) -> None:
        """Start again: the schedules are no longer used."""
        self._proved.clear()
