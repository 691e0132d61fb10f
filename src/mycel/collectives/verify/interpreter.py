"""The interpreter under the verifiers of programs: carries out accesses with symbolic contents.

Programs differ in who may do what when: channels that are first in, first out (``program``), thread blocks with
connections of a few slots (``blocks``), signals and semaphores (``plan``). Each verifier finds one order in which
everything can happen and numbers the *events* along it. What an event does then is the same everywhere, and done
here: it reads spans of memory, adds, and writes spans; and of every two events at one element, one of which writes,
the order must be certain.

A *value* is what a span holds, or a message carries: pieces that follow each other without gaps, from position 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mycel.collectives.verify.memory import EMPTY, Contents, Memory, Piece
from mycel.collectives.verify.order import find_unordered
from mycel.errors import VerificationError

__all__ = ["Interpreter", "Span", "Unordered", "Value", "paired", "unordered"]

Value = list[Piece]


class Span(NamedTuple):
    """``size`` elements of a memory from ``start`` on; ``memory`` may hold several buffers."""

    memory: Memory
    start: int
    size: int

    @property
    def stop(self) -> int:
        """The first element behind it."""
        return self.start + self.size

    def coincides(self, other: Span) -> bool:
        """Whether both begin at one place."""
        return self.memory is other.memory and self.start == other.start

    def overlaps(self, other: Span) -> bool:
        """Whether they share elements, but not their beginning."""
        apart = self.start - other.start
        return self.memory is other.memory and apart != 0 and -self.size < apart < other.size


@dataclass(frozen=True, slots=True)
class Unordered:
    """Two events at one place in no certain order: ``second`` came later in the replay."""

    memory: Memory
    start: int
    stop: int
    first: int
    second: int


class Interpreter:
    """One replay.

    Args:
        wrong: the error that an event is to blame for; the problem begins with a verb.
        name: a span in words, for messages.
    """

    def __init__(self, wrong: Callable[[int, str], VerificationError], name: Callable[[Span], str]) -> None:
        self.contents = Contents()
        self._wrong, self._name = wrong, name

    def read(self, span: Span, event: int) -> Value:
        """What an event finds.

        Raises:
            VerificationError: nothing was written there.
        """
        pieces = span.memory.read(span.start, span.stop, event)
        for piece in pieces:
            if piece.content == EMPTY:
                empty = Span(span.memory, piece.start, piece.stop - piece.start)
                raise self._wrong(event, f"reads {self._name(empty)}, which nothing has been written to")
        return [piece.moved(-span.start) for piece in pieces]

    def write(self, span: Span, value: Value, event: int) -> None:
        """Put a value of the span's length."""
        span.memory.write([piece.moved(span.start) for piece in value], event)

    def apart(self, spans: Iterable[Span], target: Span, event: int) -> None:
        """Refuse an event that reads what it writes, unless at the very place.

        Raises:
            VerificationError: spans overlap and do not coincide.
        """
        if any(span.overlaps(target) for span in spans):
            raise self._wrong(event, "reads and writes overlapping elements that do not coincide")

    def add(self, left: Value, right: Value) -> Value:
        """The sum, cut where either is."""
        return [self.contents.add(a, b) for a, b in paired(left, right)]


def paired(left: Value, right: Value) -> list[tuple[Piece, Piece]]:
    """Two values of one length, cut where either is."""
    cuts = sorted({piece.start for piece in left} | {piece.start for piece in right})
    out: list[tuple[Piece, Piece]] = []
    a = b = 0
    for start, stop in zip(cuts, [*cuts[1:], left[-1].stop], strict=True):
        a += left[a].stop <= start
        b += right[b].stop <= start
        one, other = (Piece(start, stop, piece.content, piece.shift) for piece in (left[a], right[b]))
        out.append((one, other))
    return out


def unordered(
    memories: Iterable[Memory],
    waits: Sequence[Sequence[int]],
    *,
    completes_after: Sequence[int] | None = None,
    begins_after: Sequence[int] | None = None,
) -> Unordered | None:
    """Two events that nothing orders at an element of a memory, one of which writes it; see ``find_unordered``."""
    turns = [(turn, memory) for memory in {id(m): m for m in memories}.values() for turn in memory.turns]
    found = find_unordered(
        waits, [turn for turn, _ in turns], completes_after=completes_after, begins_after=begins_after
    )
    if found is None:
        return None
    position, first, second = found
    turn, memory = turns[position]
    return Unordered(memory, *memory.turns[turn], first, second)
