"""A schedule's transfers as columns: what work on a million of them goes through, with no Python object for any.

A ``Schedule`` has both forms and makes either of the other when it is asked for. Synthesis of forests writes columns;
checks, levels, loads and the JSON form read them. What reads a few transfers, or describes one, reads objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mycel.brief import brief
from mycel.compiled import compiled

__all__ = ["Columns", "Transfer"]

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

#: Of a number that counts chunks, vertices or transfers.
_MOST_DIGITS = 19
#: Between the numbers of a transfer: of a copy, and of a reduction.
_WORDS = tuple(np.frombuffer(word, dtype=np.uint8) for word in (b', "copy", ', b', "reduce", '))


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One chunk from one rank to another.

    Attributes:
        chunk: index into the schedule's chunks.
        src: sending compute vertex: a rank, or a switch that computes.
        dst: receiving one.
        reduce: add to what ``dst`` holds instead of overwriting it.
        path: topology vertices from ``src``'s to ``dst``'s; everything between is a switch that forwards.
        after: indices of earlier transfers that must be complete before this one reads its source.
        places: which of the source's places for the chunk is read, and which of the destination's is written; see
            ``mycel.collectives.schedule``.
    """

    chunk: int
    src: int
    dst: int
    reduce: bool
    path: tuple[int, ...]
    after: tuple[int, ...] = ()
    places: tuple[int, int] = (0, 0)

    __repr__ = brief


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """Transfers in the order of the schedule; fields as in ``Transfer``.

    Attributes:
        chunk, src, dst: shape ``[num_transfers]``.
        reduce: shape ``[num_transfers]``.
        path: of each transfer, its place in ``paths``; shape ``[num_transfers]``.
        paths: different ones, each vertices from a source to a destination.
        after_start: where the transfers that each one waits for begin in ``after``; shape ``[num_transfers + 1]``.
        after: those that transfer 0 waits for, then those of transfer 1, and so on.
        places: place that each reads, and place that it writes, shape ``[num_transfers, 2]``; ``None`` where every
            vertex has one place for a chunk.
    """

    chunk: IntArray
    src: IntArray
    dst: IntArray
    reduce: BoolArray
    path: IntArray
    paths: tuple[tuple[int, ...], ...]
    after_start: IntArray
    after: IntArray
    places: IntArray | None = None

    @classmethod
    def of(cls, transfers: Sequence[Transfer]) -> Columns:
        """The columns of objects.

        Raises:
            OverflowError: a number beyond 64 bits.
        """
        paths: dict[tuple[int, ...], int] = {}
        path = [paths.setdefault(t.path, len(paths)) for t in transfers]
        places = [t.places for t in transfers]
        places = [t.places for t in transfers]
        return cls(
            chunk=np.array([t.chunk for t in transfers], dtype=np.int64),
            src=np.array([t.src for t in transfers], dtype=np.int64),
            dst=np.array([t.dst for t in transfers], dtype=np.int64),
            reduce=np.array([t.reduce for t in transfers], dtype=np.bool_),
            path=np.array(path, dtype=np.int64),
            paths=tuple(paths),
            after_start=starts([len(t.after) for t in transfers]),
            after=np.array([i for t in transfers for i in t.after], dtype=np.int64),
            places=np.array(places, dtype=np.int64) if any(map(any, places)) else None,
        )

    def __len__(self) -> int:
        return len(self.chunk)

    def transfers(self) -> Iterator[Transfer]:
        """The objects, in order."""
        after, begin = self.after.tolist(), self.after_start.tolist()
        rows = zip(
            *(column.tolist() for column in (self.chunk, self.src, self.dst, self.reduce, self.path)), strict=True
        )
        places = [(0, 0)] * len(self) if self.places is None else _pairs(self.places)
        for number, (chunk, src, dst, reduce, path) in enumerate(rows):
            waits = tuple(after[begin[number] : begin[number + 1]])
            yield Transfer(
                chunk=chunk,
                src=src,
                dst=dst,
                reduce=reduce,
                path=self.paths[path],
                after=waits,
                places=places[number],
            )

    def some(self, numbers: Sequence[int]) -> list[Transfer]:
        """The objects of some rows."""
        found = []
        places = {} if self.places is None else dict(zip(numbers, _pairs(self.places[list(numbers)]), strict=True))
        for number in numbers:
            waits = tuple(self.after[self.after_start[number] : self.after_start[number + 1]].tolist())
            found.append(
                Transfer(
                    chunk=int(self.chunk[number]),
                    src=int(self.src[number]),
                    dst=int(self.dst[number]),
                    reduce=bool(self.reduce[number]),
                    path=self.paths[self.path[number]],
                    after=waits,
                    places=places.get(number, (0, 0)),
                )
            )
        return found

    def json_rows(self) -> str:
        """What ``json.dumps`` makes of the transfers in ``Schedule.to_json``, without the outer brackets."""
        texts = [str(list(path)).encode() for path in self.paths]
        size = max((len(text) for text in texts), default=0) + 32 + 3 * _MOST_DIGITS
        room = len(self) * size + len(self.after) * (2 + _MOST_DIGITS)
        letters = np.frombuffer(b"".join(texts), dtype=np.uint8)
        columns = self.chunk, self.src, self.dst, self.reduce, self.path, self.after_start, self.after
        out = np.empty(room, dtype=np.uint8)  # of which only what is written becomes memory
        length = _write_rows(out, *columns, starts([len(text) for text in texts]), letters, *_WORDS)
        return out[:length].tobytes().decode("ascii")

    def levels(self) -> IntArray:
        """Of each transfer, how many must come before it, one after the other."""
        if self.places is not None:  # a sum is started from the one before it at the same rank
            return self.order_levels()
        return _levels(self.after_start, self.after, np.ones(len(self), dtype=np.int64))

    def order_levels(self, duration: IntArray | None = None, *, is_timed: bool = False) -> IntArray:
        """Like ``levels``, but what is added into a place also comes after what was added there before.

        Where all that moves is added up, levels are as late as the end allows: such a schedule is one that hands out,
        turned round in time. Counted from the beginning, what is wanted last could go before what is wanted first.

        Args:
            duration: of each transfer, how many steps after it what waits for it comes; 1 if not given.
            is_timed: every channel keeps the order of the transfers (``Schedule.is_timed``).
        """
        duration = np.ones(len(self), dtype=np.int64) if duration is None else duration
        if not self.reduce.any() and self.places is None and not is_timed:
            return _levels(self.after_start, self.after, duration)
        width = int(self.dst.max(initial=0)) + 1
        place = np.unique(self.chunk * width + self.dst, return_inverse=True)[1].reshape(-1).astype(np.int64)
        apart = np.arange(len(self), dtype=np.int64)
        levels = _order_levels(
            self.after_start, self.after, self.reduce, place, self.channels if is_timed else apart, duration
        )
        if self.reduce.all() and self.places is None and not is_timed:
            _delay(self.after_start, self.after, place, duration, levels)
        return levels

    @property
    def channels(self) -> IntArray:
        """Of each transfer the number of its channel, which is its path between its ends."""
        width = 1 + int(max(self.src.max(initial=0), self.dst.max(initial=0)))
        numbers: IntArray = np.unique((self.path * width + self.src) * width + self.dst, return_inverse=True)[1]
        return numbers.reshape(-1)


