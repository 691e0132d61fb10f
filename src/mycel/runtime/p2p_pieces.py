"""Pieces of long messages as they come, on several connections, and where they belong.

A piece may come before the message that it is of was announced, on a connection that is quicker than the first one:
it is kept aside until then. One whose way was given up may come twice, the first copy even after the message: of two
copies one is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mycel.errors import CommunicationError
from mycel.runtime.p2p_connection import Connection
from mycel.runtime.p2p_frames import AGAIN, Frame
from mycel.runtime.p2p_matching import Arrival, Transfer

__all__ = ["Pieces"]

#: Bytes of a piece that is kept aside or thrown away, at most.
_MOST_ASIDE = 1 << 22

Key = tuple[int, int]


@dataclass(slots=True, eq=False)
class _Coming:
    """A long message of which not all has come.

    Attributes:
        target: the receive, or what is kept until there is one.
        view: where its bytes go.
        pieces: by place: the connection that brings it; ``None`` once it is there.
        may_repeat: whether pieces came through other ranks, so that their sender may tell them again.
    """

    target: Transfer | Arrival
    view: memoryview
    pieces: dict[int, Connection | None] = field(default_factory=dict)
    may_repeat: bool = False


class Pieces:
    """The long messages that come to one rank, by sender and number.

    Args:
        advance: told of bytes that are there of a receive, or of what is kept; whether these were the last.
        whole: told of messages, by sender and number, that are there and of which pieces may come twice.
    """

    def __init__(self, advance: Callable[[Transfer | Arrival, int], bool], whole: Callable[[int, int], None]) -> None:
        self._advance, self._whole = advance, whole
        self._coming: dict[Key, _Coming] = {}
        #: The last message that each rank has announced.
        self._announced: dict[int, int] = {}
        self._aside: dict[Key, list[tuple[int, bytearray, bool]]] = {}

    def announce(self, peer: int, number: int) -> None:
        """A message has been announced; a sender's are in their order."""
        self._announced[peer] = number

    def expect(self, peer: int, number: int, target: Transfer | Arrival, view: memoryview) -> None:
        """Pieces of a message come, or are there already.

        Raises:
            CommunicationError: one of these is none of it.
        """
        key = peer, number
        coming = self._coming[key] = _Coming(target, view)
        for place, data, may_repeat in self._aside.pop(key, ()):
            coming.may_repeat |= may_repeat
            self._put(key, coming, place, data)

    def begin(self, connection: Connection, frame: Frame) -> memoryview:
        """Where a piece goes.

        Raises:
            CommunicationError: nowhere.
        """
        key = connection.peer, frame.number
        coming, is_again = self._coming.get(key), frame.tag == AGAIN
        if coming is not None and frame.value + frame.length <= len(coming.view):
            other = coming.pieces.get(frame.value)
            if frame.value not in coming.pieces or (is_again and other is not None):
                if other is not None:
                    other.divert()
                coming.pieces[frame.value] = connection
                return coming.view[frame.value : frame.value + frame.length]
        is_early = coming is None and frame.number > self._announced.get(connection.peer, -1)
        if frame.length > _MOST_ASIDE or not (is_early or is_again or connection.is_relayed):
            raise CommunicationError("a part of a message came that nobody has asked for (corrupted stream?)")
        data = bytearray(frame.length)
        if is_early:
            connection.aside = data
        else:
            connection.is_spare = True
        return memoryview(data)

    def end(self, connection: Connection, frame: Frame) -> None:
        """A piece is there.

        Raises:
            CommunicationError: it is none of its message.
        """
        key = connection.peer, frame.number
        data, connection.aside = connection.aside, None
        is_spare, connection.is_spare = connection.is_spare, False
        coming = self._coming.get(key)
        if is_spare:
            return
        may_repeat = connection.is_relayed or frame.tag == AGAIN
        if coming is not None:
            coming.may_repeat |= may_repeat
        if data is None and coming is not None:
            coming.pieces[frame.value] = None
            self._count(key, coming, frame.length)
        elif data is not None and coming is not None:  # it has been announced meanwhile
            self._put(key, coming, frame.value, data)
        elif data is not None and frame.number > self._announced.get(connection.peer, -1):
            self._aside.setdefault(key, []).append((frame.value, data, may_repeat))

    def _put(self, key: Key, coming: _Coming, place: int, data: bytearray) -> None:
        if place + len(data) > len(coming.view):
            raise CommunicationError("a part of a message came that is none of it (corrupted stream?)")
        if place not in coming.pieces:
            coming.view[place : place + len(data)] = data
            coming.pieces[place] = None
            self._count(key, coming, len(data))

    def _count(self, key: Key, coming: _Coming, num_bytes: int) -> None:
        if self._advance(coming.target, num_bytes):
            self._coming.pop(key, None)
            if coming.may_repeat:
                self._whole(*key)
