"""All tokens cut into twice as many runs as ranks; rank r has runs r and 2 W - 1 - r: even causal work for one
document.

References:
    Zhu et al., "ring-flash-attention" (zig-zag); Brandon et al., "Striped Attention", arXiv 2311.09431 (the
    imbalance).
"""

from __future__ import annotations

from collections.abc import Sequence

from mycel.planning.sequence.cuts import laid_out, whole_ranks
from mycel.planning.sequence.layout import Layout

__all__ = ["zigzag"]


def zigzag(documents: Sequence[int], num_ranks: int) -> Layout:
    """The layout of an early and a late run for each rank.

    Args:
        documents: tokens of each.
        num_ranks: that share them.

    Raises:
        UsageError: no ranks, or a length that is none.

    Examples:
        >>> zigzag([8], 2).positions(0).tolist()
        [0, 1, 6, 7]
    """
    count = whole_ranks(num_ranks)
    total = sum(documents)
    cuts = [total * part // (2 * count) for part in range(2 * count + 1)]
    last = 2 * count - 1
    return laid_out(documents, [[(cuts[r], cuts[r + 1]), (cuts[last - r], cuts[last - r + 1])] for r in range(count)])
