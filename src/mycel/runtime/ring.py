"""A channel between two ranks of a node: a ring of bytes in memory that both have mapped.

The sender writes behind ``HEAD`` and publishes it, the receiver reads behind ``TAIL`` and publishes that; both count
bytes from the first and never turn back. Messages begin at multiples of 64 bytes, so elements never straddle the end
of the ring, and sums are made straight from it.

Who finds nothing to do asks again for a while. Then it says that it sleeps (``SENDER_SLEEPS``, ``RECEIVER_SLEEPS``),
looks once more, and waits for a byte on the channel's socket, which the other side sends when it has published
something and sees the word. So one ``poll`` waits for rings, sockets and control connections alike, and the end of a
process is noticed as on any connection.

The memory is an anonymous file of the kernel's (``memfd_create``), which the sender makes, seals against changes of
its length, and hands over on the socket: only a process of the same user gets it, and nothing is left when both are
gone.
"""

from __future__ import annotations

import array
import fcntl
import logging
import mmap
import os
import select
import socket
import time
from collections.abc import Callable

import numpy as np

from mycel.errors import CollectiveTimeoutError, CommunicationError, PeerLostError

__all__ = ["DATA", "HEAD", "RECEIVER_SLEEPS", "SENDER_SLEEPS", "TAIL", "Ring"]

# Places in the ring's memory, in bytes: each word on cache lines of its own.
HEAD, TAIL, SENDER_SLEEPS, RECEIVER_SLEEPS = 0, 128, 256, 384
DATA = 512

_log = logging.getLogger(__name__)

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
#: What the sender says with the memory, or where it has none to give.
_HERE, _NONE = b"M", b"-"
_SHORTEST, _LONGEST = 1 << 12, 1 << 26
_LOOK_S = 0.05


class Ring:
    """One end's mapping of a ring.

    Args:
        descriptor: of its memory; may be closed afterwards.
        num_bytes: of the memory.

    Attributes:
        address: of the memory.
        capacity: bytes that may be under way, a power of two.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._memory = np.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=np.uint8)
        self.address: int = self._memory.ctypes.data
        self.capacity = num_bytes - DATA

    @classmethod
    def offer(cls, sock: socket.socket, capacity: int) -> Ring | None:
        """Make a ring and hand it to the peer, which calls ``accept``; ``None`` where the kernel gives no memory.

        Args:
            sock: the channel's unix socket.
            capacity: bytes, a power of two; 0: the channel is to be no ring.

        Raises:
            PeerLostError: the peer has gone.
        """
        ring, descriptor = None, -1
        try:
            if capacity:
                descriptor = os.memfd_create("mycel-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                os.ftruncate(descriptor, DATA + capacity)
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
                ring = cls(descriptor, DATA + capacity)
        except OSError as error:  # no such call in this sandbox, no memory or descriptor left: the socket does
            _log.debug("no memory can be shared: %s", error)
        try:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))] if ring else []
            sock.sendmsg([_HERE if ring else _NONE], rights)
        except OSError as error:
            raise PeerLostError(f"a channel's peer went while it was opened: {error.strerror or error}") from None
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
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        while not poller.poll(1000 * max(0.0, min(_LOOK_S, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise CollectiveTimeoutError("a channel's peer has not said in time how it is to be used")
            observe()
        try:
            said, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
        except OSError:
            said, descriptors = b"", []
        try:
            if said == _NONE and not descriptors:
                return None
            if said != _HERE or not descriptors:
                raise PeerLostError("a channel's peer went while it was opened")
            return cls(descriptors[0], _checked(descriptors[0]))
        except (OSError, ValueError) as error:
            raise CommunicationError(f"the memory of a channel cannot be mapped: {error}") from None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _checked(descriptor: int) -> int:
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
