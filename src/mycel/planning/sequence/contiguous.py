"""Documents one after the other, cut into as many runs of tokens as there are ranks."""

from __future__ import annotations

from collections.abc import Sequence

from mycel.planning.sequence.cuts import laid_out, whole_ranks
from mycel.planning.sequence.layout import Layout

__all__ = ["contiguous"]


def contiguous(documents: Sequence[int], num_ranks: int) -> Layout:
    """The layout of runs of equal numbers of tokens, up to one.

    Args:
        documents: tokens of each.
        num_ranks: that share them.

    Raises:
        UsageError: no ranks, or a length that is none.

    Examples:
        >>> [[str(s) for s in mine] for mine in contiguous([3, 2], 2).ranks]
        [['tokens 0 to 2 of document 0'], ['tokens 2 to 3 of document 0', 'tokens 0 to 2 of document 1']]
    """
    count = whole_ranks(num_ranks)
    total = sum(documents)
    cuts = [total * part // count for part in range(count + 1)]
    return laid_out(documents, [[(cuts[r], cuts[r + 1])] for r in range(count)])
