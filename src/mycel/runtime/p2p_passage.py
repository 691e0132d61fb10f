"""Passing on the messages of others: two connections, and bytes from each to the other.

Who opens a passage says in its greeting whose messages they are and which ranks are still to come; each of them calls
the next one. No rank looks at the bytes: they are the frames of the two at the ends, who also see to it that few are
on their way and that nothing is lost when a passage ends. So a rank may stop passing on whenever it likes.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from mycel.errors import CommunicationError
from mycel.runtime import p2p_carry as c

__all__ = ["Passage", "Passages"]

_log = logging.getLogger(__name__)

_FORMAT = struct.Struct("<IHHII")
_MOST_STOPS = 2
#: Passages through a rank at once, at most.
_MOST_PASSAGES = 64
#: Bytes that a rank holds of a passage, each way: pieces there, and what is answered back.
_HELD_BYTES, _HELD_BACK_BYTES = 1 << 18, 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """What a rank that calls says about the messages that are to be passed on.

    Attributes:
        origin: the rank that sends them.
        number: tells several passages to one rank apart.
        stops: ranks after the one that is called, the destination last; none: it is the destination.
    """

    origin: int
    number: int
    stops: tuple[int, ...]

    def pack(self) -> int:
        """The number of a connection, in sixteen bytes."""
        stops = (*self.stops, 0, 0)[:_MOST_STOPS]
        return int.from_bytes(_FORMAT.pack(self.origin, self.number, len(self.stops), *stops), "little")

    @classmethod
    def unpack(cls, packed: int, size: int) -> Passage:
        """Read it, in a group of ``size`` ranks.

        Raises:
            CommunicationError: they make no sense.

        Examples:
            >>> Passage.unpack(Passage(origin=0, number=1, stops=(5, 1)).pack(), size=8).stops
            (5, 1)
        """
        origin, number, count, *stops = _FORMAT.unpack(packed.to_bytes(16, "little"))
        if count > _MOST_STOPS or max(origin, *stops) >= size:
            raise CommunicationError("a passage leads to ranks that there are not (corrupted stream?)")
        return cls(origin=origin, number=number, stops=tuple(stops[:count]))


class _Held:
    """Two sockets, and what is on its way between them."""

    def __init__(self, ahead: tuple[socket.socket, socket.socket]) -> None:
        self.sockets = ahead
        self._buffers = [array("b", bytes(length)) for length in (_HELD_BYTES, _HELD_BACK_BYTES)]
        first, second = (sock.fileno() for sock in ahead)
        ends = ((first, second), (second, first))
        rows = [
            (*descriptors, buffer.buffer_info()[0], len(buffer), 0, 0)
            for descriptors, buffer in zip(ends, self._buffers, strict=True)
        ]
        self.rows = [value for row in rows for value in row]

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()


class Passages:
    """All passages through a rank, and the thread that carries their bytes, which begins with the first."""

    def __init__(self) -> None:
        self._changed = threading.Lock()
        self._held: list[_Held] = []
        self._new: list[_Held] = []
        self._num_open = 0
        self._call = -1
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def open(self, caller: socket.socket, dial: Callable[[], socket.socket]) -> None:
        """Begin to pass on, as soon as the next rank has been reached; waits for nothing.

        Args:
            caller: connection to the rank before; belongs to the passage from now on.
            dial: gives one to the next rank; may wait, and raise ``CommunicationError``.
        """
        with self._changed:
            refused = self._is_closed or self._num_open >= _MOST_PASSAGES
            if not refused:
                self._num_open += 1
        if refused:
            caller.close()
            return
        threading.Thread(target=self._reach, args=(caller, dial), name="mycel-passage", daemon=True).start()

    def _reach(self, caller: socket.socket, dial: Callable[[], socket.socket]) -> None:
        try:
            held = _Held((caller, dial()))
        except CommunicationError as error:  # who wants it goes on without
            _log.debug("messages of others are not passed on: %s", error)
            caller.close()
            with self._changed:
                self._num_open -= 1
            return
        c.load()
        with self._changed:
            if self._is_closed:
                held.close()
                return
            self._new.append(held)
            if self._thread is None:
                self._call = os.eventfd(0, os.EFD_CLOEXEC)
                self._thread = threading.Thread(target=self._carry, name="mycel-passages", daemon=True)
                self._thread.start()
            os.eventfd_write(self._call, 1)

    def _carry(self) -> None:
        """Body of the thread: compiled code, but where a passage begins or ends."""
        held = self._held
        ways, polls = array("q"), array("q", bytes(8))
        while True:
            ended = c.carry(ways.buffer_info()[0], 2 * len(held), polls.buffer_info()[0], self._call)
            rows = [ways[i : i + 2 * c.WAY_FIELDS] for i in range(0, len(ways), 2 * c.WAY_FIELDS)]
            if ended >= 0:
                held.pop(ended // 2).close()
                rows.pop(ended // 2)
            with self._changed:
                self._num_open -= ended >= 0
                new, self._new = self._new, []
                if self._is_closed:
                    break
            held += new
            rows += [array("q", each.rows) for each in new]
            ways = array("q", [value for row in rows for value in row])
            polls = array("q", bytes(8 * (4 * len(held) + 1)))
        for each in (*held, *new):
            each.close()
        os.close(self._call)

    def close(self) -> None:
        """Stop passing on. Idempotent; waits for nothing."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            if self._thread is not None:
                os.eventfd_write(self._call, 1)

    def join(self, limit_s: float) -> None:
        """After ``close``: wait until the sockets are closed."""
        if self._thread is not None:
            self._thread.join(limit_s)

    def after_fork_in_child(self) -> None:
        """Close the copies of the sockets; nothing is passed on here."""
        self._changed = threading.Lock()
        self._is_closed = True
        for each in (*self._held, *self._new):
            each.close()
        if self._call >= 0:
            os.close(self._call)
