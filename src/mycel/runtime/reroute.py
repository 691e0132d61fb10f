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
from dataclasses import replace

import numpy as np

from mycel.errors import MycelError
from mycel.runtime.calls import Call, Ticket
from mycel.runtime.evidence import Hop
from mycel.runtime.faults import LinksFailed
from mycel.runtime.headers import COMMIT
from mycel.runtime.reduce_kernels import DType
from mycel.topology.model import Topology

__all__ = ["Rerouter", "keep_input", "without_links"]

_log = logging.getLogger(__name__)


def without_links(topology: Topology, links: frozenset[Hop]) -> Topology:
    """The fabric without these links, and without those of the other direction: TCP needs both.

    Raises:
        TopologyError: the ranks that are left cannot all reach each other.
    """
    gone = links | {(dst, src) for src, dst in links}
    return replace(topology, links=tuple(link for link in topology.links if (link.src, link.dst) not in gone))


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
    """

    def __init__(
        self,
        rank: int,
        run_once: Callable[[Call, Ticket, int, bool], None],
        go_on: Callable[[LinksFailed], None],
    ) -> None:
        self._rank = rank
        self._run_once, self._go_on = run_once, go_on
        self._calls: queue.SimpleQueue[tuple[Call, Ticket, int] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_open = 0
        self._thread: threading.Thread | None = None
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

    def submit(self, call: Call, ticket: Ticket, sequence: int) -> None:
        """Have a call run after those before it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="mycel-reroute", daemon=True)
            self._thread.start()
        with self._lock:
            self._num_open += 1
        self._calls.put((call, ticket, sequence))

    @property
    def is_idle(self) -> bool:
        """Whether no call is under way; one that is looks after the control connections."""
        return self._num_open == 0

    def when_done(self, ticket: Ticket, callback: Callable[[Ticket], None]) -> bool:
        """Have ``callback`` called when the call is over; ``False`` where it is."""
        with self._lock:
            if not ticket.finished.is_set():
                ticket.callbacks.append(callback)
                return True
        return False

    def close(self) -> None:
        """End the thread, once the calls before are over."""
        self._calls.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            call, ticket, sequence = item
            try:
                self._run(call, ticket, sequence)
            except MycelError as error:
                ticket.error = error
            except Exception as error:  # whoever waits must hear of it
                _log.exception("%s failed", ticket.what)
                ticket.error = error
            with self._lock:
                self._num_open -= 1
                ticket.finished.set()
            for callback in ticket.callbacks:
                try:
                    callback(ticket)
                except Exception:
                    _log.exception("a callback after %s failed", ticket.what)

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
