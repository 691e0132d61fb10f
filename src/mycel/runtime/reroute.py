"""Going on without links that have failed: every collective can be run again on the fabric that is left.

Three things make that right. A collective whose input is overwritten gets a copy of it first, and begins again from
the copy. No rank returns from a collective before all have come through: a round of one number follows (the
*commit*), so that whoever has to begin again finds everybody else's input as it was. And the ranks go on from the
first collective that not all have come through, which they know from what each has said (``faults``).

The price is the copy and the round, at every call; calls run on a thread of Python's.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
from collections.abc import Callable

import numpy as np

from mycel.errors import CommunicationError, MycelError
from mycel.runtime.calls import Call, Ticket
from mycel.runtime.ending import at_work
from mycel.runtime.faults import LinksFailed
from mycel.runtime.headers import COMMIT
from mycel.runtime.reduce_kernels import DType

__all__ = ["Rerouter", "keep_input"]

_log = logging.getLogger(__name__)


def keep_input(call: Call, rank: int) -> Callable[[], None]:
    """Copy what the call may overwrite of this rank's input; a function that puts it back."""
    address, num_bytes = call.output_address, call.num_elements * call.item_bytes
    if call.name == "reduce_scatter" and call.input_address <= address < call.input_address + num_bytes:
        address = call.input_address
    elif call.name not in ("all_reduce", "reduce") and (call.name != "broadcast" or call.root != rank):
        return lambda: None
    kept = np.empty(num_bytes, dtype=np.uint8)
    ctypes.memmove(kept.ctypes.data, address, num_bytes)

    def put_back() -> None:
        ctypes.memmove(address, kept.ctypes.data, num_bytes)

    return put_back


class Rerouter:
    """Runs a communicator's calls in their order, each as often as it takes; one a communicator.

    Args:
        rank: in the group.
        run_once: runs a call under a sequence number, as the commit of the one before or not; raises
            ``LinksFailed``, or what went wrong.
        go_on: replaces the schedules and channels by those of the fabric that is left.
        take: called when a ticket is over, to have it finished.
        internal: makes the group's failure of an error that nobody has thought of.

    Attributes:
        number: of the last call that was begun.
    """

    def __init__(
        self,
        rank: int,
        run_once: Callable[[Call, Ticket, int, bool], None],
        go_on: Callable[[LinksFailed], None],
        take: Callable[[], None],
        internal: Callable[[BaseException, str], CommunicationError],
    ) -> None:
        self._rank = rank
        self._run_once, self._go_on, self._take, self._internal = run_once, go_on, take, internal
        self.number = 0
        self._calls: queue.SimpleQueue[tuple[Call, Ticket] | None] = queue.SimpleQueue()
        token = np.zeros(1, dtype=np.int32)
        self._commit = Call(
            name="all_reduce",
            title=COMMIT,
            num_elements=1,
            item_bytes=4,
            output_address=token.ctypes.data,
            dtype=DType.INT32,
            keep=(token,),
        )
        self._thread = threading.Thread(target=self._work, name="mycel-reroute", daemon=True)
        self._thread.start()

    def submit(self, call: Call, ticket: Ticket) -> None:
        """Have a call run after those before it; it gets its number when it is begun."""
        self._calls.put((call, ticket))

    def close(self) -> None:
        """End the thread, once the calls before are over."""
        self._calls.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            with at_work:
                self._finish(*item)
                del item

    def _finish(self, call: Call, ticket: Ticket) -> None:
        self.number += 1
        ticket.attempt.what = f"{ticket.what} #{self.number}"
        try:
            self._run(call, ticket, self.number)
        except MycelError as error:
            ticket.error = error
        except BaseException as error:  # whoever waits must hear of it
            ticket.error = self._internal(error, ticket.what)
        ticket.is_through = True
        try:
            self._take()
        except Exception:
            _log.exception("%s could not be finished; whoever waits tries again", ticket.what)

    def _run(self, call: Call, ticket: Ticket, sequence: int) -> None:
        if call.num_elements == 0:
            return
        put_back = keep_input(call, self._rank)
        while True:
            try:
                self._run_once(call, ticket, sequence, False)
                self._run_once(self._commit, ticket, sequence, True)
            except LinksFailed as failed:
                self._go_on(failed)
                if failed.resume > sequence:
                    return
                put_back()
            else:
                return
