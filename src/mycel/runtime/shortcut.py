"""Calls that were made before: a small blocking collective again, with another array of the same kind.

What a call takes in Python (its choice, program, ticket and job) costs more than a small array needs to get through,
and comes out the same each time. So the job of a call that has gone well is kept as a pattern, and later calls of the
same kind, size and type copy it with their own addresses, number and time, in compiled code.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from mycel.runtime import job_fields as j
from mycel.runtime.calls import Ticket
from mycel.runtime.faults import Attempt
from mycel.runtime.prepared import Ints, Job

__all__ = ["FEW", "Pool", "Shortcut"]

#: Kinds of calls that a group keeps.
FEW = 256


class Pool:
    """Fields of jobs, in turn. Those of the last ``num_jobs`` calls stay as they were: flight records read them.

    Args:
        num_jobs: how many.
    """

    def __init__(self, num_jobs: int) -> None:
        self._fields = np.zeros((num_jobs, j.JOB_FIELDS), dtype=np.int64)
        self._rows = list(self._fields)
        self._address: int = self._fields.ctypes.data
        self._numbers = itertools.count()  # two calls never get one, whatever interrupts the first

    def take(self) -> tuple[Ints, int]:
        """Fields that say of themselves that they are of no job yet, and their address."""
        number = next(self._numbers) % len(self._rows)
        fields = self._rows[number]
        fields[j.J_STATUS] = j.UNUSED
        return fields, self._address + number * j.JOB_FIELDS * 8


class Shortcut:
    """A call that may be made again; the turn of a group while it is (see ``turns``).

    Args:
        ticket: of the call, which has gone well.

    Attributes:
        timeout_s: its time-out.
        pattern: address of the fields that are copied.
        traffic: of its program.
        header: its kind and bytes.
        fields, address: of the job under way.
        keep: what holds the array of the job under way.
    """

    is_blocking = True
    call: Any = None
    settle = None

    def __init__(self, ticket: Ticket) -> None:
        job = ticket.job
        if job is None:
            raise ValueError("a call that moves nothing has no job")
        self.timeout_s = ticket.timeout_s
        self.traffic = job.prepared.traffic
        self._prepared = job.prepared
        self._fields = job.pattern()
        self.pattern: int = self._fields.ctypes.data
        self._what = ticket.attempt.what.rpartition(" #")[0]
        self.header = ticket.attempt.header[1:]
        self.fields, self.address = self._fields, 0
        self.keep: tuple[object, ...] = ()
        self._ticket: Ticket | None = None

    def begin(self, fields: Ints, address: int, keep: tuple[object, ...]) -> None:
        """Take the place of the next call; the engine has not begun it yet.

        Args:
            fields, address: where its job is to stand; see ``Pool``.
            keep: objects that own its array.
        """
        self._ticket = None
        self.fields, self.address, self.keep = fields, address, keep

    def end(self) -> None:
        """Let go of the array; the call is over."""
        self._ticket, self.keep = None, ()

    @property
    def is_under_way(self) -> bool:
        """Whether the engine has begun the call, and is not through."""
        return self.fields[j.J_STATUS] not in (j.UNUSED, j.DONE)

    @property
    def ticket(self) -> Ticket:
        """What takes the call to its end where it does not get there at once."""
        if self._ticket is None:
            number = int(self.fields[j.J_HEADER + 1])
            limit_s = int(self.fields[j.J_LIMIT_NS]) / 1e9
            attempt = Attempt(
                what=f"{self._what} #{number}",
                timeout_s=self.timeout_s,
                deadline=int(self.fields[j.J_STARTED_NS]) / 1e9 + limit_s,
                header=(number, *self.header),
            )
            self._ticket = Ticket(
                job=Job.again(self._prepared, self.fields, self.address, self.keep), attempt=attempt
            )
        return self._ticket

    @ticket.setter
    def ticket(self, ticket: Ticket) -> None:
        self._ticket = ticket
