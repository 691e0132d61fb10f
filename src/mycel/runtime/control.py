"""Control connections: one between every two ranks of a group, over which nothing goes while all is well.

What ranks say there stands in ``messages``. It goes over the links, not the store: the store dies with rank 0. While
nothing is said the kernels at both ends ask each other every few seconds whether they are there (keepalive), so that
``silence_s`` tells how long ago the machine at the other end was last heard, whatever its programs do.

The engine watches them during a call, and a thread of the process's between calls (``watch``): both may read, one at
a time. So that none misses what the other has read, an ``alert`` makes one more descriptor readable. Whoever sleeps
hands two descriptors to the kernel, however many ranks there are: that one, and an ``epoll`` of all connections.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mycel.records import MalformedRecord, RecordSocket
from mycel.runtime.forks import let_go_in_children
from mycel.runtime.messages import LONGEST, Bye, Message, Whereabouts, read_message, record_of
from mycel.runtime.transport.tcp_info import silence_s

__all__ = ["NO_WAY", "Control", "Event"]

_log = logging.getLogger(__name__)

#: What a connection that is given up by the kernel fails with where the way is broken, not the peer.
NO_WAY = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
#: The kernels ask after so many seconds without a word, and so often until there is an answer.
_IDLE_S, _INTERVAL_S = 1, 1
#: Milliseconds after which a kernel gives a silent connection up: a day. What silence means is decided elsewhere, and
#: a connection that is there yet when a cable is plugged in again need not be made anew.
_GIVE_UP_MS = 24 * 60 * 60 * 1000
#: For a goodbye to be taken.
_PARTING_S = 0.5
#: Reads of one connection before the others have their turn.
_BURST = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something a peer said, or that its connection ended.

    Attributes:
        peer: who.
        message: what it said; ``None``: its connection ended.
    """

    peer: int
    message: Message | None


