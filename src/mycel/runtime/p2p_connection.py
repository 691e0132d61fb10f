"""One connection that carries frames: what is to go out, in turns, and what comes in, to its place.

Short frames go before the next piece of a long message, so that a long one delays others by a piece at most. Bytes
of long frames come straight to where they belong; short ones through a buffer, many with one call.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from mycel.runtime.p2p_frames import AGAIN, FRAME_BYTES, Frame, Kind, pack_frame, unpack_frame
from mycel.runtime.p2p_matching import Transfer
from mycel.runtime.p2p_pool import Flight, Pool
from mycel.runtime.p2p_wires import MemoryWire, Wire

__all__ = ["Connection", "Reader"]

_BUFFER_BYTES = 1 << 16
#: Bytes from which on what is still to come of a frame is read to its place, not through the buffer.
_DIRECT_BYTES = 1 << 13
#: Bytes that go over one connection, one way, before others get their turn.
_TURN_BYTES = 4 << 20


class Reader(Protocol):
    """Who looks at what comes."""

    def begin(self, connection: Connection, frame: Frame) -> memoryview | None:
        """A frame begins; where its bytes go, if it has any."""

    def end(self, connection: Connection, frame: Frame) -> None:
        """All bytes of a frame are in their place."""

    def sent(self, transfer: Transfer, num_bytes: int) -> None:
        """Bytes of a transfer have been handed to the kernel."""


@dataclass(slots=True, eq=False)
class _Outgoing:
    """A frame on its way out: its parts, whose bytes it has, and whether these are sent when they have gone."""

    parts: list[memoryview]
    left: int
    transfer: Transfer | None
    num_bytes: int
    counts: bool = True


@dataclass(slots=True, eq=False)
class _Stripe:
    """The part of a long message that goes over this connection."""

    transfer: Transfer
    place: int
    end: int


class Connection:
    """One end of a connection.

    Args:
        wire: carries its bytes.
        peer: rank at the other end.
        reader: sees what comes.

    Attributes:
        descriptor: of its socket.
        memory: its wire, where that is memory.
        is_waiting: no more is taken for now; it goes on when there is room.
        is_broken: the other end sends nothing any more, or nothing gets there.
        watched: events that the kernel is asked for.
        heard_s: when anything last came, by ``time.monotonic``.
        note: bytes of the last note.
        pool: pieces of long messages that it fetches when it has nothing else to do.
        flight: what is under way on it, where other ranks pass on what this end sends.
        is_relayed: whether other ranks pass on what comes.
        is_spare: whether the piece that comes has come before.
        aside: bytes of the piece that comes, where its message is not known yet.
    """

    def __init__(self, wire: Wire, peer: int, reader: Reader) -> None:
        self.wire, self.peer = wire, peer
        self.memory = wire if isinstance(wire, MemoryWire) else None
        self.descriptor = wire.sock.fileno()
        self.is_waiting = self.is_broken = False
        self.watched = 0
        self.heard_s = 0.0
        self.note = bytearray()
        self.pool: Pool | None = None
        self.flight: Flight | None = None
        self.is_relayed = self.is_spare = False
        self.aside: bytearray | None = None
        self._reader = reader
        self._short: deque[_Outgoing] = deque()
        self._long: deque[_Stripe] = deque()
        self._writing: _Outgoing | None = None
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._buffer_address = wire.address_of(self._buffer)
        self._begin = self._end = 0
        self._frame: Frame | None = None
        self._target: memoryview | None = None
        self._target_address = self._place = 0

    # -- out ----------------------------------------------------------------------------------------------

    @property
    def has_more(self) -> bool:
        """Whether anything is still to go out."""
        return bool(self._writing or self._short or self._long or (self.pool and self.pool.has_for(self.flight)))

    def post(self, frame: Frame, payload: memoryview | None = None, transfer: Transfer | None = None) -> None:
        """Have a frame go out after those before it."""
        parts = [memoryview(pack_frame(frame))]
        if payload is not None:
            parts.append(payload)
        self._short.append(_Outgoing(parts, FRAME_BYTES + frame.length, transfer, frame.length))

    def post_part(self, transfer: Transfer, begin: int, end: int) -> None:
        """Have a part of a long message go out, in pieces between which other frames may go."""
        self._long.append(_Stripe(transfer, begin, end))

    def _next(self) -> _Outgoing | None:
        if self._short:
            return self._short.popleft()
        if not self._long:
            return self._fetch()
        stripe = self._long.popleft()
        begin, end = stripe.place, min(stripe.end, stripe.place + self.wire.piece_bytes)
        stripe.place = end
        if end < stripe.end:
            self._long.append(stripe)  # other long messages get their turn
        frame = Frame(Kind.PIECE, number=stripe.transfer.number, length=end - begin, value=begin)
        parts = [memoryview(pack_frame(frame)), stripe.transfer.view[begin:end]]
        return _Outgoing(parts, FRAME_BYTES + end - begin, stripe.transfer, end - begin)

    def _fetch(self) -> _Outgoing | None:
        """A piece that whoever has room takes; one that goes through other ranks has gone when it has come."""
        piece = None if self.pool is None else self.pool.fetch(self.flight)
        if piece is None:
            return None
        length = piece.end - piece.begin
        tag = AGAIN if piece.is_again else 0
        frame = Frame(Kind.PIECE, tag, number=piece.transfer.number, length=length, value=piece.begin)
        parts = [memoryview(pack_frame(frame)), piece.transfer.view[piece.begin : piece.end]]
        return _Outgoing(parts, FRAME_BYTES + length, piece.transfer, length, counts=self.flight is None)

    def forget(self, transfer: Transfer) -> None:
        """Have nothing more of a message go out; what has begun ends with a copy, for its memory is the caller's."""
        self._long = deque(stripe for stripe in self._long if stripe.transfer is not transfer)
        going = self._writing
        if going is not None and going.transfer is transfer:
            going.parts = [memoryview(bytes(part)) for part in going.parts]
            going.transfer = None

    def write(self) -> None:
        """Hand over what is taken now, up to a turn's worth."""
        given = 0
        try:
            while given < _TURN_BYTES:
                going = self._writing
                if going is None:
                    going = self._writing = self._next()
                    if going is None:
                        self.is_waiting = False
                        return
                sent = self.wire.send(going.parts)
                given += sent
                going.left -= sent
                if going.left:
                    _advance(going.parts, sent)
                    continue
                self._writing = None
                if going.transfer is not None and going.counts:
                    self._reader.sent(going.transfer, going.num_bytes)
            self.is_waiting = self.has_more
        except BlockingIOError:
            self.is_waiting = True
        except OSError:
            self.is_broken = True

    # -- in -----------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Take in what has come.

        Raises:
            CommunicationError: it is nothing of ours.
        """
        taken = 0
        try:
            while taken < _TURN_BYTES:
                self._parse()
                target, place = self._target, self._place
                if target is not None and (room := len(target) - place) >= _DIRECT_BYTES:
                    self._target_address = self._target_address or self.wire.address_of(target)
                    got = self.wire.receive(target[place:], self._target_address + place, is_middle=True)
                    self._place += got
                else:
                    if self._begin:
                        kept = self._end - self._begin
                        self._buffer[:kept] = bytes(self._buffer[self._begin : self._end])
                        self._begin, self._end = 0, kept
                    room, end = _BUFFER_BYTES - self._end, self._end
                    got = self.wire.receive(self._buffer[end:], self._buffer_address + end, is_middle=False)
                    self._end += got
                if not got:
                    self.is_broken = True
                    return
                self.heard_s = time.monotonic()
                taken += got
                if got < room:  # that was all; if more has come since, somebody will say so
                    self._parse()
                    break
            self._parse()
        except BlockingIOError:
            pass
        except OSError:
            self.is_broken = True
        if not self.is_broken:
            left = 0 if self._target is None else len(self._target) - self._place
            self.wire.expect(left if left >= _DIRECT_BYTES else 1)

    def _parse(self) -> None:
        """Tell of all that is complete."""
        while True:
            if self._frame is None:
                if self._end - self._begin < FRAME_BYTES:
                    return
                self._frame = frame = unpack_frame(self._buffer, self._begin)
                self._begin += FRAME_BYTES
                self._target = self._reader.begin(self, frame)
                self._target_address = self._place = 0
            frame, target = self._frame, self._target
            if target is not None and self._place < len(target):
                size = min(self._end - self._begin, len(target) - self._place)
                target[self._place : self._place + size] = self._buffer[self._begin : self._begin + size]
                self._begin += size
                self._place += size
                if self._place < len(target):
                    return
            self._frame = self._target = None
            self._reader.end(self, frame)

    def divert(self) -> None:
        """Throw away the rest of the piece that comes: it comes on another way, too."""
        if self._target is not None:
            self._target, self._target_address = memoryview(bytearray(len(self._target))), 0
            self.is_spare = True

    def close(self) -> None:
        """Let go of its descriptors."""
        self.is_broken = True
        self.wire.close()


def _advance(parts: list[memoryview], num_bytes: int) -> None:
    """Take what has gone off the front of the parts."""
    while num_bytes >= len(parts[0]):
        num_bytes -= len(parts.pop(0))
    parts[0] = parts[0][num_bytes:]
