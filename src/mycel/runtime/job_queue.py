"""The queue of a group: a thread runs its jobs one after the other, in compiled code, and all who wait are told.

Tickets that are over are taken off in their order, *settled* (results are put to where the caller wants them), and
only then called finished: a collective that is finished, and every one before it, has its results in the caller's
tensors. Whoever comes first takes them off, a thread that waits or a thread of the queue's own, so a work that the
caller has dropped is settled all the same.

Signal handlers run in Python, between two steps of the main thread, and may call collectives of the same group. So
what is done here in several steps may be begun again by the same thread in between, and comes out right: tickets are
put at the end before they are submitted, submitting twice is submitting once (``job_ring.submit``), and settling
twice copies the same.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from mycel.errors import CommunicationError, MycelError
from mycel.runtime import job_fields as j
from mycel.runtime import job_ring
from mycel.runtime.calls import Latch, Ticket
from mycel.runtime.ending import at_work
from mycel.runtime.timeouts import LONGEST_S

__all__ = ["JobQueue"]

_log = logging.getLogger(__name__)

#: Who waits looks up so often: in a signal handler, the thread that would tell it may be the one that it interrupted.
_LOOK_S = 0.1


class JobQueue:
    """Tickets under way, oldest first, and the two threads that serve them, which begin with the first job.

    Args:
        judge: decides about a run that has stopped before its end: returns for it to go on, or raises.
        internal: makes the group's failure of an error that nobody has thought of.
    """

    def __init__(
        self,
        judge: Callable[[int, Ticket], None],
        internal: Callable[[BaseException, str], CommunicationError],
    ) -> None:
        self._judge, self._internal = judge, internal
        self._ring = np.zeros(job_ring.RING_SLOTS + job_ring.RING_CAPACITY, dtype=np.int64)
        self._address: int = self._ring.ctypes.data
        #: Where the last sequence number stands; jobs take the next one.
        self.numbers_address = self._address + job_ring.RING_NUMBERS * 8
        #: Oldest first.
        self.tickets: deque[Ticket] = deque()
        self._taking = threading.RLock()
        self._claims = [True]
        self._threads: tuple[threading.Thread, ...] = ()
        self._wake_fd = self._done_fd = -1
        self._is_closing = False

    @property
    def number(self) -> int:
        """The last sequence number that was given."""
        return int(self._ring[job_ring.RING_NUMBERS])

    @property
    def oldest(self) -> Ticket | None:
        """The ticket that is next to be finished."""
        with contextlib.suppress(IndexError):
            return self.tickets[0]
        return None

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another ticket."""
        return len(self.tickets) >= job_ring.RING_CAPACITY - 1

    # -- in -----------------------------------------------------------------------------------------------

    def start(self) -> bool:
        """Start the threads if there are none; ``False`` in a signal handler that interrupts just that."""
        if not self._threads:
            try:
                self._claims.pop()
            except IndexError:
                return False
            self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
            self._done_fd = os.eventfd(0, os.EFD_CLOEXEC)
            threads = tuple(
                threading.Thread(target=target, name=f"mycel-{name}", daemon=True)
                for target, name in ((self._serve, "serve"), (self._complete, "complete"))
            )
            for thread in threads:
                thread.start()
            self._threads = threads
        return True

    def submit(self, ticket: Ticket) -> None:
        """Have a job run after those before it; the caller has seen to it that there is room, and threads.

        Args:
            ticket: with a job. One that is here already is left as it is.
        """
        self.submit_last()
        if ticket.job is not None and ticket.job.fields[j.J_POSITION] < 0:
            ticket.latch = ticket.latch or Latch()
            self.tickets.append(ticket)  # from here on it comes before what a signal handler calls
        self.submit_last()

    def submit_last(self) -> None:
        """Hand the last ticket's job to the engine's thread, unless it has it."""
        if self.tickets and (job := self.tickets[-1].job) is not None and job.fields[j.J_POSITION] < 0:
            job_ring.submit(self._address, job.address)
            os.eventfd_write(self._wake_fd, 1)

    def hold(self, ticket: Ticket) -> None:
        """Keep a ticket in the order; it is run elsewhere, or there is nothing to run. As ``submit``, once."""
        if not ticket.is_finished and ticket not in self.tickets:
            ticket.latch = ticket.latch or Latch()
            self.tickets.append(ticket)
        self.take()

    # -- out ----------------------------------------------------------------------------------------------

    def take(self) -> None:
        """Take off the tickets that are over, in their order; settle each, and tell who waits."""
        if not self.tickets:
            return
        with self._taking:
            while (ticket := self.oldest) is not None and ticket.is_over:
                ticket.finish()
                with contextlib.suppress(ValueError):  # a signal handler has
                    self.tickets.remove(ticket)

    def wait(self, ticket: Ticket, timeout_s: float | None = None) -> bool:
        """Wait until a ticket is finished; ``False``: it is not after ``timeout_s``.

        What a signal handler raises meanwhile is raised afterwards, but for KeyboardInterrupt.
        """
        until = time.monotonic() + (LONGEST_S if timeout_s is None else timeout_s)
        held: BaseException | None = None
        while not ticket.is_finished and ticket.latch is not None:
            self.take()
            left = until - time.monotonic()
            try:
                if ticket.latch.wait(min(left, _LOOK_S)) or left <= 0:
                    break
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                held = held or error
        if held is not None:
            raise held
        return ticket.is_finished

    def when_finished(self, ticket: Ticket, callback: Callable[[Ticket], None]) -> None:
        """Call ``callback`` once a ticket is finished, at once where it is. It must return at once."""
        with self._taking:
            if not ticket.is_finished:
                ticket.callbacks += (callback,)
                return
        callback(ticket)

    # -- the threads --------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Body of the engine's thread: compiled code, but for trouble. Whatever happens, nobody waits for ever."""
        while True:
            try:
                status = job_ring.serve(self._address, self._wake_fd, self._done_fd)
                if status == j.DONE:
                    return
                with at_work:
                    self._judge(status, self._running())
            except BaseException as error:
                try:
                    with at_work:
                        self._fail(error)
                except BaseException:  # no memory, say: the engine stops at the same place again, and so do we
                    time.sleep(_LOOK_S)

    def _running(self) -> Ticket:
        """The ticket whose job the engine's thread is at."""
        position = self._ring[job_ring.RING_COMPLETED]
        return next(t for t in tuple(self.tickets) if t.job is not None and t.job.fields[j.J_POSITION] == position)

    def _fail(self, error: BaseException) -> None:
        """Give every job in the ring the error, and take it out."""
        cause = error if isinstance(error, MycelError) else self._internal(error, "the engine's thread")
        submitted = int(self._ring[job_ring.RING_SUBMITTED])
        for ticket in tuple(self.tickets):
            job = ticket.job
            if job is not None and not job.done and 0 <= job.fields[j.J_POSITION] < submitted:
                ticket.error = cause
        self._ring[job_ring.RING_COMPLETED] = submitted
        os.eventfd_write(self._done_fd, 1)

    def _complete(self) -> None:
        """Body of the thread that takes tickets off when nobody else does."""
        while not self._is_closing or self.tickets:
            try:
                os.eventfd_read(self._done_fd)
            except OSError:
                return
            try:
                with at_work:
                    self.take()
            except Exception:
                _log.exception("finished collectives could not be taken off; whoever waits tries again")

    # -- the end ------------------------------------------------------------------------------------------

    def close(self) -> bool:
        """Wait for what is under way, each within its time-out, and end the threads; whether they have ended."""
        for ticket in tuple(self.tickets):
            # Its time counts from when it begins, about when the one before has ended.
            if not self.wait(ticket, ticket.timeout_s + 5.0):
                _log.error("%s has not ended; the group is closed nevertheless", ticket.what)
                break
        self._is_closing = True
        if not self._threads:
            return True
        self._ring[job_ring.RING_STOP] = 1
        os.eventfd_write(self._wake_fd, 1)
        os.eventfd_write(self._done_fd, 1)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(5.0)
        if any(thread.is_alive() and thread is not threading.current_thread() for thread in self._threads):
            return False  # it still looks at the descriptors
        os.close(self._wake_fd)
        os.close(self._done_fd)
        return True

    def give_up(self, error: CommunicationError) -> None:
        """In a forked child, where none of the threads is: give all that is under way an error."""
        self._taking = threading.RLock()
        for ticket in tuple(self.tickets):
            ticket.error = ticket.error or error
            ticket.settle, ticket.callbacks = None, ()
            ticket.finish()
        self.tickets.clear()
        for descriptor in (self._wake_fd, self._done_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self._wake_fd = self._done_fd = -1
        self._threads = ()