def _pairs(places: IntArray) -> list[tuple[int, int]]:
    return list(zip(*places.T.tolist(), strict=True))


def starts(counts: Sequence[int] | IntArray) -> IntArray:
    """Where rows of so many entries begin in one array of all, and after them its end."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(np.asarray(counts, dtype=np.int64))])


@compiled
def _levels(after_start: IntArray, after: IntArray, duration: IntArray) -> IntArray:
    levels = np.zeros(len(after_start) - 1, dtype=np.int64)
    for t in range(len(levels)):
        for i in range(after_start[t], after_start[t + 1]):
            levels[t] = max(levels[t], duration[after[i]] + levels[after[i]])
    return levels


@compiled
def _order_levels(
    after_start: IntArray, after: IntArray, reduce: BoolArray, place: IntArray, channel: IntArray, duration: IntArray
) -> IntArray:
    """As ``_levels``; ``place`` is what each transfer writes and ``channel`` what keeps its order, by number."""
    levels = np.zeros(len(after_start) - 1, dtype=np.int64)
    added = np.zeros(len(levels), dtype=np.int64)
    sent = np.zeros(len(levels), dtype=np.int64)
    for t in range(len(levels)):
        levels[t] = sent[channel[t]]
        for i in range(after_start[t], after_start[t + 1]):
            levels[t] = max(levels[t], duration[after[i]] + levels[after[i]])
        if reduce[t]:
            levels[t] = max(levels[t], added[place[t]])
            added[place[t]] = levels[t]
        sent[channel[t]] = levels[t]
    return levels


@compiled
def _delay(after_start: IntArray, after: IntArray, place: IntArray, duration: IntArray, levels: IntArray) -> None:
    """Raise levels to the latest ones at which all is over in as many steps, where all transfers add."""
    end = 0
    for t in range(len(levels)):
        end = max(end, levels[t] + duration[t])
    latest = end - duration
    following = np.full(len(levels), end)
    for back in range(len(levels)):
        t = len(levels) - 1 - back
        levels[t] = min(latest[t], following[place[t]])
        following[place[t]] = levels[t]
        for i in range(after_start[t], after_start[t + 1]):
            latest[after[i]] = min(latest[after[i]], levels[t] - duration[after[i]])


@compiled
def _write_rows(
    out: npt.NDArray[np.uint8],
    chunk: IntArray,
    src: IntArray,
    dst: IntArray,
    reduce: BoolArray,
    path: IntArray,
    after_start: IntArray,
    after: IntArray,
    letter_start: IntArray,
    letters: npt.NDArray[np.uint8],
    copies: npt.NDArray[np.uint8],
    adds: npt.NDArray[np.uint8],
) -> int:
    """Write ``[chunk, src, dst, kind, path, after]`` of each transfer, with ``, `` in between; how much that was."""
    comma, blank, opening, closing = 44, 32, 91, 93
    at = 0
    for t in range(len(chunk)):
        if t:
            out[at], out[at + 1] = comma, blank
            at += 2
        out[at] = opening
        at = _write_number(out, at + 1, chunk[t])
        for number in (src[t], dst[t]):
            out[at], out[at + 1] = comma, blank
            at = _write_number(out, at + 2, number)
        word = adds if reduce[t] else copies
        out[at : at + len(word)] = word
        at += len(word)
        text = letters[letter_start[path[t]] : letter_start[path[t] + 1]]
        out[at : at + len(text)] = text
        at += len(text)
        out[at], out[at + 1], out[at + 2] = comma, blank, opening
        at += 3
        for i in range(after_start[t], after_start[t + 1]):
            if i > after_start[t]:
                out[at], out[at + 1] = comma, blank
                at += 2
            at = _write_number(out, at, after[i])
        out[at], out[at + 1] = closing, closing
        at += 2
    return at


@compiled
def _write_number(out: npt.NDArray[np.uint8], at: int, number: int) -> int:
    """Write a number that is not negative; the place behind it."""
    stop, rest = at + 1, number // 10
    while rest:
        stop, rest = stop + 1, rest // 10
    rest = number
    for place in range(stop - 1, at - 1, -1):
        out[place] = 48 + rest % 10
        rest //= 10
    return stop