class Control:
    """The control connections of one rank. Threads may share it.

    Args:
        sockets: non-blocking, by peer.
        rank: in the group, for logs.
        size: of the group.
        num_vertices: of its fabric.
    """

    def __init__(
        self, sockets: dict[int, socket.socket], *, rank: int = 0, size: int = 1, num_vertices: int = 0
    ) -> None:
        self._rank, self._size, self._num_vertices = rank, size, num_vertices
        self._lines = {peer: RecordSocket(sock, longest=LONGEST) for peer, sock in sockets.items()}
        self._peer_of = {sock.fileno(): peer for peer, sock in sockets.items()}
        self._lock = threading.RLock()
        self._alert = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        for sock in sockets.values():
            self._epoll.register(sock, select.EPOLLIN)
            _keep_alive(sock)
        #: Descriptors for the engine to watch, -1 once this is closed; shared memory, changed in place.
        self.descriptors: npt.NDArray[np.int64] = np.array([self._epoll.fileno(), self._alert], dtype=np.int64)
        #: Ranks that said goodbye before their connection ended.
        self.left: set[int] = set()
        #: Ranks whose connection ended, or whose process.
        self.gone: set[int] = set()
        #: Those of them whose process ended without a goodbye, whoever else holds its connections.
        self.ended: set[int] = set()
        #: Ranks to which the way was broken for so long that the kernel gave up, and those that broke the rules.
        self.cut: set[int] = set()
        #: Where survivors of a failure can be found; see ``mycel.runtime.elastic.control_handles``.
        self.handles: dict[int, str] = {}
        self._warned: set[int] = set()
        #: Peers that have not taken everything yet.
        self._waiting: set[int] = set()
        let_go_in_children(self)

    # -- speaking -----------------------------------------------------------------------------------------

    def tell(self, peers: Iterable[int], message: Message) -> None:
        """Send a message to the peers that are still connected; never waits."""
        record = record_of(message)
        with self._lock:
            for peer in peers:
                if (line := self._lines.get(peer)) is not None:
                    with contextlib.suppress(OSError):  # it is gone; reading from it will say so
                        line.post(record)
                    if line.is_waiting:
                        self._waiting.add(peer)

    def tell_all(self, message: Message) -> None:
        """Send a message to every rank that is still connected."""
        self.tell(tuple(self._lines), message)

    def flush(self) -> bool:
        """Send on what peers did not take at once; whether all has gone."""
        if not self._waiting:
            return True
        with self._lock:
            for peer in tuple(self._waiting):
                try:
                    is_through = self._lines[peer].flush()
                except OSError:  # it is gone; reading from it will say so
                    is_through = True
                if is_through:
                    self._waiting.discard(peer)
            return not self._waiting

    # -- listening ----------------------------------------------------------------------------------------

    def alert(self) -> None:
        """Have whoever waits for these descriptors look up."""
        with self._lock:
            if self._alert >= 0:
                os.eventfd_write(self._alert, 1)

    def calm(self) -> None:
        """End the alert."""
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._alert >= 0:
                os.eventfd_read(self._alert)

    def wait(self, patience_s: float) -> None:
        """Wait until a peer has said something or there is an alert, at most ``patience_s``."""
        poller = select.poll()
        for descriptor in self.descriptors.tolist():
            if descriptor >= 0:
                poller.register(descriptor, select.POLLIN)
        poller.poll(max(0.0, patience_s) * 1000)

    def take(self) -> list[Event]:
        """What peers have said since; waits for nothing."""
        with self._lock:
            if self._epoll.closed:
                return []
            ready = self._epoll.poll(0, max(1, len(self._lines)))
            return [event for descriptor, _ in ready for event in self._read(self._peer_of[descriptor])]

    def _read(self, peer: int) -> list[Event]:
        line, ended = self._lines[peer], ""
        events: list[Event] = []
        for _ in range(_BURST):
            try:
                line.read()
            except (BlockingIOError, InterruptedError):
                break
            except EOFError:
                ended = "gone"
            except OSError as error:
                ended = "cut" if error.errno in NO_WAY else "gone"
            try:
                events += self._records(peer, line)
            except EOFError as error:
                self._warn(peer, f"{error}: the connection is closed")
                ended = "cut"
            if ended:
                (self.cut if ended == "cut" else self.gone).add(peer)
                self._drop(peer)
                events.append(Event(peer=peer, message=None))
                break
        return events

    def _records(self, peer: int, line: RecordSocket) -> list[Event]:
        events: list[Event] = []
        while True:
            try:
                record = line.take()
                if record is None:
                    return events
                message = read_message(record, self._size, self._num_vertices)
            except (MalformedRecord, ValueError) as error:
                self._warn(peer, f"a record is not understood: {error}; it is ignored, as further ones are")
                continue
            if isinstance(message, Whereabouts):
                self.handles[peer] = message.handle
                continue
            if isinstance(message, Bye):
                self.left.add(peer)
            events.append(Event(peer=peer, message=message))

    def _warn(self, peer: int, what: str) -> None:
        if peer not in self._warned:
            self._warned.add(peer)
            _log.warning("rank %d: on the control connection of rank %d, %s", self._rank, peer, what)

    def watched(self) -> list[tuple[int, int]]:
        """Descriptors to wait for, and for what: words that come, and room for words that have not gone yet."""
        with self._lock:
            if self._epoll.closed:
                return []
            waiting = [self._lines[peer].sock.fileno() for peer in self._waiting]
            return [(self._epoll.fileno(), select.POLLIN), *((descriptor, select.POLLOUT) for descriptor in waiting)]

    # -- noticing -----------------------------------------------------------------------------------------

    @property
    def dead(self) -> set[int]:
        """Ranks that have gone without a goodbye: nobody will hear of them again."""
        return self.gone - self.left

    def silence_s(self, peer: int) -> float | None:
        """Seconds since the kernel at the other end was last heard; ``None`` where there is no TCP connection."""
        with self._lock:
            line = self._lines.get(peer)
            return None if line is None else silence_s(line.sock)

    def note_ended(self, peer: int) -> None:
        """Take down that a peer's process has ended; call it after what it has said was taken."""
        with self._lock:
            if peer not in self.left:
                self.ended.add(peer)
                self.gone.add(peer)
                self.alert()

    def _drop(self, peer: int) -> None:
        sock = self._lines.pop(peer).sock
        self._waiting.discard(peer)
        self._epoll.unregister(sock)  # to close it would not do where a child holds it, too
        del self._peer_of[sock.fileno()]
        sock.close()

    # -- the end ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Say goodbye and close."""
        self.tell_all(Bye())
        until = time.monotonic() + _PARTING_S
        while not self.flush() and time.monotonic() < until:
            time.sleep(0.01)
        self.take()  # a connection that is closed with something unread in it is reset, and loses what is on its way
        with self._lock:
            for peer in list(self._lines):
                self._drop(peer)
            self._end()

    def after_fork_in_child(self) -> None:
        """Close the child's copies, so that others notice when this process ends."""
        self._lock = threading.RLock()
        for line in self._lines.values():
            line.sock.close()
        self._lines.clear()
        self._waiting.clear()
        self._end()

    def _end(self) -> None:
        self.descriptors[:] = -1
        self._epoll.close()
        if self._alert >= 0:
            os.close(self._alert)
            self._alert = -1


def _keep_alive(sock: socket.socket) -> None:
    """Have the kernels at both ends ask each other whether they are there."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GIVE_UP_MS)
