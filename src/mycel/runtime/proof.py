"""Programs are proved before they run, by every rank for itself: no verdict to wait for, and none that could be lost.

A rank lowers the schedule for all ranks, as every rank does, and verifies the programs together, once for each
schedule when it is first used: that holds for every size (``mycel.collectives.proof``). In large groups it looks
at its own program by itself, as every rank does (``mycel.collectives.verify.own``). The first sizes at which the
schedule then runs are looked at too, with the lengths that they have, though long chunks in two pieces, and so are
later ones when they come back: what a training job settles on is proved by its own numbers, and a call of a size that
nobody has seen waits for nothing.
A rank that finds something wrong sends nothing, and its error reaches the others over the control connections.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from mycel.collectives.lower import RankTemplate, lower
from mycel.collectives.proof import prove_lowering
from mycel.collectives.schedule import Schedule
from mycel.collectives.synth import SYNTHESIZERS
from mycel.collectives.verify import verify_own_program, verify_programs
from mycel.errors import CommunicationError, ScheduleError
from mycel.runtime.calls import Call
from mycel.runtime.underway import planning
from mycel.settings import read_settings

__all__ = ["Proofs"]

#: Sizes of each schedule that are looked at: 10 ms each, for 8 ranks. The first at once, the others when they come
#: back: what changes with every call never does.
_SIZES_AT_ONCE = 4
_SIZES = 32
#: Up to so many ranks, all programs are verified together, which takes time in proportion to their square.
_TOGETHER = 32
#: Schedules whose proofs are remembered; more than the planner keeps.
_SCHEDULES = 256
#: Of each schedule, by identity, and of the rank whose program was looked at, or of all: the schedule itself, so that
#: its identity stays its own, and sizes. Groups share schedules, and so their proofs.
_proved: OrderedDict[tuple[int, int | None], tuple[Schedule, set[int]]] = OrderedDict()
_proving = threading.Lock()


class Proofs:
    """Proves, for a group's rank, what has not been proved in this process.

    Args:
        rank: in the group.
        poison: fails the group on every rank, and gives the error to raise; see ``Faults.poison``.
    """

    def __init__(self, rank: int, poison: Callable[[str, str], CommunicationError]) -> None:
        self._rank, self._poison = rank, poison
        self._level = read_settings().verify

    def require(self, schedule: Schedule, call: Call, pieces: int, *, comes_back: bool) -> bool:
        """Return if the programs that a call needs are right; the first time, that takes a while.

        Args:
            schedule: a verified schedule, which the call is to run over.
            call: what is about to be prepared for the first time, or run for the second.
            pieces: elements of a piece.
            comes_back: whether it is the second time.

        Returns:
            Whether all is said about a call; ``False``: its size is to be looked at if it comes back.

        Raises:
            CommunicationError: they are not right. So it is on all ranks, sooner or later.
        """
        if self._level == "schedules":
            return True
        lengths = call.block_elements
        rank = self._rank if _looks_alone(schedule) else None
        try:
            sizes = _proved_sizes(schedule, rank)
            later = False
            if lengths is None and len(sizes) < _SIZES and call.num_elements not in sizes:
                later = not comes_back and len(sizes) >= _SIZES_AT_ONCE
                if not later:
                    prove_lowering(schedule, call.num_elements, pieces, rank=rank)
                    sizes.add(call.num_elements)
            looks = self._level == "sizes" and call.knows_all and not comes_back
            if looks and rank is not None:
                program = RankTemplate(schedule, rank).expand(call.num_elements, pieces, block_elements=lengths)
                verify_own_program(schedule, program, pieces)
            elif looks:
                verify_programs(lower(schedule, call.num_elements, piece_elements=pieces, block_elements=lengths))
            return not later
        except ScheduleError as error:
            raise self._poison(
                "failed", f"rank {self._rank} refuses to run {call.title or call.name} ({schedule.method}): {error}"
            ) from error


def _looks_alone(schedule: Schedule) -> bool:
    """Whether each rank looks at its own program only; classics and exchanges need all programs together."""
    is_ours = schedule.method in SYNTHESIZERS and not schedule.has_places
    return schedule.collective.num_ranks > _TOGETHER and is_ours


def _proved_sizes(schedule: Schedule, rank: int | None) -> set[int]:
    """Sizes at which a schedule's programs, or one rank's, were looked at, after those of any size have been proved.

    Raises:
        ScheduleError: they are wrong.
    """
    with _proving:
        known = _proved.get((id(schedule), rank))
        if known is not None:
            _proved.move_to_end((id(schedule), rank))
            return known[1]
    with planning(f"the programs of {schedule.collective.name} over {schedule.topology.name}"):
        prove_lowering(schedule, rank=rank)
    with _proving:
        _, sizes = _proved.setdefault((id(schedule), rank), (schedule, set()))
        while len(_proved) > _SCHEDULES:
            _proved.popitem(last=False)
    return sizes
