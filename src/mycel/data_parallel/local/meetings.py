"""Meetings of a model's parts, one after the other in the same order on every rank, in front of the steps or behind.

Where ranks may leave, a meeting has two phases: all make one change of their changes, and then tell each other that
they have it. Whoever has heard that from everybody uses it. So when a rank is lost on the way, the others are at most
one meeting apart, and whoever is behind holds what the others have used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple

import torch
import torch.distributed as dist

from mycel.comm.background import InBackground
from mycel.comm.pending import Pending
from mycel.data_parallel.local.parts import Meeting, Said

__all__ = ["Meetings"]


class Meetings:
    """Of the parts of one model.

    Args:
        group: the ranks that meet.
        in_background: they go on while others are trained for.
        tells: ranks tell each other with every meeting what ``Said`` has.

    Attributes:
        open: begun and not used yet, in order.
        begun: how many so far.
        committed: the number of the last one that every rank is known to have, and
        said: what was said with it.
        skip_until: meetings up to this number do not take place: they were under way when a rank was lost.
    """

    def __init__(self, group: dist.ProcessGroup, *, in_background: bool, tells: bool) -> None:
        self.group = group
        self.tells = tells
        self.open: list[Meeting] = []
        self.begun = self.committed = self.skip_until = 0
        self.said = Said()
        self._thread = InBackground() if in_background else None

    def begin(self, meeting: Meeting, own: Said) -> Meeting | None:
        """Have what was measured travel; ``None`` for a meeting that does not take place.

        The last meeting of the part has been used: what it is owed is part of this one.
        """
        self.begun += 1
        if self.begun <= self.skip_until:
            return None
        meeting.number, part = self.begun, meeting.part
        index, group = part.meetings, self.group
        part.meetings += 1
        said: list[Said] = []

        def job() -> None:
            part.carrier.carry(meeting.changes, meeting.means, group, index)
            meeting.is_held = True
            said.append(self._tell(own, meeting) if self.tells else Said())

        self.open.append(meeting)
        if self._thread is not None:
            carried = self._thread.start(job, meeting.changes.bundles[0])
            meeting.pending = Pending(lambda: (carried.wait(), said[0])[1])
        else:
            meeting.pending = Pending(_once(job, said))
        return meeting

    def drain(self) -> None:
        """Wait until nothing travels any more, whatever becomes of it."""
        for meeting in self.open:
            try:
                meeting.pending.wait()
            except RuntimeError:  # raised again where the meeting is to be used
                continue

    def drop(self, meeting: Meeting) -> None:
        """It has failed: what the part is owed stays owed, and its change is part of the next one."""
        self.open.remove(meeting)
        meeting.part.carrier.settle(keep=False)
        meeting.part.trained = -1

    def _tell(self, own: Said, meeting: Meeting) -> Said:
        device = meeting.changes.bundles[0].flat.device
        largest = torch.tensor(astuple(own), dtype=torch.int64, device=device)
        if self.group.size() > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        trains, changed, last, wanted = largest.tolist()
        self.said = Said(trains=trains, changed=changed, last=last, wanted=wanted)
        self.committed = meeting.number
        return self.said


def _once(job: Callable[[], None], said: list[Said]) -> Callable[[], Said]:
    """Does the job when it is waited for, and fails as it did when it is waited for again."""
    failed: list[BaseException] = []

    def finish() -> Said:
        if failed:
            raise failed[0]
        try:
            job()
        except BaseException as error:
            failed.append(error)
            raise
        return said[0]

    return finish
