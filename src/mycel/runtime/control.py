"""Control connections between the ranks of a group, over which nothing goes while all is well.

Each rank has one to every other one, or, in groups of many ranks, to some, its neighbours, which pass on what it says
(``control_graph``, ``relay``). Others than this module need not know: whatever anybody says is an event of its
author's, and a rank is gone where it, or a neighbour of its, has seen it go.

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

from mycel.records import MalformedRecord, RecordSocket, packed
from mycel.runtime.control_graph import control_graph
from mycel.runtime.forks import let_go_in_children
from mycel.runtime.messages import (
    LONGEST,
    MOST_HOPS,
    Bye,
    Calling,
    Gone,
    Here,
    Identity,
    Message,
    Relayed,
    Routed,
    Whereabouts,
    read_message,
    record_of,
)
from mycel.runtime.relay import Relay
from mycel.runtime.transport.rendezvous import Rendezvous
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
    """Something a rank said, or that it is gone.

    Attributes:
        peer: who.
        message: what it said; ``None``: its connection ended, to this rank or to a neighbour of its.
    """

    peer: int
    message: Message | None


class Control:
    """The control connections of one rank. Threads may share it.

    Args:
        sockets: non-blocking, by peer.
        rank: in the group.
        size: of the group.
        num_vertices: of its fabric.
        relay: where ``sockets`` are those of some ranks only; ``None``: of all.
    """

    def __init__(
        self,
        sockets: dict[int, socket.socket],
        *,
        rank: int = 0,
        size: int = 1,
        num_vertices: int = 0,
        relay: Relay | None = None,
    ) -> None:
        self._rank, self._size, self._num_vertices = rank, size, num_vertices
        self._relay = relay
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

    @classmethod
    def open(cls, rendezvous: Rendezvous, timeout_s: float, num_vertices: int) -> Control:
        """Those of a rank that has found the others.

        Args:
            rendezvous: the rank's.
            timeout_s: how long to wait for the others.
            num_vertices: of the group's fabric.

        Raises:
            CommunicationError: a rank does not come, cannot be reached, or has failed.
        """
        rank, size = rendezvous.rank, rendezvous.size
        hosts = [address.host for address in rendezvous.addresses]
        graph = control_graph(hosts) if size > rendezvous.mesh_ranks else None
        sockets = rendezvous.connect_control(timeout_s, graph)
        relay = None if graph is None else Relay(rank, graph, hosts)
        return cls(sockets, rank=rank, size=size, num_vertices=num_vertices, relay=relay)

    @property
    def relays(self) -> bool:
        """Whether words come to all ranks, and events from all, by way of neighbours."""
        return self._relay is not None

    @property
    def neighbours(self) -> tuple[int, ...]:
        """Ranks that this one is connected with."""
        return tuple(self._lines)

    # -- speaking -----------------------------------------------------------------------------------------

    def tell(self, peers: Iterable[int], message: Message) -> None:
        """Send a message to the peers that are still there; never waits.

        Where words are relayed, those that are not for one rank alone go to all.
        """
        with self._lock:
            if self._relay is None:
                self._post(peers, message)
            elif isinstance(message, Calling):
                for peer in peers:
                    said = record_of(message)
                    self._route(Routed(by=self._rank, to=peer, hops=MOST_HOPS, said=said), None)
            else:
                self._publish(message)

    def tell_all(self, message: Message) -> None:
        """Send a message to every rank that is still there."""
        self.tell(tuple(self._lines), message)

    def tell_neighbours(self, message: Message) -> None:
        """Send a message to the ranks that this one is connected with, who keep it to themselves."""
        with self._lock:
            self._post(tuple(self._lines), message)

    def _post(self, peers: Iterable[int], message: Message) -> None:
        data = packed(record_of(message), LONGEST)
        for peer in peers:
            if (line := self._lines.get(peer)) is not None:
                with contextlib.suppress(OSError):  # it is gone; reading from it will say so
                    line.post(data)
                if line.is_waiting:
                    self._waiting.add(peer)

    def _publish(self, message: Message) -> None:
        """Have neighbours take a word of this rank's to everybody."""
        if self._relay is not None:
            number = self._relay.next_number()
            self._post(tuple(self._lines), Relayed(by=self._rank, number=number, said=record_of(message)))

    def _route(self, word: Routed, came_from: int | None) -> None:
        """Send a word for one rank on its way; one that has none is lost, as what is said to those who are gone."""
        hop = None if self._relay is None else self._relay.next_hop(word.to, self._lines, came_from)
        if hop is not None:
            self._post((hop,), word)

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
                self._drop(peer)
                if ended == "cut":
                    self.cut.add(peer)
                else:
                    self._miss(peer, has_ended=False)
                events.append(Event(peer=peer, message=None))
                break
        return events

    def _miss(self, peer: int, *, has_ended: bool) -> None:
        """Take down that this rank has seen another one go, and tell those who cannot see it."""
        if peer not in self.left and not self._knows(peer, has_ended=has_ended):
            self._publish(Gone(rank=peer, has_ended=has_ended))
        self._bury(peer, has_ended=has_ended)

    def _knows(self, peer: int, *, has_ended: bool) -> bool:
        return peer in self.gone and (not has_ended or peer in self.ended)

    def _bury(self, peer: int, *, has_ended: bool) -> None:
        if has_ended and peer not in self.left:
            self.ended.add(peer)
        self.gone.add(peer)

    def _records(self, peer: int, line: RecordSocket) -> list[Event]:
        events: list[Event] = []
        while True:
            try:
                record = line.take()
                if record is None:
                    return events
                found = self._heard(peer, read_message(record, self._size, self._num_vertices))
            except (MalformedRecord, ValueError) as error:
                self._warn(peer, f"a record is not understood: {error}; it is ignored, as further ones are")
                continue
            if found is not None:
                events += self._file(*found)

    def _heard(self, peer: int, message: Message) -> tuple[int, Message] | None:
        """Who says what, where a neighbour says something; ``None``: it is not for this rank, or known.

        Raises:
            ValueError: it is not what a neighbour may say.
        """
        relay, rank = self._relay, self._rank
        if relay is None:
            if isinstance(message, Relayed | Routed | Gone | Here):
                raise ValueError(f"of type {message.TYPE!r}, in a group whose ranks all hear each other")
            return peer, message
        if isinstance(message, Identity):
            return peer, message
        if not isinstance(message, Relayed | Routed):
            raise ValueError(f"of type {message.TYPE!r}, which comes in one of type 'relayed' in this group")
        if isinstance(message, Routed) and message.to != rank:
            if message.hops > 0:
                on = Routed(by=message.by, to=message.to, hops=message.hops - 1, said=message.said)
                self._route(on, peer)
            return None
        said = relay.opened(message, lambda record: read_message(record, self._size, self._num_vertices))
        if said is None:
            return None
        if isinstance(message, Relayed):
            # Each of a rank's neighbours says that it is gone, and one is enough: who knows has told its neighbours.
            if isinstance(said, Gone) and self._knows(said.rank, has_ended=said.has_ended):
                return None
            self._post([near for near in self._lines if near not in (peer, message.by)], message)
        return message.by, said

    def _file(self, peer: int, message: Message) -> list[Event]:
        """Take down what a rank has said, and what others need to hear of it."""
        if isinstance(message, Whereabouts):
            self.handles[peer] = message.handle
            return []
        if isinstance(message, Gone):
            return self._file_gone(message)
        if isinstance(message, Here):
            if peer not in self.ended | self.left:
                self.gone.discard(peer)
            return []
        if isinstance(message, Bye):
            self.left.add(peer)
            if self._relay is not None and peer not in self._lines:
                self.gone.add(peer)
        return [Event(peer=peer, message=message)]

    def _file_gone(self, message: Gone) -> list[Event]:
        """A neighbour of a rank has seen it go. That a process has ended matters to its machine: what it has sent
        to others may be on its way for long."""
        if message.rank == self._rank:
            self._publish(Here())  # it has dropped one connection only
            return []
        is_here = self._relay is not None and message.rank in self._relay.here
        self._bury(message.rank, has_ended=message.has_ended and is_here)
        if message.rank in self.ended:
            self.alert()
        return [Event(peer=message.rank, message=None)]

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
                self._miss(peer, has_ended=True)
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
