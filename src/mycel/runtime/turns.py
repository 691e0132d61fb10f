"""Whose turn it is: the calls of a group in their order, from any thread, and from signal handlers.

A blocking call runs in the caller's thread, if nothing is under way; others go through the queue. A signal handler
runs in the main thread, between two steps of Python, and so in the middle of a call. With torch's own backends it
runs when the call is over, for they do not come back to Python before. Here the same comes about in another way: what
has been begun is written down as a *turn*, and a handler that calls a collective first brings the turn to its end
that it interrupts, as far as that may have come. The interrupted steps then find everything done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from mycel.errors import CommunicationError
from mycel.runtime import engine as e
from mycel.runtime import job_fields as j
from mycel.runtime.calls import Call, Latch, Ticket
from mycel.runtime.ending import at_work
from mycel.runtime.job_queue import JobQueue
from mycel.runtime.prepared import Ints
from mycel.runtime.shortcut import Shortcut

__all__ = ["Errand", "Result", "Turns"]

Settle = Callable[[], None]
Result = TypeVar("Result")

#: Errors in a row that are not the run's own, beyond which it is given up: a signal handler does not raise for ever.
_MOST_SURPRISES = 3
_LOOK_S = 0.1


@dataclass(slots=True, eq=False)
class _Turn:
    """A call that has been made.

    Attributes:
        call, timeout_s, settle: as they were given.
        is_blocking: it runs to its end in the caller's thread.
        ticket: once it is prepared.
    """

    call: Call
    timeout_s: float | None
    settle: Settle | None
    is_blocking: bool
    ticket: Ticket | None = None


class Turns:
    """Runs the calls of one group.

    Args:
        queue: of the group.
        prepare: makes a ticket of a call; nothing is begun.
        judge: as ``JobQueue`` takes it.
        count: told of every call that has its number.
        abort: fails the group, for a reason.
        internal: as ``JobQueue`` takes it.
    """

    def __init__(
        self,
        queue: JobQueue,
        *,
        prepare: Callable[[Call, float | None, Settle | None], Ticket],
        judge: Callable[[int, Ticket], None],
        count: Callable[[Ticket], None],
        abort: Callable[[str], None],
        internal: Callable[[BaseException, str], CommunicationError],
    ) -> None:
        self._queue = queue
        self._prepare, self._judge, self._count = prepare, judge, count
        self._abort, self._internal = abort, internal
        #: Held by the thread whose turn it is.
        self.order = threading.RLock()
        self._turn: _Turn | Shortcut | None = None

    def run(self, call: Call, timeout_s: float | None, settle: Settle | None) -> Ticket:
        """Run a call to its end, or queue it behind others; what went wrong is raised, or the ticket's error."""
        with self.order:
            if self._turn is not None:
                self.finish_interrupted()
            if self._queue.tickets:
                self._queue.take()
            return self._take(_Turn(call, timeout_s, settle, not self._queue.tickets))

    def run_again(
        self,
        shortcut: Shortcut,
        place: Callable[[Shortcut], tuple[Ints, int]],
        addresses: tuple[int, int],
        keep: tuple[object, ...],
    ) -> int:
        """Run a call to its end that was run before, with other arrays.

        Args:
            shortcut: the call.
            place: gives fields for its job, and their address; called only if it is run.
            addresses: of INPUT and OUTPUT.
            keep: objects that own them.

        Returns:
            Its sequence number; -1: it has one and is counted; 0: it was not begun, for others are under way.
        """
        with self.order:
            if self._turn is not None or self._queue.tickets:
                return 0
            try:
                fields, address = place(shortcut)  # a signal handler that comes here may run the same
                self._turn = shortcut
                shortcut.begin(fields, address, keep)
                number: int = e.again(shortcut.pattern, address, *addresses)
                if number <= 0:
                    self._take(shortcut)  # it takes its time, or something is the matter
                shortcut.end()
                return max(number, -1)
            except BaseException as error:  # of a signal handler, or the call's
                if self._turn is shortcut and shortcut.is_under_way:
                    if isinstance(error, KeyboardInterrupt):  # as in ``_drive``
                        self._abort(f"interrupted in {shortcut.ticket.what}")
                    else:
                        self._take(shortcut)
                raise
            finally:
                self._turn = None

    def start(self, call: Call, timeout_s: float | None, settle: Settle | None) -> Ticket:
        """Queue a call; it proceeds by itself."""
        while True:
            with self.order:
                self.finish_interrupted()
                if not self._queue.is_full:
                    return self._take(_Turn(call, timeout_s, settle, False))
                oldest = self._queue.oldest
            if oldest is not None:
                self._queue.wait(oldest, oldest.timeout_s)

    def together(self, work: Callable[[], Result]) -> Result:
        """Make several calls with nobody else's in between, those of signal handlers included.

        Handlers run in the main thread, so another one makes the calls there. A handler that does so itself, in the
        middle of a call, makes them where it is: its thread has the turn already.

        Args:
            work: makes the calls.
        """
        owned: Any = self.order
        if threading.current_thread() is not threading.main_thread() or owned._is_owned():
            with self.order:
                return work()
        results: list[Result] = []

        def in_turn() -> None:
            with self.order:
                results.append(work())

        try:
            Errand(in_turn).wait()
        except KeyboardInterrupt:
            self._abort("interrupted in the middle of a call")
            raise
        return results[0]

    def finish_interrupted(self) -> None:
        """In a signal handler: bring the turn to its end that it interrupts. The caller holds ``order``."""
        turn = self._turn
        if turn is not None and (not isinstance(turn, Shortcut) or turn.is_under_way):
            self._take(turn)

    def _take(self, turn: _Turn | Shortcut) -> Ticket:
        # A shortcut that a handler has interrupted before it was begun comes after what the handler calls.
        later = self._turn if isinstance(self._turn, Shortcut) and self._turn is not turn else None
        self._turn = turn
        try:
            made = turn.ticket or self._prepare(turn.call, turn.timeout_s, turn.settle)
            ticket = turn.ticket = turn.ticket or made  # a signal handler may have come before
            if turn.is_blocking or (ticket.job is not None and not self._queue.start()):
                self._drive(ticket)
            elif ticket.job is not None:
                self._queue.submit(ticket)
                self._count(ticket)
            else:
                self._queue.hold(ticket)
            return ticket
        finally:
            self._turn = later

    def _drive(self, ticket: Ticket) -> None:
        """Run a ticket to its end in this thread, and raise what went wrong.

        What a signal handler raises meanwhile is raised when that is done, but for KeyboardInterrupt.
        """
        held: BaseException | None = None
        surprises, job = 0, ticket.job
        while job is not None and ticket.error is None:
            status = j.INTERRUPTED
            try:
                status = e.execute(job.address)
                if status == j.DONE:  # at once, where a signal handler has run it
                    break
                if status != j.INTERRUPTED:
                    self._judge(status, ticket)
            except KeyboardInterrupt:  # half a collective is on the wires, and the others wait
                self._abort(f"interrupted in {ticket.what}")
                raise
            except BaseException as error:
                if error is ticket.error:
                    break
                held = held or error
                surprises += status != j.INTERRUPTED
                if surprises > _MOST_SURPRISES:
                    ticket.error = self._internal(error, ticket.what)
        ticket.finish()
        if ticket.error is not None:
            raise ticket.error
        self._count(ticket)
        if held is not None:
            raise held

    def give_up(self) -> None:
        """In a forked child: the thread whose turn it was may not be here."""
        self.order = threading.RLock()
        self._turn = None


class Errand:
    """Something done in a thread of its own while the main thread waits: signal handlers do not get in between.

    Args:
        work: what to do.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._done = Latch()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="mycel-errand", daemon=True).start()

    def _run(self) -> None:
        with at_work:
            try:
                self._work()
            except BaseException as error:
                self._error = error
            finally:
                self._done.open()

    def wait(self) -> None:
        """Wait until it is done, and raise what it raised; then what signal handlers have, but KeyboardInterrupt."""
        held: BaseException | None = None
        while not self._done.is_open:
            try:
                self._done.wait(_LOOK_S)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                held = held or error
        if self._error is not None:
            raise self._error
        if held is not None:
            raise held
