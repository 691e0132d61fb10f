"""The first bytes on every connection: who connects, for which group, and what the connection is for."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from mycel.errors import CommunicationError

__all__ = ["HELLO_BYTES", "MOST_LINES", "TOKEN_BYTES", "Hello", "message_digest", "path_digest"]

TOKEN_BYTES = 16
_FORMAT = struct.Struct("<8s16sII16s16x")
_MAGIC = b"mycel\x00\x00\x01"
HELLO_BYTES = _FORMAT.size
#: Connections for messages from one rank to another, at most.
MOST_LINES = 8


def path_digest(path: tuple[int, ...], epoch: int = 0) -> bytes:
    """Sixteen bytes that stand for a physical path, and for how often its group has got new channels."""
    return hashlib.sha256(f"{epoch}:{','.join(map(str, path))}".encode()).digest()[:16]


def message_digest(number: int) -> bytes:
    """Sixteen bytes, in a path's place, that stand for a connection for messages between two ranks."""
    return hashlib.sha256(f"messages {number}".encode()).digest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What a connecting rank says.

    Attributes:
        token: the group's secret, from the store; keeps strangers and other groups out.
        src: rank that connects.
        control: whether this is the pair's control connection rather than a data channel.
        path: digest of the physical path of a data channel, or of the connection for messages; zeros for control.
    """

    token: bytes
    src: int
    control: bool
    path: bytes = bytes(16)

    def pack(self) -> bytes:
        """``HELLO_BYTES`` bytes for the wire."""
        return _FORMAT.pack(_MAGIC, self.token, self.src, int(self.control), self.path)

    @classmethod
    def unpack(cls, data: bytes) -> Hello:
        """Read ``HELLO_BYTES`` bytes.

        Raises:
            CommunicationError: they are not a hello of this version.
        """
        magic, token, src, control, path = _FORMAT.unpack(data)
        if magic != _MAGIC:
            raise CommunicationError("a connection did not begin with mycel's greeting (another program or version?)")
        return cls(token=token, src=src, control=bool(control), path=path)
