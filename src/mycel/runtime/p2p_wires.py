"""What carries a connection's bytes: a socket, or memory that two ranks of a node share.

Both hand over and fetch as many bytes as they can at once. A connection over a unix socket begins with one byte that
says which it is; with it, where it is memory, come its descriptors: a ring for what the caller sends, a smaller one
for what it is answered, and a bell for each end. The caller waits for nobody. The socket stays: by its end the end of
a process is noticed.
"""

from __future__ import annotations

import logging
import os
import socket
from array import array
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mycel.errors import CommunicationError, PeerLostError
from mycel.runtime import p2p_stream as s
from mycel.runtime.ring import DATA
from mycel.runtime.ring_memory import Ring, checked_length, handed_over, sealed_memory

__all__ = ["EAGER_BYTES", "MemoryWire", "SocketWire", "Wire", "accept_wire", "offer_wire", "ring_bytes_for"]

_log = logging.getLogger(__name__)

#: Messages up to this long go at once; through memory longer ones too: to ask first takes longer than to copy them.
EAGER_BYTES, _EAGER_BYTES_IN_MEMORY = 1 << 16, 1 << 18
#: Those up to this long set out at once: over a wire, they come while the receiver is busy; through memory, where a
#: long one is a copy more if nobody has asked for it, only while that is less than to ask.
_EARLY_BYTES, _EARLY_BYTES_IN_MEMORY = 1 << 22, 1 << 20
#: Bytes of the ring for messages: a whole activation of a pipeline, say, which is sent then without a wait, and less
#: where a rank may have many.
_LEAST_RING, _MOST_RING, _ALL_RINGS = 1 << 17, 1 << 21, 1 << 22
#: Of the one for what is answered: offers that are granted, credits.
_ANSWERS_BYTES = 1 << 14
#: What the caller says with the memory, or where it has none to give.
_HERE, _NONE = b"M", b"-"
#: The memories of both rings, the bell of who is called, and that of the caller.
_HANDED_OVER = 4
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
#: Frames up to this long are put together before they are put into the ring: to find an address takes as long.
_STAGED_BYTES = 1 << 13
#: Bytes of a long message for which its receiver waits at once: they come while it reads those before.
_MOST_EXPECTED = 1 << 17
#: Looks at a ring's other end in the middle of a message, some 10 us: it is most often at work on the next piece.
_MIDDLE_ROUNDS = 128


class Wire(Protocol):
    """Carries bytes both ways.

    Attributes:
        sock: by whose end the end of the other side is noticed.
        piece_bytes: how long pieces of a long message are best.
        eager_bytes: messages up to this long go unasked, and are over when they have gone.
        early_bytes: longer ones up to this long go unasked, too.
    """

    sock: socket.socket
    piece_bytes: int
    eager_bytes: int
    early_bytes: int

    def address_of(self, place: memoryview) -> int:
        """What ``receive`` needs to know of a place beside itself."""

    def send(self, parts: Sequence[memoryview]) -> int:
        """Hand over bytes; how many.

        Raises:
            BlockingIOError: none for now.
            OSError: nobody is there any more.
        """

    def receive(self, place: memoryview, address: int, *, is_middle: bool) -> int:
        """Fetch bytes; how many, 0: nothing comes any more.

        Args:
            place: where they belong.
            address: of the first of them, made from what ``address_of`` gave.
            is_middle: the rest of a message is about to come.

        Raises:
            BlockingIOError: none for now.
            OSError: nobody is there any more.
        """

    def expect(self, num_bytes: int) -> None:
        """Nobody needs to be woken before so many bytes are there to be fetched, if it is not very many."""

    def close(self) -> None:
        """Let go of all descriptors."""


