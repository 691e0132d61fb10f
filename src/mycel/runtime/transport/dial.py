"""Whether a machine answers: a new connection is tried, again and again, and dropped."""

from __future__ import annotations

import errno
import select
import socket
import time

from mycel.topology.addresses import family_of

__all__ = ["Dial"]

#: Seconds for an answer before the next attempt; the kernel alone would try again after 1, 3, 7 seconds.
_ATTEMPT_S = 0.5
#: Ways of a machine that is there to say no.
_ANSWERS = (0, errno.ECONNREFUSED, errno.ECONNRESET)


class Dial:
    """Attempts to connect to one address; the kernel at the other end answers, whatever its programs do.

    Args:
        address: where somebody listens, or listened: a refusal is an answer.
        port: likewise.
    """

    def __init__(self, address: str, port: int) -> None:
        self._place = (address, port)
        self._sock: socket.socket | None = None
        self._began = 0.0

    def is_answered(self) -> bool:
        """Whether there has been an answer since the last look; goes on trying. Never waits."""
        if self._sock is None:
            return self._begin()
        poller = select.poll()
        poller.register(self._sock, select.POLLOUT)
        if poller.poll(0):
            result = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            self.close()
            return result in _ANSWERS
        if time.monotonic() - self._began >= _ATTEMPT_S:
            self.close()
            return self._begin()
        return False

    def _begin(self) -> bool:
        try:
            self._sock = socket.socket(family_of(self._place[0]), socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            self._began = time.monotonic()
            result = self._sock.connect_ex(self._place)
        except OSError:  # no descriptor is left, or this is no address
            result = errno.EHOSTUNREACH
        if result == errno.EINPROGRESS:
            return False
        self.close()
        return result in _ANSWERS

    def close(self) -> None:
        """Give the attempt up."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
