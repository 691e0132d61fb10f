"""Frames: what goes over a connection that carries messages between two ranks.

========== =====================================================================================
``EAGER``  a whole message: its bytes follow
``OFFER``  a message too long to be sent unasked: how long it is
``EARLY``  a long message that goes unasked: how long it is; its pieces follow
``GRANT``  (back) a receive is there for an offered or early message
``PIECE``  a part of a granted or early message, and where in it: its bytes follow; on any path's connection
``CREDIT`` (back) bytes of eager messages that found their receiver, and may be sent again
``READY``  (back) a way through other ranks has come to its end, and may be used
``TAKEN``  (back) a piece that came through other ranks is in its place: which one
``WHOLE``  (back) a message of which pieces came through other ranks is there: no copy of them is needed any more
``NOTE``   a JSON object for the other rank itself (``monitored_barrier``): its bytes follow
========== =====================================================================================
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from mycel.errors import CommunicationError

__all__ = ["AGAIN", "FRAME_BYTES", "LONGEST_NOTE", "Frame", "Kind", "pack_frame", "unpack_frame"]

_FORMAT = struct.Struct("<4sB3xqQQQ16s")
_MAGIC = b"mcl1"
FRAME_BYTES = _FORMAT.size
#: Bytes of the longest note; who announces a longer one is not one of ours.
LONGEST_NOTE = 1 << 16
#: Tag of a piece that went before, by a way that is gone.
AGAIN = 1


class Kind(IntEnum):
    """What a frame is."""

    EAGER = 0
    OFFER = 1
    GRANT = 2
    PIECE = 3
    CREDIT = 4
    NOTE = 5
    READY = 6
    TAKEN = 7
    EARLY = 8
    WHOLE = 9


_KINDS = tuple(Kind)


class Frame(NamedTuple):
    """A frame's fixed part.

    Attributes:
        kind: what it is.
        tag: of the message; of a piece, ``AGAIN`` or 0.
        number: of the message, counted by its sender for its receiver.
        length: bytes that follow.
        value: of an offer or early one, bytes of the message; of a piece, taken or not, its place; of a credit,
            bytes.
        dtype: name of the element type, at most 16 letters.
    """

    kind: Kind
    tag: int = 0
    number: int = 0
    length: int = 0
    value: int = 0
    dtype: bytes = b""


def pack_frame(frame: Frame) -> bytes:
    """``FRAME_BYTES`` bytes for the wire."""
    return _FORMAT.pack(_MAGIC, *frame)


def unpack_frame(data: bytes | bytearray | memoryview, at: int = 0) -> Frame:
    """Read a frame's fixed part.

    Raises:
        CommunicationError: it is none.

    Examples:
        >>> unpack_frame(pack_frame(Frame(Kind.OFFER, tag=3, number=1, value=8, dtype=b"int64"))).value
        8
    """
    magic, kind, tag, number, length, value, dtype = _FORMAT.unpack_from(data, at)
    if magic != _MAGIC or kind >= len(_KINDS) or (kind == Kind.NOTE and length > LONGEST_NOTE):
        raise CommunicationError("something that is no message came (corrupted stream?)")
    return Frame(_KINDS[kind], tag, number, length, value, dtype.rstrip(b"\0"))
