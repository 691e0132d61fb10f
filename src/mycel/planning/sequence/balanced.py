"""Runs of tokens that take equally long: for any mask, and for ranks of unequal speed.

A token takes what its query sees, and what everything but attention takes of it. All tokens in a row are cut where
the sum reaches each rank's share, so that a rank's time is right up to half a token at either end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mycel.arguments import real_number
from mycel.errors import UsageError
from mycel.planning.sequence.cuts import laid_out, whole_ranks
from mycel.planning.sequence.layout import Layout
from mycel.planning.sequence.mask import CAUSAL, Mask

__all__ = ["balanced"]


def balanced(
    documents: Sequence[int],
    num_ranks: int,
    *,
    mask: Mask = CAUSAL,
    token_pairs: float = 0.0,
    speeds: Sequence[float] | None = None,
) -> Layout:
    """The layout of contiguous runs of equal time.

    Args:
        documents: tokens of each.
        num_ranks: that share them.
        mask: of attention.
        token_pairs: what a token takes besides attention, in pairs of a query and a key: a width's worth and more in
            real models. 0 evens out attention alone, and leaves ranks with early tokens far more of them.
        speeds: of each rank, relative to the others; equal if not given.

    Raises:
        UsageError: no ranks, speeds that are not above 0 or not one a rank.

    Examples:
        >>> balanced([100], 2).tokens, balanced([100], 2, token_pairs=1e6).tokens
        ((71, 29), (50, 50))
        >>> balanced([100], 2, token_pairs=1e6, speeds=[3, 1]).tokens
        (75, 25)
    """
    count = whole_ranks(num_ranks)
    extra = real_number(token_pairs, "token_pairs", least=0)
    shares = np.ones(count) if speeds is None else np.array([real_number(s, "speed", above=0) for s in speeds])
    if len(shares) != count:
        raise UsageError(f"{len(shares)} speeds for {count} ranks: one each")
    costs = [mask.rows(length).astype(float) + extra for length in documents]
    reached = np.concatenate([[0.0], np.cumsum(np.concatenate([*costs, np.zeros(0)]))])
    goals = np.concatenate([[0.0], np.cumsum(shares)]) / shares.sum() * reached[-1]
    after = np.searchsorted(reached, goals)
    # Of the two borders around a share's end the nearer one.
    before = np.maximum(after - 1, 0)
    after = np.minimum(after, len(reached) - 1)
    cuts = np.where(goals - reached[before] <= reached[after] - goals, before, after)
    cuts[0], cuts[-1] = 0, len(reached) - 1
    return laid_out(documents, [[(int(cuts[r]), int(cuts[r + 1]))] for r in range(count)])
