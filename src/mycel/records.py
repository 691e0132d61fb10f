"""JSON objects over a socket, each behind its length: what control connections speak."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

__all__ = ["MalformedRecord", "RecordSocket", "packed"]

_LENGTH = struct.Struct("<I")
#: What is kept for a reader that takes nothing; what would come on top is not sent.
_MOST_UNSENT = 1 << 20


def packed(record: Mapping[str, Any], longest: int) -> bytes:
    """A record as it goes over the wire.

    Args:
        record: what JSON takes.
        longest: bytes that readers take.

    Raises:
        ValueError: it is longer.
    """
    payload = json.dumps(record, separators=(",", ":")).encode()
    if len(payload) > longest:
        raise ValueError(f"a record of {len(payload)} bytes is longer than the {longest} that readers take")
    return _LENGTH.pack(len(payload)) + payload


class MalformedRecord(ValueError):  # noqa: N818 (what came, not what failed)
    """Something came whole, behind its length, and is no JSON object. What follows it can be read."""


class RecordSocket:
    """A socket that carries records.

    Args:
        sock: connected. ``send`` and ``receive`` set its time-outs; ``post``, ``flush``, ``read`` and ``take`` leave
            them alone, for sockets that never block.
        longest: bytes of the longest record; who announces a longer one is not one of ours.
    """

    def __init__(self, sock: socket.socket, *, longest: int) -> None:
        self.sock = sock
        self._longest = longest
        self._buffer = bytearray()
        self._unsent = bytearray()

    def send(self, record: Mapping[str, Any], timeout_s: float) -> None:
        """Raises ``OSError`` if the other end is gone or takes nothing in time."""
        self.sock.settimeout(timeout_s)
        self.sock.sendall(packed(record, self._longest))

    def post(self, data: bytes) -> None:
        """Send what the socket takes of a record (``packed``) at once, keep the rest for ``flush``; never waits.

        Records go whole or not at all: where much waits already, a further one is dropped. Raises ``OSError`` if
        the other end is gone.
        """
        if len(self._unsent) < _MOST_UNSENT:
            self._unsent += data
        self.flush()

    def flush(self) -> bool:
        """Send on what is left of earlier records; whether all has gone. Raises ``OSError`` as ``post`` does."""
        while self._unsent:
            try:
                sent = self.sock.send(self._unsent, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                return False
            del self._unsent[:sent]
        return True

    @property
    def is_waiting(self) -> bool:
        """Whether something is left for ``flush``."""
        return bool(self._unsent)

    def receive(self, deadline: float) -> dict[str, Any]:
        """The next record; raises ``TimeoutError``, or ``EOFError`` if the other end closes or sends other things."""
        try:
            while (record := self.take()) is None:
                self.sock.settimeout(max(0.01, deadline - time.monotonic()))
                self.read()
        except MalformedRecord as error:
            raise EOFError(str(error)) from None
        return record

    def read(self) -> None:
        """Take in what has come; raises ``EOFError`` if the other end has closed, ``OSError`` if there is nothing."""
        try:
            data = self.sock.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError("the connection has ended")
        self._buffer += data

    def take(self) -> dict[str, Any] | None:
        """The next record if it is complete.

        Raises:
            MalformedRecord: it is none; it has been passed over.
            EOFError: a longer one is announced than any of ours; nothing that comes after can be read.
        """
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > self._longest:
            raise EOFError(f"a record of {length} bytes is announced; the longest of ours has {self._longest}")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        try:
            record = json.loads(payload)
        except (ValueError, RecursionError):
            raise MalformedRecord(f"{len(payload)} bytes that are no JSON") from None
        if not isinstance(record, dict):
            raise MalformedRecord(f"a {type(record).__name__} instead of an object")
        return record
