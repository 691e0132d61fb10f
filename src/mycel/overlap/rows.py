"""Which rows of an array are whose, and in which tile they travel: whole numbers, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from mycel.errors import UsageError

__all__ = ["BlockTile", "SpanTile", "block_tiles", "cut", "span_tiles"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTile:
    """A tile of an array whose ranks have a block of consecutive rows each: some rows of every block.

    Attributes:
        starts: first row of the tile in each rank's block, counted in the whole array.
        counts: how many rows of each block.
        most: the largest of ``counts``: what a rank sends, padded where it has fewer.
    """

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    most: int

    @property
    def is_even(self) -> bool:
        """Whether nothing needs padding."""
        return min(self.counts) == self.most


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanTile:
    """A tile of an array that all ranks get in whole: consecutive rows, of which each rank finishes some.

    Attributes:
        start, stop: rows of the array.
        each: rows that a rank finishes; the last ranks have fewer where they do not go round.
    """

    start: int
    stop: int
    each: int

    def own(self, rank: int) -> tuple[int, int]:
        """Rows of the array that a rank finishes, from and to."""
        begin = min(self.stop, self.start + rank * self.each)
        return begin, min(self.stop, begin + self.each)


def cut(length: int, parts: int) -> list[int]:
    """Lengths of consecutive parts, as equal as they can be, the longer ones first.

    Examples:
        >>> cut(7, 3), cut(2, 3)
        ([3, 2, 2], [1, 1, 0])
    """
    whole, longer = divmod(length, parts)
    return [whole + 1] * longer + [whole] * (parts - longer)


def block_tiles(rows: Sequence[int], tiles: int) -> tuple[BlockTile, ...]:
    """Tiles of blocks: part ``t`` of every rank's block. Tiles without rows are left out.

    Args:
        rows: of each rank's block.
        tiles: how many at most, at least one.

    Raises:
        UsageError: a negative number of rows, or no tile.

    Examples:
        >>> [tile.counts for tile in block_tiles((4, 3), 2)]
        [(2, 2), (2, 1)]
        >>> block_tiles((4, 3), 2)[1].starts
        (2, 6)
    """
    _check(tiles, *rows)
    parts = [cut(count, tiles) for count in rows]
    begins = [list(accumulate(lengths, initial=first)) for lengths, first in zip(parts, _offsets(rows), strict=True)]
    made = (
        BlockTile(
            starts=tuple(begin[t] for begin in begins),
            counts=(counts := tuple(lengths[t] for lengths in parts)),
            most=max(counts),
        )
        for t in range(tiles)
    )
    return tuple(tile for tile in made if tile.most)


def span_tiles(num_rows: int, num_ranks: int, tiles: int) -> tuple[SpanTile, ...]:
    """Tiles of consecutive rows; all but the last have as many rows for each rank.

    Args:
        num_rows: of the array.
        num_ranks: that share a tile's rows.
        tiles: how many at most, at least one.

    Raises:
        UsageError: a negative number of rows, or no tile.

    Examples:
        >>> [(tile.start, tile.stop, tile.each) for tile in span_tiles(11, 2, 2)]
        [(0, 6, 3), (6, 11, 3)]
        >>> span_tiles(11, 2, 2)[1].own(1)
        (9, 11)
    """
    _check(tiles, num_rows)
    made, start = [], 0
    for each in cut(-(-num_rows // num_ranks), tiles):
        stop = min(num_rows, start + each * num_ranks)
        if stop > start:
            made.append(SpanTile(start=start, stop=stop, each=each))
        start = stop
    return tuple(made)


def _offsets(rows: Sequence[int]) -> list[int]:
    return list(accumulate(rows, initial=0))[:-1]


def _check(tiles: int, *rows: int) -> None:
    if tiles < 1:
        raise UsageError(f"{tiles} tiles: one, which is everything at once, is the least")
    if any(count < 0 for count in rows):
        raise UsageError(f"{rows} rows: a rank has none or more")
