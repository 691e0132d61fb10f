"""The protocol of messages between ranks: who sends what when, and where what comes belongs.

**Short messages go at once**, into the receiver's memory where nobody has asked for them yet, up to ``WINDOW_BYTES``
of them a sender. Longer ones, and those beyond that, are offered, and go when the receiver has a place for them,
straight to it. So everybody may send first, and nobody's memory fills.

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
from mycel.runtime.p2p_routes import Route, parts_of
from mycel.runtime.p2p_wires import EAGER_BYTES

__all__ = ["EAGER_BYTES", "WINDOW_BYTES", "Exchange", "Outlet"]

#: Bytes of a sender's messages that a rank keeps before anybody asks for them.
WINDOW_BYTES = 1 << 20


class Outlet:
    """What this rank sends to another.

    Args:
        routes: paths to it.
        first: the connection over the first of them.

    Attributes:
        connections: one a path, of those that were needed so far.
        credit: bytes that may go unasked.
        count: messages so far.
        offered: messages that wait until they are asked for, by number.
    """

    def __init__(self, routes: tuple[Route, ...], first: Connection) -> None:
        self.routes = routes
        self.connections = [first]
        self.credit = WINDOW_BYTES
        self.count = 0
        self.offered: dict[int, Transfer] = {}


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
            self.outlets[transfer.peer].offered.pop(transfer.number, None)
        self.finish(transfer, error)

    # -- what comes: a Reader -----------------------------------------------------------------------------

    def begin(self, connection: Connection, frame: Frame) -> memoryview | None:
        """See ``Reader``."""
        if frame.kind == Kind.EAGER:
            return self._begin_eager(connection, frame)
        if frame.kind == Kind.PIECE:
            target = self._arriving.get((connection.peer, frame.number))
            if not isinstance(target, Transfer) or frame.value + frame.length > len(target.view):
                raise CommunicationError("a part of a message came that nobody has asked for (corrupted stream?)")
            return target.view[frame.value : frame.value + frame.length]
        if frame.kind == Kind.NOTE:
            connection.note = bytearray(frame.length)
            return memoryview(connection.note)
        return None

    def _begin_eager(self, connection: Connection, frame: Frame) -> memoryview:
        peer = connection.peer
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

    def end(self, connection: Connection, frame: Frame) -> None:
        """See ``Reader``."""
        peer, kind = connection.peer, frame.kind
        if kind == Kind.EAGER:
            self._end_eager(peer, frame, self._arriving.pop((peer, frame.number)))
        elif kind == Kind.PIECE:
            target = self._arriving[peer, frame.number]
            if isinstance(target, Transfer) and self._advance(target, frame.length):
                del self._arriving[peer, frame.number]
        elif kind == Kind.OFFER:
            transfer, arrival = self._matching.arrive(peer, frame.tag), _arrival(peer, frame, frame.value)
            if transfer is None:
                self._matching.hold(arrival)
            else:
                self._take(transfer, arrival)
        elif kind == Kind.GRANT:
            self._send_granted(peer, frame.number)
        elif kind == Kind.CREDIT:
            self.outlets[peer].credit += frame.value
        else:
            self.notes.setdefault(peer, deque()).append(json.loads(connection.note))

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
        self.finish(transfer)
        return True

    def _take(self, transfer: Transfer, arrival: Arrival) -> None:
        """A receive and a message have found each other."""
        transfer.source, transfer.begun = arrival.src, True
        if not self._fits(transfer, arrival.src, arrival.num_bytes, arrival.dtype):
            return
        if arrival.data is None:
            self._arriving[arrival.src, arrival.number] = transfer
            inlet = self.inlets[arrival.src]
            inlet.post(Frame(Kind.GRANT, number=arrival.number))
            self._write(inlet)
        elif arrival.left:
            arrival.taker = transfer
        else:
            self._deliver(transfer, arrival)

    def _deliver(self, transfer: Transfer, arrival: Arrival) -> None:
        """Give a receive the message that was kept for it."""
        transfer.view[:] = arrival.data or b""
        self._advance(transfer, arrival.num_bytes)
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

    def _send_granted(self, peer: int, number: int) -> None:
        outlet = self.outlets[peer]
        transfer = outlet.offered.pop(number, None)
        if transfer is None:  # it has failed here meanwhile
            return
        transfer.begun = True
        parts = parts_of(len(transfer.view), outlet.routes)
        for connection, (begin, end) in zip(outlet.connections, parts, strict=False):
            if begin < end:
                connection.post_part(transfer, begin, end)
                self._write(connection)


def _arrival(peer: int, frame: Frame, num_bytes: int) -> Arrival:
    """A message of so many bytes, of which none have come."""
    number, dtype = frame.number, frame.dtype
    return Arrival(src=peer, tag=frame.tag, number=number, dtype=dtype, num_bytes=num_bytes, left=num_bytes)
