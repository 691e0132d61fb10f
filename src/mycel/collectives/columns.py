"""A schedule's transfers as columns: what work on a million of them goes through, with no Python object for any.

A ``Schedule`` has both forms and makes either of the other when it is asked for. Synthesis of forests writes columns;
checks, levels, loads and the JSON form read them. What reads a few transfers, or describes one, reads objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mycel.compiled import compiled

if TYPE_CHECKING:
    from mycel.collectives.schedule import Transfer

__all__ = ["Columns"]

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

#: Transfers of which text is put together at a time.
_BATCH = 100_000


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
    """

    chunk: IntArray
    src: IntArray
    dst: IntArray
    reduce: BoolArray
    path: IntArray
    paths: tuple[tuple[int, ...], ...]
    after_start: IntArray
    after: IntArray

    @classmethod
    def of(cls, transfers: Sequence[Transfer]) -> Columns:
        """The columns of objects.

        Raises:
            OverflowError: a number beyond 64 bits.
        """
        paths: dict[tuple[int, ...], int] = {}
        path = [paths.setdefault(t.path, len(paths)) for t in transfers]
        return cls(
            chunk=np.array([t.chunk for t in transfers], dtype=np.int64),
            src=np.array([t.src for t in transfers], dtype=np.int64),
            dst=np.array([t.dst for t in transfers], dtype=np.int64),
            reduce=np.array([t.reduce for t in transfers], dtype=np.bool_),
            path=np.array(path, dtype=np.int64),
            paths=tuple(paths),
            after_start=starts([len(t.after) for t in transfers]),
            after=np.array([i for t in transfers for i in t.after], dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.chunk)

    def transfers(self) -> Iterator[Transfer]:
        """The objects, in order."""
        from mycel.collectives.schedule import Transfer

        after, begin = self.after.tolist(), self.after_start.tolist()
        rows = zip(
            *(column.tolist() for column in (self.chunk, self.src, self.dst, self.reduce, self.path)), strict=True
        )
        for number, (chunk, src, dst, reduce, path) in enumerate(rows):
            waits = tuple(after[begin[number] : begin[number + 1]])
            yield Transfer(chunk=chunk, src=src, dst=dst, reduce=reduce, path=self.paths[path], after=waits)

    def json_rows(self) -> Iterator[str]:
        """What ``json.dumps`` makes of the transfers in ``Schedule.to_json``, without brackets, in several pieces."""
        paths = [f"{list(path)}, " for path in self.paths]
        kinds = ('"copy"', '"reduce"')
        for low in range(0, len(self), _BATCH):
            part = slice(low, low + _BATCH)
            begin = self.after_start[low : low + _BATCH + 1].tolist()
            after = self.after[begin[0] : begin[-1]].tolist()
            rows = zip(
                *(column[part].tolist() for column in (self.chunk, self.src, self.dst, self.reduce, self.path)),
                *((stop - begin[0] for stop in side) for side in (begin[:-1], begin[1:])),
                strict=True,
            )
            text = ", ".join(
                [f"[{c}, {s}, {d}, {kinds[r]}, {paths[p]}{after[low:high]}]" for c, s, d, r, p, low, high in rows]
            )
            yield f", {text}" if low else text

    def levels(self) -> IntArray:
        """Of each transfer, how many must come before it, one after the other."""
        return _levels(self.after_start, self.after)


def starts(counts: Sequence[int] | IntArray) -> IntArray:
    """Where rows of so many entries begin in one array of all, and after them its end."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(np.asarray(counts, dtype=np.int64))])


@compiled
def _levels(after_start: IntArray, after: IntArray) -> IntArray:
    levels = np.zeros(len(after_start) - 1, dtype=np.int64)
    for t in range(len(levels)):
        for i in range(after_start[t], after_start[t + 1]):
            levels[t] = max(levels[t], 1 + levels[after[i]])
    return levels
