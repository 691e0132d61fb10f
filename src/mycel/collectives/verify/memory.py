"""Memory of ranks as segments of symbolic contents.

A content says whose contributions an element holds, how often, and *from which element* of the whole array: a
block that lands one element off is as wrong as one that never lands. Within a segment, position ``p`` holds
contributions of array element ``p + shift``; moving data changes the shift only, so contents are few and are
interned.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mycel.collectives.verify.order import Turn

__all__ = ["EMPTY", "Content", "Contents", "Memory", "Piece"]

#: The content of memory that nothing meaningful was written to.
EMPTY = 0
_MANY = 1 << 30


@dataclass(frozen=True, slots=True)
class Content:
    """Contributions in an element.

    Attributes:
        terms: ``(rank, distance, count)``: how often the rank's array element ``p + shift + distance`` is in it.
            Sorted; the first distance is 0, which makes equal contents equal.
        is_final: the last reduction is done.
    """

    terms: tuple[tuple[int, int, int], ...]
    is_final: bool = False


class Piece(NamedTuple):  # a tuple, as a replay makes many thousands: a frozen dataclass takes four times as long
    """Elements ``start .. stop-1`` (of a message or a buffer) with one content and shift."""

    start: int
    stop: int
    content: int
    shift: int

    def moved(self, distance: int) -> Piece:
        """The same elements at other positions."""
        return Piece(self.start + distance, self.stop + distance, self.content, self.shift - distance)


class Contents:
    """Interns contents, so that they are compared and added by number."""

    def __init__(self) -> None:
        self._list = [Content(())]
        self._index = {self._list[EMPTY]: EMPTY}
        self._sums: dict[tuple[int, int, int], tuple[int, int]] = {}

    def __getitem__(self, number: int) -> Content:
        return self._list[number]

    def number(self, content: Content) -> int:
        """The number of a content, new or known."""
        known = self._index.setdefault(content, len(self._list))
        if known == len(self._list):
            self._list.append(content)
        return known

    def own(self, rank: int) -> int:
        """What a rank starts with: its own contribution, once."""
        return self.number(Content(((rank, 0, 1),)))

    def add(self, a: Piece, b: Piece) -> Piece:
        """Sum of two pieces over the same positions; neither may be empty or final."""
        key = (a.content, b.content, b.shift - a.shift)
        if key not in self._sums:
            counts: dict[tuple[int, int], int] = {}
            for content, base in ((a.content, 0), (b.content, key[2])):
                for rank, distance, count in self._list[content].terms:
                    place = (rank, base + distance)
                    counts[place] = min(counts.get(place, 0) + count, _MANY)
            places = sorted(counts)
            base = places[0][1]
            terms = tuple((rank, distance - base, counts[rank, distance]) for rank, distance in places)
            self._sums[key] = (self.number(Content(terms)), base)
        content, base = self._sums[key]
        return Piece(a.start, a.stop, content, a.shift + base)

    def finish(self, piece: Piece) -> Piece:
        """The piece with its reductions declared done."""
        content = self._list[piece.content]
        return Piece(piece.start, piece.stop, self.number(Content(content.terms, True)), piece.shift)


class _Segment(NamedTuple):
    content: int
    shift: int
    writer: int
    readers: tuple[int, ...]


class Memory:
    """One buffer: contents by segment, and of each segment who wrote it last and who has read it since.

    Attributes:
        name: of the buffer, for messages.
        length: in elements.
        turns: which accesses must come after which others, each with the elements it is about.
    """

    def __init__(self, name: str, length: int) -> None:
        self.name = name
        self.length = length
        self.turns: dict[Turn, tuple[int, int]] = {}
        self._starts = [0] if length else []
        self._segments = [_Segment(EMPTY, 0, -1, ())] if length else []

    def fill(self, start: int, stop: int, content: int, shift: int) -> None:
        """Initial content of some elements."""
        for k in self._cut(start, stop):
            self._segments[k] = _Segment(content, shift, -1, ())

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """What stands in ``start .. stop-1`` now, in order, neighbours with equal content joined."""
        return self._joined(self._cut(start, stop))

    def writer(self, position: int) -> int:
        """Who wrote an element last; -1 for its initial content."""
        return self._segments[bisect_right(self._starts, position) - 1].writer

    def read(self, start: int, stop: int, reader: int) -> list[Piece]:
        """What ``reader`` finds in ``start .. stop-1``; it must come after the last writer."""
        touched = self._cut(start, stop)
        for k in touched:
            old = self._segments[k]
            if old.writer >= 0:
                self._demand((old.writer,), reader, k)
            self._segments[k] = _Segment(old.content, old.shift, old.writer, (*old.readers, reader))
        return self._joined(touched)

    def write(self, pieces: list[Piece], writer: int) -> None:
        """Put gapless pieces; the writer must come after the last writer and everyone who has read since."""
        start, stop = pieces[0].start, pieces[-1].stop
        touched = self._cut(start, stop)
        for k in touched:
            old = self._segments[k]
            readers = tuple(reader for reader in old.readers if reader != writer)
            if readers:
                self._demand(readers, writer, k)
            elif old.writer >= 0:
                self._demand((old.writer,), writer, k)
        self._starts[touched.start : touched.stop] = [p.start for p in pieces]
        self._segments[touched.start : touched.stop] = [_Segment(p.content, p.shift, writer, ()) for p in pieces]

    def _demand(self, before: tuple[int, ...], now: int, k: int) -> None:
        stop = self._starts[k + 1] if k + 1 < len(self._starts) else self.length
        self.turns.setdefault(Turn(before, (now,)), (self._starts[k], stop))

    def _cut(self, start: int, stop: int) -> range:
        """Indices of the segments that make up ``start .. stop-1``, cut so that none reaches beyond."""
        for at in (start, stop):
            k = bisect_left(self._starts, at)
            if at < self.length and (k == len(self._starts) or self._starts[k] != at):
                self._starts.insert(k, at)
                self._segments.insert(k, self._segments[k - 1])
        return range(bisect_left(self._starts, start), bisect_left(self._starts, stop))

    def _joined(self, indices: range) -> list[Piece]:
        out: list[Piece] = []
        for start, stop, segment in self._spans(indices):
            if out and (out[-1].content, out[-1].shift) == (segment.content, segment.shift):
                out[-1] = Piece(out[-1].start, stop, segment.content, segment.shift)
            else:
                out.append(Piece(start, stop, segment.content, segment.shift))
        return out

    def _spans(self, indices: range) -> Iterator[tuple[int, int, _Segment]]:
        for k in indices:
            stop = self._starts[k + 1] if k + 1 < len(self._starts) else self.length
            yield self._starts[k], stop, self._segments[k]
