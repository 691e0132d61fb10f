"""A channel between two ranks of a node: a ring (``ring``) in memory that both have mapped, and a bell for each.

The memory is an anonymous file of the kernel's (``memfd_create``), which the sender makes, seals against changes of
its length, and hands over on the channel's unix socket: only a process of the same user gets it, and nothing is left
when both are gone. The socket stays, so that the end of a process is noticed as on any connection.

With it goes the sender's arena (``mycel.runtime.arena``), where it has one, which the receiver maps to read from.

A bell is an eventfd, which ``poll`` waits for beside sockets and control connections. A byte on the socket would do,
but the kernel takes that for a sign that who sends is about to sleep, and puts both ranks on one processor.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import select
import socket
import time
from array import array
from collections.abc import Callable, Sequence

import numpy as np

from mycel.errors import CollectiveTimeoutError, CommunicationError, PeerLostError
from mycel.runtime.arena import Mapping, mapping_of
from mycel.runtime.ring import DATA, MAPPED, REVOKED

__all__ = ["Ring", "checked_length", "handed_over", "sealed_memory"]

_log = logging.getLogger(__name__)

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
#: What the sender says with the memory, or where it has none to give.
_HERE, _NONE = b"M", b"-"
#: The memory, the bell of the receiver, and that of the sender; an arena may follow.
_HANDED_OVER = 3
_SHORTEST, _LONGEST = 1 << 12, 1 << 26
_LOOK_S = 0.05


class Ring:
    """One end's mapping of a ring.

    Args:
        descriptor: of its memory; may be closed afterwards.
        num_bytes: of the memory.
        bell: wakes the other end.
        own_bell: wakes this one, and nobody else; -1 for the sender, whom one bell wakes for all its rings.

    Attributes:
        address: of the memory.
        capacity: bytes that may be under way, a power of two.
        bell, own_bell: as given; closed with the ring.
        arena: where the sender's arena is mapped, and its bytes, of a ring that comes in; else zeros.
    """

    def __init__(self, descriptor: int, num_bytes: int, bell: int, own_bell: int = -1) -> None:
        self._memory = np.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=np.uint8)
        self.address: int = self._memory.ctypes.data
        self.capacity = num_bytes - DATA
        self.bell, self.own_bell = bell, own_bell
        self.arena = (0, 0)
        self._mapping: Mapping | None = None
        self._words = self._memory.view(np.int64)

    @classmethod
    def offer(cls, sock: socket.socket, capacity: int, bell: int, shared: int = -1) -> Ring | None:
        """Make a ring and hand it to the peer, which calls ``accept``; ``None`` where the kernel gives no memory.

        The sender's part, which waits for nobody.

        Args:
            sock: the channel's unix socket.
            capacity: bytes, a power of two; 0: the channel is to be no ring.
            bell: wakes this rank.
            shared: descriptor of this process's arena; -1: it has none.

        Raises:
            PeerLostError: the peer has gone.
        """
        ring, descriptor = None, -1
        try:
            if capacity:
                descriptor = sealed_memory(DATA + capacity)
                ring = cls(descriptor, DATA + capacity, os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        except OSError as error:  # no such call in this sandbox, no memory or descriptor left: the socket does
            _log.debug("no memory can be shared: %s", error)
        try:
            more = (shared,) if shared >= 0 else ()
            _send(sock, _HERE if ring else _NONE, (descriptor, ring.bell, bell, *more) if ring else ())
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return ring

    @classmethod
    def accept(cls, sock: socket.socket, deadline: float, observe: Callable[[], None]) -> Ring | None:
        """Take what the peer offers; ``None`` where it has nothing.

        Args:
            sock: the channel's unix socket, non-blocking.
            deadline: until when to wait (``time.monotonic``).
            observe: called several times a second meanwhile; what it raises ends the wait.

        Raises:
            CollectiveTimeoutError: nothing was offered in time.
            PeerLostError: the peer has gone.
            CommunicationError: what it offers is no ring, or cannot be mapped.
        """
        said, descriptors = _receive(sock, deadline, observe)
        if said == _NONE and not descriptors:
            return None
        try:
            if said != _HERE or len(descriptors) not in (_HANDED_OVER, _HANDED_OVER + 1):
                raise PeerLostError("a channel's peer went while it was opened")
            own_bell, bell = descriptors[1:_HANDED_OVER]
            ring = cls(descriptors[0], checked_length(descriptors[0]), bell, own_bell)
            del descriptors[1:_HANDED_OVER]
            if len(descriptors) > 1:
                ring._map_arena(descriptors[1])
            return ring
        except (OSError, ValueError) as error:
            raise CommunicationError(f"the memory of a channel cannot be mapped: {error}") from None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _map_arena(self, descriptor: int) -> None:
        """Map the sender's arena, if that can be done, and say so."""
        try:
            self._mapping = mapping_of(descriptor)
        except (OSError, ValueError) as error:  # a limit of addresses: bytes come through the ring, as they do else
            _log.debug("the memory that a peer shares cannot be mapped: %s", error)
            return
        self.arena = (self._mapping.address, self._mapping.num_bytes)
        self._words[MAPPED // 8] = 1

    def revoke(self) -> None:
        """The sender's: what was told by reference, and not taken yet, is not to be used any more."""
        self._words[REVOKED // 8] = 1

    def close(self) -> None:
        """Let go of the bells; the memory goes with the object, which nobody may be at any more."""
        for bell in (self.bell, self.own_bell):
            if bell >= 0:
                os.close(bell)
        self.bell = self.own_bell = -1


def _send(sock: socket.socket, said: bytes, descriptors: Sequence[int]) -> None:
    try:
        socket.send_fds(sock, [said], list(descriptors))
    except OSError as error:
        raise PeerLostError(f"a channel's peer went while it was opened: {error.strerror or error}") from None


def _receive(sock: socket.socket, deadline: float, observe: Callable[[], None]) -> tuple[bytes, list[int]]:
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    while not poller.poll(1000 * max(0.0, min(_LOOK_S, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            raise CollectiveTimeoutError("a channel's peer has not said in time how it is to be used")
        observe()
    try:
        return handed_over(sock, _HANDED_OVER + 1)
    except OSError:
        return b"", []


def handed_over(sock: socket.socket, most: int) -> tuple[bytes, list[int]]:
    """One byte of a unix socket's, and the descriptors that came with it, closed where another program begins.

    ``socket.recv_fds`` would take the flag for that, but does not hand it on.

    Args:
        sock: connected and non-blocking.
        most: descriptors that are taken; the kernel closes further ones.

    Raises:
        OSError: the connection has failed; ``BlockingIOError``: nothing has come yet.
    """
    descriptors = array("i")
    room = socket.CMSG_LEN(most * descriptors.itemsize)
    said, beside, _, _ = sock.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return said, descriptors.tolist()


def sealed_memory(num_bytes: int) -> int:
    """A descriptor of new memory, whose length stays what it is.

    Raises:
        OSError: the kernel gives none.
    """
    descriptor = os.memfd_create("mycel-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def checked_length(descriptor: int) -> int:
    """Length of a ring's memory.

    Raises:
        ValueError: it is none.
    """
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise ValueError("its length may change")
    num_bytes = os.fstat(descriptor).st_size
    capacity = num_bytes - DATA
    if not _SHORTEST <= capacity <= _LONGEST or capacity & (capacity - 1):
        raise ValueError(f"it has {num_bytes} bytes")
    return num_bytes
