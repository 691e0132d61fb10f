"""The protocol of messages between ranks: who sends what when, and where what comes belongs.

**Short messages go at once**, into the receiver's memory where nobody has asked for them yet, up to ``WINDOW_BYTES``
of them a sender. **Longer ones set out**, up to ``early_bytes_for`` of them, but are over only when somebody has
asked for them. What is beyond that is offered, and goes when the receiver has a place for it, straight to it. So
everybody may send first, and nobody's memory fills.

Knows neither threads nor the kernel's waiting: ``Endpoint`` calls under its lock.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from typing import Any

from mycel.errors import CommunicationError
from mycel.runtime.p2p_connection import Connection
from mycel.runtime.p2p_frames import Frame, Kind
from mycel.runtime.p2p_matching import Arrival, Matching, Transfer
from mycel.runtime.p2p_pieces import Pieces
from mycel.runtime.p2p_pool import RELAYED_BYTES, Pool
from mycel.runtime.p2p_routes import Route, parts_of
from mycel.runtime.p2p_wires import EAGER_BYTES

__all__ = ["EAGER_BYTES", "WINDOW_BYTES", "Exchange", "Outlet", "early_bytes_for"]

#: Bytes of a sender's messages that a rank keeps before anybody asks for them.
WINDOW_BYTES = 1 << 20
#: Likewise of longer ones that have begun to come: in a group of few ranks, where they are many, and of all senders
#: together.
_MOST_EARLY, _LEAST_EARLY, _ALL_EARLY = 4 << 20, 1 << 20, 64 << 20


class Outlet:
    """What this rank sends to another.

    Args:
        routes: paths to it.
        first: the connection over the first of them.
        early_bytes: of long messages that it keeps for this rank.

    Attributes:
        connections: one a path, of those that were needed so far.
        relays: connections that lead through other ranks, of those that have not ended.
        pool: pieces of messages that these take part in; ``None``: there are no such ways.
        credit: bytes of short messages that may go unasked.
        early_credit: bytes of longer ones that may.
        has_asked: whether ranks have been asked to pass on what goes to this one.
        count: messages so far.
        offered: messages that wait until they are asked for, by number.
        early: those that have gone unasked, until they have been asked for.
    """

    def __init__(self, routes: tuple[Route, ...], first: Connection, early_bytes: int) -> None:
        self.routes = routes
        self.connections = [first]
        self.relays: list[Connection] = []
        self.pool: Pool | None = None
        self.has_asked = False
        self.credit, self.early_credit = WINDOW_BYTES, early_bytes
        self.count = 0
        self.offered: dict[int, Transfer] = {}
        self.early: dict[int, Transfer] = {}

    def suffices(self, num_bytes: int) -> bool:
        """Whether all connections are there that a message of this length takes."""
        if num_bytes > EAGER_BYTES and len(self.connections) < len(self.routes):
            return False
        return num_bytes < RELAYED_BYTES or self.has_asked

    @property
    def is_widened(self) -> bool:
        """Whether a way through other ranks is there."""
        return any(connection.flight is not None and connection.flight.is_ready for connection in self.relays)


class Exchange:
    """The messages of one rank: a ``Reader`` of all its connections.

    Args:
        rank: in the group.
        write: hands to the kernel what a connection has, as far as it takes it.

    Attributes:
        open: transfers under way.
        over: those that have ended and whose owners are to be told.
        outlets, inlets: by rank; a rank's first connection brings all but the pieces of long messages.
        disagreement: what two ranks do not agree on; empty while they do.
        notes: what ranks have told each other apart from messages, by sender; for whoever waits for them.
    """

    def __init__(self, rank: int, write: Callable[[Connection], None]) -> None:
        self._rank, self._write = rank, write
        self.open: set[Transfer] = set()
        self.over: deque[Transfer] = deque()
        self.outlets: dict[int, Outlet] = {}
        self.inlets: dict[int, Connection] = {}
        self.disagreement = ""
        self.notes: dict[int, deque[dict[str, Any]]] = {}
        self._matching = Matching()
        self._arriving: dict[tuple[int, int], Transfer | Arrival] = {}
        self._pieces = Pieces(self._come, self._whole)
        self._owed: dict[int, int] = {}

    # -- what callers ask for -----------------------------------------------------------------------------

    def send(self, transfer: Transfer, outlet: Outlet) -> None:
        """Begin to send, at once where the message is short."""
        self.open.add(transfer)
        transfer.number, outlet.count = outlet.count, outlet.count + 1
        first, num_bytes = outlet.connections[0], len(transfer.view)
        if num_bytes <= first.wire.eager_bytes and num_bytes <= outlet.credit:
            outlet.credit -= num_bytes
            transfer.begun = True
            frame = Frame(Kind.EAGER, transfer.tag, transfer.number, num_bytes, 0, transfer.dtype)
            first.post(frame, transfer.view, transfer)
        elif first.wire.eager_bytes < num_bytes <= min(first.wire.early_bytes, outlet.early_credit):
            outlet.early_credit -= num_bytes
            outlet.early[transfer.number] = transfer
            first.post(Frame(Kind.EARLY, transfer.tag, transfer.number, 0, num_bytes, transfer.dtype))
            self._send_pieces(transfer, outlet)
        else:
            outlet.offered[transfer.number] = transfer
            first.post(Frame(Kind.OFFER, transfer.tag, transfer.number, 0, num_bytes, transfer.dtype))
        self._write(first)

    def receive(self, transfer: Transfer) -> None:
        """Begin to receive; what has come already is taken."""
        self.open.add(transfer)
        arrival = self._matching.receive(transfer)
        if arrival is not None:
            self._take(transfer, arrival)

    def finish(self, transfer: Transfer, error: BaseException | None = None) -> None:
        """A transfer has ended."""
        if transfer in self.open:
            self.open.discard(transfer)
            transfer.error = error
            self.over.append(transfer)

    def drop(self, transfer: Transfer, error: BaseException) -> None:
        """End a transfer that will not get through, and let no message find it."""
        self._matching.withdraw(transfer)
        if transfer.verb == "send" and transfer.peer in self.outlets:
            outlet = self.outlets[transfer.peer]
            outlet.offered.pop(transfer.number, None)
            outlet.early.pop(transfer.number, None)
            self._forget(transfer, outlet)
        self.finish(transfer, error)

    @staticmethod
    def _forget(transfer: Transfer, outlet: Outlet) -> None:
        if outlet.pool is not None:
            outlet.pool.forget(transfer)
        for connection in (*outlet.connections, *outlet.relays):
            connection.forget(transfer)

    def lose_relay(self, connection: Connection) -> None:
        """A way through other ranks has ended: what was under way there goes by a direct one."""
        outlet = self.outlets.get(connection.peer)
        if connection.flight is None or outlet is None or outlet.pool is None or connection not in outlet.relays:
            return
        outlet.relays.remove(connection)
        flying = [piece for piece, _ in connection.flight.flying]
        connection.flight.flying.clear()
        outlet.pool.tell_again([piece for piece in flying if piece.transfer in self.open and piece.transfer.left > 0])
        for direct in tuple(outlet.connections):
            self._write(direct)

    def stalled(self) -> list[Connection]:
        """Ways through other ranks that bring nothing, though pieces are under way there."""
        relays = [connection for outlet in self.outlets.values() for connection in outlet.relays]
        return [each for each in relays if each.flight is not None and each.flight.is_stalled]

    # -- what comes: a Reader -----------------------------------------------------------------------------

    def begin(self, connection: Connection, frame: Frame) -> memoryview | None:
        """See ``Reader``."""
        if frame.kind == Kind.EAGER:
            return self._begin_eager(connection, frame)
        if frame.kind == Kind.PIECE:
            return self._pieces.begin(connection, frame)
        if frame.kind == Kind.NOTE:
            connection.note = bytearray(frame.length)
            return memoryview(connection.note)
        return None

    def _begin_eager(self, connection: Connection, frame: Frame) -> memoryview:
        peer = connection.peer
        self._pieces.announce(peer, frame.number)
        if frame.length > connection.wire.eager_bytes:
            raise CommunicationError(f"{frame.length} bytes came unasked (corrupted stream?)")
        transfer = self._matching.arrive(peer, frame.tag)
        if transfer is not None:
            transfer.source, transfer.begun = peer, True
            if self._fits(transfer, peer, frame.length, frame.dtype):
                self._arriving[peer, frame.number] = transfer
                return transfer.view
        arrival = _arrival(peer, frame, frame.length)
        arrival.data = bytearray(frame.length)
        if transfer is None:
            self._matching.hold(arrival)
        self._arriving[peer, frame.number] = arrival
        return memoryview(arrival.data)

    def _end_piece(self, connection: Connection, frame: Frame) -> None:
        self._pieces.end(connection, frame)
        if connection.is_relayed:
            connection.post(Frame(Kind.TAKEN, number=frame.number, value=frame.value))
            self._write(connection)

    def _end_flight(self, connection: Connection, frame: Frame) -> None:
        """The other end of a way through other ranks is there, or has a piece."""
        if connection.flight is None:
            raise CommunicationError("a piece was taken that was not sent (corrupted stream?)")
        if connection not in self.outlets[connection.peer].relays:
            return  # given up, with more of its answers here: what they are about has been told again
        if frame.kind == Kind.READY:
            connection.flight.is_ready = True
        else:
            piece = connection.flight.taken(frame.number, frame.value)
            self._advance(piece.transfer, piece.end - piece.begin)
        self._write(connection)

    def _whole(self, peer: int, number: int) -> None:
        """Say that a message is there: its sender may still be telling again what went through others, unread."""
        inlet = self.inlets[peer]
        inlet.post(Frame(Kind.WHOLE, number=number))
        self._write(inlet)

    def _end_copies(self, peer: int, number: int) -> None:
        """A message of this rank's is there, whatever has become of pieces that went through others."""
        for transfer in self.open:
            if transfer.verb == "send" and (transfer.peer, transfer.number) == (peer, number):
                self._forget(transfer, self.outlets[peer])
                self._advance(transfer, transfer.left)
                return

    def end(self, connection: Connection, frame: Frame) -> None:
        """See ``Reader``."""
        peer, kind = connection.peer, frame.kind
        if kind == Kind.EAGER:
            self._end_eager(peer, frame, self._arriving.pop((peer, frame.number)))
        elif kind == Kind.PIECE:
            self._end_piece(connection, frame)
        elif kind in (Kind.OFFER, Kind.EARLY):
            self._announced(peer, frame)
        elif kind == Kind.GRANT:
            self._granted(peer, frame.number)
        elif kind == Kind.CREDIT:
            self.outlets[peer].credit += frame.value
        elif kind in (Kind.READY, Kind.TAKEN):
            self._end_flight(connection, frame)
        elif kind == Kind.WHOLE:
            self._end_copies(peer, frame.number)
        else:
            self.notes.setdefault(peer, deque()).append(json.loads(connection.note))

    def _announced(self, peer: int, frame: Frame) -> None:
        """A long message waits at its sender, or has set out."""
        self._pieces.announce(peer, frame.number)
        transfer, arrival = self._matching.arrive(peer, frame.tag), _arrival(peer, frame, frame.value)
        arrival.is_early = frame.kind == Kind.EARLY
        if transfer is not None:
            self._take(transfer, arrival)
            return
        self._matching.hold(arrival)
        if arrival.is_early:
            arrival.data = bytearray(frame.value)
            self._pieces.expect(peer, frame.number, arrival, memoryview(arrival.data))

    def _end_eager(self, peer: int, frame: Frame, target: Transfer | Arrival) -> None:
        if isinstance(target, Transfer):
            self._advance(target, frame.length)
            self._owe(peer, frame.length)
            return
        target.left = 0
        if target.taker is not None:
            self._deliver(target.taker, target)

    def sent(self, transfer: Transfer, num_bytes: int) -> None:
        """See ``Reader``."""
        self._advance(transfer, num_bytes)

    def _advance(self, transfer: Transfer, num_bytes: int) -> bool:
        """Count bytes of a transfer that have got through; whether these were the last."""
        transfer.left -= num_bytes
        if transfer.left > 0:
            return False
        if transfer.begun:  # what was sent early has not been received by anybody yet
            self.finish(transfer)
        return True

    def _come(self, target: Transfer | Arrival, num_bytes: int) -> bool:
        """Count bytes of a long message that are there; whether these were the last."""
        if isinstance(target, Transfer):
            return self._advance(target, num_bytes)
        target.left -= num_bytes
        if target.left > 0:
            return False
        if target.taker is not None:
            self._deliver(target.taker, target)
        return True

    def _take(self, transfer: Transfer, arrival: Arrival) -> None:
        """A receive and a message have found each other."""
        transfer.source, transfer.begun = arrival.src, True
        if not self._fits(transfer, arrival.src, arrival.num_bytes, arrival.dtype):
            return
        if arrival.data is None or arrival.is_early:
            inlet = self.inlets[arrival.src]
            inlet.post(Frame(Kind.GRANT, number=arrival.number))
            self._write(inlet)
        if arrival.data is None:
            self._pieces.expect(arrival.src, arrival.number, transfer, transfer.view)
        elif arrival.left:
            arrival.taker = transfer
        else:
            self._deliver(transfer, arrival)

    def _deliver(self, transfer: Transfer, arrival: Arrival) -> None:
        """Give a receive the message that was kept for it."""
        transfer.view[:] = arrival.data or b""
        self._advance(transfer, arrival.num_bytes)
        if not arrival.is_early:
            self._owe(arrival.src, arrival.num_bytes)

    def _owe(self, peer: int, num_bytes: int) -> None:
        """A rank may send so many bytes unasked again; it is told where it has become much."""
        owed = self._owed.get(peer, 0) + num_bytes
        if owed >= WINDOW_BYTES // 4:
            inlet = self.inlets[peer]
            inlet.post(Frame(Kind.CREDIT, value=owed))
            self._write(inlet)
            owed = 0
        self._owed[peer] = owed

    def _fits(self, transfer: Transfer, src: int, num_bytes: int, dtype: bytes) -> bool:
        if num_bytes == len(transfer.view) and dtype == transfer.dtype:
            return True
        self.disagreement = self.disagreement or (
            f"ranks do not agree: rank {src} sent {num_bytes} bytes of {dtype.decode(errors='replace')} with tag "
            f"{transfer.tag} to rank {self._rank}, which receives {transfer.size} there"
        )
        return False

    def _granted(self, peer: int, number: int) -> None:
        """A message of this rank's has found its receive."""
        outlet = self.outlets[peer]
        transfer = outlet.early.pop(number, None)
        if transfer is not None:
            transfer.begun = True
            outlet.early_credit += len(transfer.view)
            self._advance(transfer, 0)
            return
        transfer = outlet.offered.pop(number, None)
        if transfer is not None:  # else it has failed here meanwhile
            transfer.begun = True
            self._send_pieces(transfer, outlet)

    def _send_pieces(self, transfer: Transfer, outlet: Outlet) -> None:
        if outlet.pool is not None and outlet.is_widened and len(transfer.view) >= RELAYED_BYTES:
            outlet.pool.add(transfer)
            for connection in (*outlet.connections, *outlet.relays):
                self._write(connection)
            return
        parts = parts_of(len(transfer.view), outlet.routes)
        for connection, (begin, end) in zip(outlet.connections, parts, strict=False):
            if begin < end:
                connection.post_part(transfer, begin, end)
                self._write(connection)


def early_bytes_for(size: int) -> int:
    """Bytes of long messages that a rank keeps for each sender in a group of ``size`` ranks.

    Examples:
        >>> [early_bytes_for(size) >> 20 for size in (2, 16, 32, 1024)]
        [4, 4, 2, 1]
    """
    return max(_LEAST_EARLY, min(_MOST_EARLY, _ALL_EARLY // size))


def _arrival(peer: int, frame: Frame, num_bytes: int) -> Arrival:
    """A message of so many bytes, of which none have come."""
    number, dtype = frame.number, frame.dtype
    return Arrival(src=peer, tag=frame.tag, number=number, dtype=dtype, num_bytes=num_bytes, left=num_bytes)
