"""From runs of all tokens, documents one after the other, to segments."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from mycel.arguments import whole_number
from mycel.planning.sequence.layout import Layout, Segment

__all__ = ["laid_out", "whole_ranks"]


def whole_ranks(num_ranks: int) -> int:
    """A number of ranks.

    Args:
        num_ranks: that was given.

    Raises:
        UsageError: it is none.
    """
    return whole_number(num_ranks, "num_ranks", least=1, most=1 << 20)


def laid_out(documents: Sequence[int], runs: Sequence[Sequence[tuple[int, int]]]) -> Layout:
    """The layout whose ranks have some runs of all tokens.

    Args:
        documents: tokens of each.
        runs: of each rank its runs, first and one after the last, counted over all documents.
    """
    begins = [0, *accumulate(documents)]
    ranks = []
    for mine in runs:
        segments = []
        for start, stop in mine:
            document = max(0, bisect_right(begins, start) - 1)
            at = start
            while at < stop:
                until = min(stop, begins[document + 1])
                if until > at:
                    low = begins[document]
                    segments.append(Segment(document=document, start=at - low, stop=until - low))
                at, document = max(at, until), document + 1
        ranks.append(tuple(segments))
    return Layout(documents=tuple(documents), ranks=tuple(ranks))
