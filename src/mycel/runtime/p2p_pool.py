"""Pieces of long messages to one rank, of which each way takes the next when it has room: some lead through others.

How fast a way through other ranks is depends on what these send at the same moment, so nothing is shared out
beforehand. Two things keep a slow way from holding up a message:

- A way through others has few pieces *in flight*, which have not been told to have come.
- It gets another one only if that is likely to come before the direct ways would be through with all that is left.

A piece is told again where its way is gone, or brings nothing for long.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from mycel.errors import CommunicationError
from mycel.runtime.p2p_matching import Transfer

__all__ = ["RELAYED_BYTES", "Flight", "Piece", "Pool", "piece_bytes_for"]

#: Messages from this length on go through other ranks, too.
RELAYED_BYTES = 1 << 20
#: Pieces in flight on a way through others, at most: what its answers take is bridged by the others.
_MOST_FLYING = 3
#: Seconds that a piece takes on a direct way, and its bounds in bytes.
_PIECE_S = 0.005
_LEAST_PIECE, _MOST_PIECE = 1 << 16, 1 << 19
#: Seconds without any piece having come, after which a way is given up.
_STALLED_S = 1.0
#: Of the way's own rate, what a way is believed to carry at first, and at least: it is tried again.
_FIRST_RATE, _LEAST_RATE = 0.5, 0.125
#: Weight of the last piece in what is believed.
_NEWS = 0.25


def piece_bytes_for(rate: float) -> int:
    """How long pieces are, where the direct way carries so many bytes a second.

    Examples:
        >>> [piece_bytes_for(rate) >> 10 for rate in (1e6, 25e6, 50e6, 1e9)]
        [64, 128, 256, 512]
    """
    power = 1 << max(0, round(rate * _PIECE_S).bit_length() - 1)
    if rate * _PIECE_S > 1.5 * power:
        power *= 2
    return max(_LEAST_PIECE, min(_MOST_PIECE, power))


class Piece(NamedTuple):
    """A part of a message.

    Attributes:
        transfer: the message.
        begin, end: which bytes.
        is_again: it went before, by a way that is gone.
    """

    transfer: Transfer
    begin: int
    end: int
    is_again: bool


class Flight:
    """What is under way through other ranks.

    Args:
        rate: bytes a second that its slowest cable carries.
        clock: tells the time in seconds.

    Attributes:
        is_ready: its other end has said that it is there.
        flying: pieces, and since when; oldest first.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_ready = False
        self.flying: deque[tuple[Piece, float]] = deque()
        self._cable_rate = rate
        self._rate = _FIRST_RATE * rate
        self._clock = clock
        self._last = 0.0

    @property
    def num_bytes(self) -> int:
        """In flight."""
        return sum(piece.end - piece.begin for piece, _ in self.flying)

    def takes_s(self, num_bytes: int) -> float:
        """Seconds after which so many bytes more would have come."""
        return (self.num_bytes + num_bytes) / self._rate

    def begin(self, piece: Piece) -> None:
        """A piece sets out."""
        self.flying.append((piece, self._clock()))

    def taken(self, number: int, place: int) -> Piece:
        """A piece has come: the oldest.

        Raises:
            CommunicationError: it is another one.
        """
        piece, since = self.flying[0] if self.flying else (None, 0.0)
        if piece is None or (piece.transfer.number, piece.begin) != (number, place):
            raise CommunicationError("a part of a message was taken that was not sent (corrupted stream?)")
        self.flying.popleft()
        now = self._clock()
        seen = (piece.end - piece.begin) / max(1e-6, now - max(since, self._last))
        self._last = now
        believed = (1 - _NEWS) * self._rate + _NEWS * min(seen, self._cable_rate)
        self._rate = max(_LEAST_RATE * self._cable_rate, believed)
        return piece

    @property
    def is_stalled(self) -> bool:
        """Whether nothing has come for so long that the way is given up."""
        return bool(self.flying) and self._clock() - max(self.flying[0][1], self._last) > _STALLED_S


@dataclass(slots=True, eq=False)
class _Rest:
    """What nobody has taken yet of a message."""

    transfer: Transfer
    place: int


class Pool:
    """Pieces for one rank.

    Args:
        rate: bytes a second that the direct ways carry together.
        num_unsent: bytes that these hold and have not brought yet.
    """

    def __init__(self, rate: float, num_unsent: Callable[[], int]) -> None:
        self.piece_bytes = piece_bytes_for(rate)
        self._rate, self._num_unsent = rate, num_unsent
        self._rests: deque[_Rest] = deque()
        self._again: deque[Piece] = deque()

    def add(self, transfer: Transfer) -> None:
        """Have a message go out, after those before it."""
        self._rests.append(_Rest(transfer, 0))

    def fetch(self, flight: Flight | None) -> Piece | None:
        """The next piece for a way.

        Args:
            flight: of the way; ``None``: it is direct.
        """
        if not self.has_for(flight):
            return None
        if flight is None and self._again:
            return self._again.popleft()
        rest = self._rests[0]
        begin, end = rest.place, min(len(rest.transfer.view), rest.place + self.piece_bytes)
        rest.place = end
        if end == len(rest.transfer.view):
            self._rests.popleft()
        piece = Piece(rest.transfer, begin, end, is_again=False)
        if flight is not None:
            flight.begin(piece)
        return piece

    def has_for(self, flight: Flight | None) -> bool:
        """Whether a way has a piece to fetch."""
        if flight is None:
            return bool(self._again or self._rests)
        if not (self._rests and flight.is_ready and len(flight.flying) < _MOST_FLYING):
            return False
        return flight.takes_s(self.piece_bytes) <= (self._left + self._num_unsent()) / self._rate

    @property
    def _left(self) -> int:
        return sum(len(rest.transfer.view) - rest.place for rest in self._rests)

    def tell_again(self, pieces: list[Piece]) -> None:
        """Have pieces go out by a direct way whose own way is gone."""
        self._again += [piece._replace(is_again=True) for piece in pieces]

    def forget(self, transfer: Transfer) -> None:
        """Nothing more of this message is to go out."""
        self._rests = deque(rest for rest in self._rests if rest.transfer is not transfer)
        self._again = deque(piece for piece in self._again if piece.transfer is not transfer)