class SocketWire:
    """A socket.

    Args:
        sock: connected and non-blocking.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.piece_bytes, self.eager_bytes = 1 << 20, EAGER_BYTES
        self.early_bytes = _EARLY_BYTES
        self._expected = 1

    def address_of(self, place: memoryview) -> int:
        """See ``Wire``: nothing."""
        return 0

    def send(self, parts: Sequence[memoryview]) -> int:
        """See ``Wire``."""
        return self.sock.sendmsg(parts, (), _FLAGS)

    def receive(self, place: memoryview, address: int, *, is_middle: bool) -> int:
        """See ``Wire``."""
        return self.sock.recv_into(place)

    def expect(self, num_bytes: int) -> None:
        """See ``Wire``: on a slow network, what comes of a long message would wake its receiver all the time."""
        num_bytes = min(num_bytes, _MOST_EXPECTED)
        if num_bytes != self._expected:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._expected = num_bytes

    def close(self) -> None:
        """See ``Wire``."""
        self.sock.close()


class MemoryWire:
    """Two rings.

    Args:
        sock: the connection's, over which they were handed.
        out, back: the ring that this end fills, and the one that the other end fills.
        bell: wakes this end, and belongs to the wire; -1: what wakes it belongs to somebody else.
        yields: whether other ranks need the processor while this one asks.

    Attributes:
        line: address of what compiled code knows of it.
        bell: as given.
        is_ended: the other end is gone; what it has sent may still be received.
    """

    def __init__(self, sock: socket.socket, out: Ring, back: Ring, bell: int, *, yields: bool) -> None:
        self.sock, self.bell = sock, bell
        self.piece_bytes, self.eager_bytes = 1 << 22, _EAGER_BYTES_IN_MEMORY
        self.early_bytes = _EARLY_BYTES_IN_MEMORY
        self.is_ended = False
        self._rings = (out, back)
        self._yields = int(yields)
        self._fields = array("q", bytes(8 * s.LINE_FIELDS))
        self.line: int = self._fields.buffer_info()[0]
        for field, value in (
            (s.L_OUT, out.address),
            (s.L_OUT_CAPACITY, out.capacity),
            (s.L_IN, back.address),
            (s.L_IN_CAPACITY, back.capacity),
            (s.L_BELL, out.bell),
            (s.L_ONE, 1),
        ):
            self._fields[field] = value
        self._stage = memoryview(bytearray(_STAGED_BYTES))
        self._stage_address = _address_of(self._stage)

    def wait(self, *, for_room: bool) -> None:
        """Say whether this end has more to send than there was room for."""
        self._fields[s.L_WAITS] = for_room

    @property
    def ready(self) -> int:
        """What it could go on with when its line was last looked at: ``READABLE``, ``WRITABLE``."""
        return self._fields[s.L_READY]

    def address_of(self, place: memoryview) -> int:
        """See ``Wire``."""
        return _address_of(place) if len(place) else 0

    def send(self, parts: Sequence[memoryview]) -> int:
        """See ``Wire``."""
        if self.is_ended:
            raise BrokenPipeError
        total = 0
        if sum(map(len, parts)) <= _STAGED_BYTES:
            for part in parts:
                self._stage[total : total + len(part)] = part
                total += len(part)
            total = s.put(self.line, self._stage_address, total, 0, 0)
        else:
            for part in parts:
                put = s.put(self.line, _address_of(part), len(part), _MIDDLE_ROUNDS, self._yields)
                total += put
                if put < len(part):
                    break
        if not total:
            raise BlockingIOError
        return total

    def receive(self, place: memoryview, address: int, *, is_middle: bool) -> int:
        """See ``Wire``."""
        got = s.get(self.line, address, len(place), _MIDDLE_ROUNDS if is_middle else 0, self._yields)
        if not got and not self.is_ended:
            raise BlockingIOError
        return got

    def expect(self, num_bytes: int) -> None:
        """See ``Wire``: the other end rings for each piece that it puts into the ring."""

    def hear(self) -> None:
        """Notice the end of the other side: nothing else comes over the socket."""
        try:
            self.is_ended = self.is_ended or not self.sock.recv(64, _FLAGS)
        except BlockingIOError:
            pass
        except OSError:
            self.is_ended = True

    def close(self) -> None:
        """See ``Wire``. The memory goes with the object, which another thread may be at still."""
        self.is_ended = True
        self._fields[s.L_BELL] = -1
        self.sock.close()
        for ring in self._rings:
            ring.close()
        if self.bell >= 0:
            os.close(self.bell)
            self.bell = -1


def ring_bytes_for(num_ranks: int) -> int:
    """How long the ring of a message's sender is.

    Args:
        num_ranks: of the group on this node.

    Examples:
        >>> [ring_bytes_for(n) >> 10 for n in (2, 3, 8, 100)]
        [2048, 1024, 512, 128]
    """
    return max(_LEAST_RING, min(_MOST_RING, _ALL_RINGS >> max(1, num_ranks - 1).bit_length()))


def offer_wire(sock: socket.socket, bell: int, *, ring_bytes: int, yields: bool) -> Wire:
    """What carries a connection's bytes, at the end that has called; the other one calls ``accept_wire``.

    Args:
        sock: connected and non-blocking.
        bell: wakes this end.
        ring_bytes: of the memory for what is sent; 0, or where the kernel gives none: it goes through the socket.
        yields: whether other ranks need the processor while this one asks.

    Raises:
        PeerLostError: the other side has gone.
    """
    if sock.family != socket.AF_UNIX:
        return SocketWire(sock)
    memories: list[int] = []
    theirs = -1
    try:
        rings = None
        if ring_bytes:
            try:
                memories += [sealed_memory(DATA + length) for length in (ring_bytes, _ANSWERS_BYTES)]
                theirs = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                rings = Ring(memories[0], DATA + ring_bytes, theirs), Ring(memories[1], DATA + _ANSWERS_BYTES, -1)
            except OSError as error:  # a sandbox, no memory or descriptor left: the socket does
                _log.debug("no memory can be shared: %s", error)
        said, handed = (_HERE, [*memories, theirs, bell]) if rings else (_NONE, [])
        try:
            socket.send_fds(sock, [said], handed)
        except OSError as error:
            raise PeerLostError(f"a connection's other end went while it was made: {error.strerror}") from None
        if rings is None:
            return SocketWire(sock)
        theirs = -1
        return MemoryWire(sock, *rings, -1, yields=yields)
    finally:
        for descriptor in (*memories, theirs):
            if descriptor >= 0:
                os.close(descriptor)


def accept_wire(sock: socket.socket, *, yields: bool) -> Wire | None:
    """What carries a connection's bytes, at the end that was called; ``None``: the caller has not said yet.

    Args:
        sock: connected and non-blocking.
        yields: as for ``offer_wire``.

    Raises:
        PeerLostError: the caller has gone.
        CommunicationError: it is none of ours, or what it hands over cannot be mapped.
    """
    if sock.family != socket.AF_UNIX:
        return SocketWire(sock)
    try:
        said, descriptors = handed_over(sock, _HANDED_OVER)
    except BlockingIOError:
        return None
    except OSError:
        said, descriptors = b"", []
    kept = 0
    try:
        if not said:
            raise PeerLostError("a connection's other end went while it was made")
        if said == _NONE and not descriptors:
            return SocketWire(sock)
        if said != _HERE or len(descriptors) != _HANDED_OVER:
            raise CommunicationError("something that is no message came (corrupted stream?)")
        memory, answers, own_bell, their_bell = descriptors
        back = Ring(memory, checked_length(memory), -1)
        out = Ring(answers, checked_length(answers), their_bell)
        kept = 2
        return MemoryWire(sock, out, back, own_bell, yields=yields)
    except (OSError, ValueError) as error:
        raise CommunicationError(f"the memory of a connection cannot be mapped: {error}") from None
    finally:
        for descriptor in descriptors[: len(descriptors) - kept]:
            os.close(descriptor)


def _address_of(place: memoryview) -> int:
    address: int = np.frombuffer(place, dtype=np.uint8).__array_interface__["data"][0]
    return address
