"""Every document in a zig-zag of its own, whose parts go where least is: even causal work for packed documents.

Lengths need not divide by anything, so the parts of one document differ by some tokens; the heaviest part goes to the
rank with the least so far, longest documents first, and what one leaves uneven the next ones even out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mycel.planning.sequence.cuts import whole_ranks
from mycel.planning.sequence.layout import Layout, Segment

__all__ = ["per_document_zigzag"]


def per_document_zigzag(documents: Sequence[int], num_ranks: int) -> Layout:
    """The layout in which each rank has an early and a late part of every document.

    Args:
        documents: tokens of each.
        num_ranks: that share them.

    Raises:
        UsageError: no ranks, or a length that is none.

    Examples:
        >>> [per_document_zigzag([8, 4], 2).tokens]
        [(6, 6)]
    """
    count = whole_ranks(num_ranks)
    held: list[list[Segment]] = [[] for _ in range(count)]
    pairs, tokens = np.zeros(count), np.zeros(count)
    for document in sorted(range(len(documents)), key=lambda d: -documents[d]):
        parts = _parts(document, documents[document], count)
        work = [sum((s.stop * (s.stop + 1) - s.start * (s.start + 1)) // 2 for s in part) for part in parts]
        heaviest = sorted(range(count), key=lambda part: -work[part])
        # Pairs decide; where they are even tokens do.
        lightest = sorted(range(count), key=lambda rank: (pairs[rank], tokens[rank]))
        for part, rank in zip(heaviest, lightest, strict=True):
            held[rank] += [s for s in parts[part] if len(s)]
            pairs[rank] += work[part]
            tokens[rank] += sum(map(len, parts[part]))
    return Layout(documents=tuple(documents), ranks=tuple(tuple(sorted(mine)) for mine in held))


def _parts(document: int, length: int, count: int) -> list[tuple[Segment, Segment]]:
    """The zig-zag's parts; cut so that late pieces, in which a token has most pairs, are the even ones."""
    cuts = [length * part // (2 * count) for part in range(2 * count + 1)]
    last = 2 * count - 1
    return [
        (
            Segment(document=document, start=cuts[r], stop=cuts[r + 1]),
            Segment(document=document, start=cuts[last - r], stop=cuts[last - r + 1]),
        )
        for r in range(count)
    ]
