"""An endpoint's part in messages that go through other ranks: as their sender, their receiver, and on the way.

All of it is beside the messages themselves: a way through others is used once its far end has said that it is there,
and where it ends, or brings nothing, what was under way there goes by a direct one. So a rank that is late, has
stopped, has left or has died on such a way makes messages slower, and fails none.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

from mycel.errors import CommunicationError
from mycel.runtime.p2p_connection import Connection
from mycel.runtime.p2p_exchange import Outlet
from mycel.runtime.p2p_frames import Frame, Kind
from mycel.runtime.p2p_lines import Lines, num_unacknowledged
from mycel.runtime.p2p_passage import Passage, Passages
from mycel.runtime.p2p_pool import Flight, Pool
from mycel.runtime.p2p_routes import Relay
from mycel.runtime.p2p_wires import SocketWire, Wire

__all__ = ["Detours"]

_log = logging.getLogger(__name__)

#: For a rank on the way to be reached; nobody waits for it.
_DIAL_S = 10.0
#: Pieces that the kernel may hold of a direct way unsent: more would be taken from the other ways.
_UNSENT_PIECES = 3


class Detours:
    """One an endpoint.

    Args:
        lines: of the endpoint.
        inside: holds the endpoint's lock.
        adopt: makes a connection of what carries bytes to a rank; the caller holds the lock.
        write: hands to the kernel what a connection has; likewise.
        is_wanted: whether this rank's own messages may go through others.
    """

    def __init__(
        self,
        lines: Lines,
        *,
        inside: Callable[[], AbstractContextManager[None]],
        adopt: Callable[[Wire, int], Connection],
        write: Callable[[Connection], None],
        is_wanted: bool,
    ) -> None:
        self._lines, self._is_wanted = lines, is_wanted
        self._inside, self._adopt, self._write = inside, adopt, write
        self._passages = Passages()
        self._is_closed = False

    def ask(self, peer: int, outlet: Outlet) -> None:
        """Have ranks beside the direct ways pass on what goes to a rank; they are used when they are there."""
        outlet.has_asked = True
        relays = self._lines.relays(peer) if self._is_wanted else []
        rate = self._lines.rate(peer)
        if not relays or rate is None or any(each.memory is not None for each in outlet.connections):
            return
        outlet.pool = Pool(rate, lambda: _num_unsent(outlet))
        for connection in outlet.connections:
            self.share(connection, outlet)
        args = (peer, outlet, outlet.pool, relays)
        threading.Thread(target=self._dial, args=args, name="mycel-detours", daemon=True).start()

    def share(self, connection: Connection, outlet: Outlet) -> None:
        """Have a direct connection fetch pieces; the kernel is to hold few, so that others get theirs."""
        if outlet.pool is None:
            return
        connection.pool = outlet.pool
        with suppress(OSError):  # it may have gone; whoever reads from it will see
            connection.wire.sock.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_PIECES * outlet.pool.piece_bytes
            )

    def _dial(self, peer: int, outlet: Outlet, pool: Pool, relays: list[tuple[Relay, float]]) -> None:
        for number, (relay, rate) in enumerate(relays, 1):
            passage = Passage(origin=self._lines.rank, number=number, stops=relay.stops)
            try:
                sock = self._lines.dial_passage(passage, time.monotonic() + _DIAL_S)
            except CommunicationError as error:  # it goes without
                _log.debug("no way to rank %d through %s: %s", peer, relay.stops[:-1], error)
                continue
            with self._inside():
                if self._is_closed:
                    sock.close()
                    return
                connection = self._adopt(SocketWire(sock), peer)
                connection.flight, connection.pool = Flight(rate), pool
                outlet.relays.append(connection)

    def let_in(self) -> None:
        """Let in who sends through this rank, and who sends to it through others."""
        for passage, sock in self._lines.accept_passages():
            if passage.stops:
                self._passages.open(sock, lambda passage=passage: self._pass_to_next(passage))  # type: ignore[misc]
                continue
            with self._inside():
                connection = self._adopt(SocketWire(sock), passage.origin)
                connection.is_relayed = True
                connection.post(Frame(Kind.READY))
                self._write(connection)

    def _pass_to_next(self, passage: Passage) -> socket.socket:
        return self._lines.dial_passage(passage, time.monotonic() + _DIAL_S)

    def close(self) -> None:
        """Pass on nothing any more. Idempotent; waits for nothing."""
        self._is_closed = True
        self._passages.close()

    def join(self, limit_s: float) -> None:
        """After ``close``: wait until nothing is passed on any more."""
        self._passages.join(limit_s)

    def after_fork_in_child(self) -> None:
        """Let go of what a forked child has inherited."""
        self._is_closed = True
        self._passages.after_fork_in_child()


def _num_unsent(outlet: Outlet) -> int:
    """Bytes that the direct ways hold."""
    total = 0
    for connection in outlet.connections:
        with suppress(OSError, ValueError):  # it has gone
            total += num_unacknowledged(connection.wire.sock)
    return total
