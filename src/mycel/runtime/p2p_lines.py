"""A rank's lines to the others, as its messages need them: paths, connections, and what is known of a rank's end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import termios
import time
from collections.abc import Callable, Set

from mycel.collectives.program import Channel
from mycel.errors import CommunicationError, PeerLostError
from mycel.runtime.control import Control
from mycel.runtime.p2p_passage import Passage
from mycel.runtime.p2p_routes import Relay, Route, find_relays, find_routes
from mycel.runtime.p2p_wires import ring_bytes_for
from mycel.runtime.transport.hello import Purpose
from mycel.runtime.transport.rendezvous import Rendezvous
from mycel.topology.model import Topology

__all__ = ["Lines", "num_unacknowledged"]

#: For news of why a connection has ended: whoever has failed says so over its control connections first.
_NEWS_S = 2.0


class Lines:
    """What an endpoint stands on; made by ``Communicator.lines``.

    Args:
        topology: the fabric between the group's ranks.
        rendezvous: this rank's listener, with everyone's addresses.
        address_of: at which address a channel's destination is reached over its path.
        pace_of: bytes a second at which a channel sends at most; ``None`` for no limit.
        failure: why the group has failed, if it has; a thread of the process's reads what the others say.
        give_up: fails the group on all ranks, for a reason of a kind; the error.
        control: the group's control connections.
        in_memory: whether messages to ranks of this node go through memory that both share.

    Attributes:
        rank, size: in the group.
        is_crowded: whether the node has more of the group's ranks than processors.
        ring_bytes: of the memory for what a rank of this node is sent; 0: it goes through a socket.
    """

    def __init__(
        self,
        *,
        topology: Topology,
        rendezvous: Rendezvous,
        address_of: Callable[[Channel], str],
        pace_of: Callable[[Channel], int | None],
        failure: Callable[[], CommunicationError | None],
        give_up: Callable[[str, str], CommunicationError],
        control: Control,
        in_memory: bool,
    ) -> None:
        self.rank, self.size = rendezvous.rank, rendezvous.size
        hosts = [address.host for address in rendezvous.addresses]
        num_here = hosts.count(hosts[self.rank])
        self.is_crowded = num_here > len(os.sched_getaffinity(0))
        self.ring_bytes = ring_bytes_for(num_here) if in_memory else 0
        self._control = control
        self._topology = topology
        self._rendezvous = rendezvous
        self._address_of, self._pace_of = address_of, pace_of
        self._failure, self.fail = failure, give_up
        self._routes: dict[int, tuple[Route, ...]] = {}

    @property
    def gone(self) -> Set[int]:
        """Ranks whose process or control connection has ended, with a goodbye or without."""
        return self._control.gone

    @property
    def failure(self) -> CommunicationError | None:
        """Why the group has failed; ``None`` while it has not."""
        return self._failure()

    def routes(self, peer: int) -> tuple[Route, ...]:
        """Paths to a rank; the first carries short messages."""
        if peer not in self._routes:
            self._routes[peer] = find_routes(self._topology, self.rank, peer, self._address_of)
        return self._routes[peer]

    @property
    def listening(self) -> tuple[int, ...]:
        """Descriptors that become readable when another rank calls."""
        return self._rendezvous.listening

    def dial(self, peer: int, number: int, deadline: float) -> socket.socket:
        """A connection to a rank over one of its ``routes``, paced as a channel there would be.

        Raises:
            CommunicationError: the rank cannot be reached.
        """
        channel = self.routes(peer)[number].channel
        return self._rendezvous.call(peer, number, self._address_of(channel), self._pace_of(channel), deadline)

    def accept(self) -> list[tuple[int, int, socket.socket]]:
        """Connections that others have opened since: rank, number of its path, socket. Does not wait."""
        return self._rendezvous.calls()

    # -- through other ranks ------------------------------------------------------------------------------

    def rate(self, peer: int) -> float | None:
        """Bytes a second on all ``routes`` to a rank; ``None`` where nobody has said, or they are very fast."""
        paces = [self._pace_of(route.channel) for route in self.routes(peer)]
        return None if None in paces else float(sum(pace for pace in paces if pace is not None))

    def relays(self, peer: int) -> list[tuple[Relay, float]]:
        """Ways to a rank through others, and how many bytes a second each carries; only where rates are known.

        A cable of 10 Gbit/s and more is faster than a rank passes bytes on.
        """
        if self.rate(peer) is None:
            return []
        found = [
            (relay, [self._pace_of(channel) for channel in relay.channels])
            for relay in find_relays(self._topology, self.routes(peer))
        ]
        return [(relay, float(min(pace for pace in paces if pace))) for relay, paces in found if None not in paces]

    def dial_passage(self, passage: Passage, deadline: float) -> socket.socket:
        """A connection to the first of a passage's stops, which passes on what comes, or is its destination.

        Raises:
            CommunicationError: the rank cannot be reached.
        """
        peer, *stops = passage.stops
        channel = self.routes(peer)[0].channel
        address, pace = self._address_of(channel), self._pace_of(channel)
        rest = Passage(origin=passage.origin, number=passage.number, stops=tuple(stops))
        return self._rendezvous.call(peer, rest.pack(), address, pace, deadline, Purpose.PASSAGE)

    def accept_passages(self) -> list[tuple[Passage, socket.socket]]:
        """Connections of ranks that have messages passed on, or pass them on to this one. Does not wait."""
        found = []
        for _, number, sock in self._rendezvous.calls(Purpose.PASSAGE):
            try:
                found.append((Passage.unpack(number, self.size), sock))
            except CommunicationError:  # whoever it is, is told by the end of the connection
                sock.close()
        return found

    def lost(self, peer: int, what: str) -> CommunicationError:
        """The error where a rank's connections have ended; the group has failed by it unless the rank said goodbye.

        Args:
            peer: whose.
            what: was under way, in words.
        """
        until = time.monotonic() + _NEWS_S
        while True:
            if (cause := self.failure) is not None:
                return cause
            if peer in self._control.left:
                return PeerLostError(f"rank {peer} left (it had finished, or destroyed its group) during {what}")
            if peer in self.gone or time.monotonic() >= until:
                return self.fail(
                    "lost",
                    f"rank {peer} was lost during {what}: its connections closed (process died or was killed?)",
                )
            time.sleep(0.01)

    @staticmethod
    def finish(sock: socket.socket, until: float) -> None:
        """Send nothing more, and wait until the other end's kernel has all that was sent.

        A TCP connection that is closed with something unread throws away what it has not delivered.
        """
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
            while sock.family != socket.AF_UNIX and time.monotonic() < until:
                with contextlib.suppress(BlockingIOError):
                    while sock.recv(1 << 16):
                        pass
                    return
                if not num_unacknowledged(sock):
                    return
                time.sleep(0.001)


def num_unacknowledged(sock: socket.socket) -> int:
    """Bytes that were sent and have not come, as far as this machine's kernel knows."""
    (count,) = struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))
    return int(count)
