"""JSON objects over a socket, each behind its length: what control connections speak."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

__all__ = ["RecordSocket"]

_LENGTH = struct.Struct("<I")


class RecordSocket:
    """A socket that carries records.

    Args:
        sock: connected; this object sets its time-outs.
        longest: bytes of the longest record; who announces a longer one is not one of ours.
    """

    def __init__(self, sock: socket.socket, *, longest: int) -> None:
        self.sock = sock
        self._longest = longest
        self._buffer = bytearray()

    def send(self, record: Mapping[str, Any], timeout_s: float) -> None:
        """Raises ``OSError`` if the other end is gone or takes nothing in time."""
        payload = json.dumps(record).encode()
        self.sock.settimeout(timeout_s)
        self.sock.sendall(_LENGTH.pack(len(payload)) + payload)

    def receive(self, deadline: float) -> dict[str, Any]:
        """The next record; raises ``TimeoutError``, or what ``read`` and ``take`` raise."""
        while (record := self.take()) is None:
            self.sock.settimeout(max(0.01, deadline - time.monotonic()))
            self.read()
        return record

    def read(self) -> None:
        """Take in what has come; raises ``EOFError`` if the other end has closed, ``OSError`` if there is nothing."""
        try:
            data = self.sock.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError
        self._buffer += data

    def take(self) -> dict[str, Any] | None:
        """The next record if it is complete; raises ``EOFError`` if what has come is none."""
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > self._longest:
            raise EOFError
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        try:
            record = json.loads(self._buffer[_LENGTH.size : end])
        except ValueError:
            raise EOFError from None
        del self._buffer[:end]
        if not isinstance(record, dict):
            raise EOFError
        return record
