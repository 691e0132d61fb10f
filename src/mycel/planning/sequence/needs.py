"""What ranks need of each other under a layout, and how much each has to do."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mycel.arguments import whole_number
from mycel.planning.sequence.layout import Layout, Segment
from mycel.planning.sequence.mask import CAUSAL, Mask

__all__ = ["Meeting", "Piece", "bytes_by_rank", "imbalance", "meetings", "predecessors", "work_by_rank"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """A segment of queries and one of keys of which some see each other.

    Attributes:
        query_rank, query: who has the queries, and its which segment.
        key_rank, key: who has the keys, and its which segment.
        pairs: that see each other.
        is_whole: whether all of them do, so that no mask is needed.
    """

    query_rank: int
    query: int
    key_rank: int
    key: int
    pairs: int
    is_whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tokens that follow each other on one rank.

    Attributes:
        rank: who has them.
        first: the first, among the rank's own tokens.
        count: how many.
        position: of the first in its document.
    """

    rank: int
    first: int
    count: int
    position: int


def meetings(layout: Layout, mask: Mask = CAUSAL) -> Iterator[Meeting]:
    """Every two segments that meet in attention.

    Args:
        layout: of the documents.
        mask: of attention.

    Examples:
        >>> from mycel.planning.sequence import contiguous
        >>> [(m.query_rank, m.key_rank, m.pairs, m.is_whole) for m in meetings(contiguous([4], 2))]
        [(0, 0, 3, False), (1, 0, 4, True), (1, 1, 3, False)]
    """
    by_document: dict[int, list[tuple[int, int, Segment]]] = {}
    for rank, mine in enumerate(layout.ranks):
        for index, segment in enumerate(mine):
            by_document.setdefault(segment.document, []).append((rank, index, segment))
    for mine_too in by_document.values():
        for rank, index, queries in mine_too:
            for key_rank, key, keys in mine_too:
                pairs = mask.pairs(queries, keys)
                if pairs:
                    yield Meeting(
                        query_rank=rank,
                        query=index,
                        key_rank=key_rank,
                        key=key,
                        pairs=pairs,
                        is_whole=pairs == len(queries) * len(keys),
                    )


def work_by_rank(layout: Layout, mask: Mask = CAUSAL) -> NDArray[np.int64]:
    """Pairs of queries and keys that each rank's queries see, int64 of shape (ranks,).

    Args:
        layout: of the documents.
        mask: of attention.
    """
    return np.array(
        [
            sum(int(mask.rows(layout.documents[s.document], s.start, s.stop).sum()) for s in mine)
            for mine in layout.ranks
        ],
        dtype=np.int64,
    )


def imbalance(layout: Layout, mask: Mask = CAUSAL) -> float:
    """The most work of a rank over the mean; 1 is even.

    Args:
        layout: of the documents.
        mask: of attention.
    """
    work = work_by_rank(layout, mask)
    return float(work.max() / work.mean()) if work.any() else 1.0


def bytes_by_rank(layout: Layout, bytes_per_token: int) -> NDArray[np.int64]:
    """What each rank holds of something that every token has, int64 of shape (ranks,).

    Args:
        layout: of the documents.
        bytes_per_token: of it.
    """
    each = whole_number(bytes_per_token, "bytes_per_token", least=0)
    return np.array(layout.tokens, dtype=np.int64) * each


def predecessors(layout: Layout, rank: int, width: int) -> tuple[tuple[Piece, ...], ...]:
    """For each segment of a rank, who has the tokens right before it; none before a document's first.

    Args:
        layout: of the documents.
        rank: whose segments.
        width: tokens that are needed: a convolution's kernel less one. Where a segment before is shorter there are
            several pieces, in order of their positions.

    Examples:
        >>> from mycel.planning.sequence import contiguous
        >>> [[(p.rank, p.first, p.count) for p in pieces] for pieces in predecessors(contiguous([6], 3), 2, 3)]
        [[(0, 1, 1), (1, 0, 2)]]
    """
    wanted = whole_number(width, "width", least=0)
    found = []
    places: dict[int, list[tuple[int, int, int, int]]] = {}
    for owner, mine in enumerate(layout.ranks):
        for segment, first in zip(mine, layout.borders(owner).tolist(), strict=False):
            if len(segment):
                places.setdefault(segment.document, []).append((segment.start, segment.stop, owner, first))
    for of_document in places.values():
        of_document.sort()
    for segment in layout.ranks[rank]:
        low = max(0, segment.start - wanted)
        pieces: list[Piece] = []
        if len(segment) and low < segment.start:
            holders = places[segment.document]
            at = bisect_right([start for start, *_ in holders], low) - 1
            while at < len(holders) and holders[at][0] < segment.start:
                start, stop, owner, first = holders[at]
                begin, end = max(start, low), min(stop, segment.start)
                pieces.append(Piece(rank=owner, first=first + begin - start, count=end - begin, position=begin))
                at += 1
        found.append(tuple(pieces))
    return tuple(found)
