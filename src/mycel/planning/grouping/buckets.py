"""Lengths rounded up to few different ones, with the least rounding: models of hundreds of sequences become small.

A plan for lengths that were rounded up is one for the real ones, and takes no longer.

References:
    Y. Wang et al., "FlexSP", ASPLOS 2025, section 4.1.3 (buckets by dynamic programming, O(K^2 Q)).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mycel.errors import UsageError

__all__ = ["buckets"]


def buckets(lengths: Sequence[int], num_buckets: int) -> tuple[int, ...]:
    """Each length rounded up to one of so many, the sum of what is added being least.

    Args:
        lengths: tokens of each sequence.
        num_buckets: different lengths afterwards, at most.

    Raises:
        UsageError: no bucket is allowed, or there are no lengths.

    Examples:
        >>> buckets([10, 11, 90, 100, 101], 2)
        (11, 11, 101, 101, 101)
    """
    if num_buckets < 1 or not lengths:
        raise UsageError(f"{num_buckets} buckets for {len(lengths)} lengths: at least one of each")
    values, inverse, counts = np.unique(np.array(lengths, dtype=np.int64), return_inverse=True, return_counts=True)
    if len(values) <= num_buckets:
        return tuple(lengths)
    seen = np.concatenate([[0], np.cumsum(counts)]).astype(float)
    summed = np.concatenate([[0], np.cumsum(counts * values)]).astype(float)
    num = len(values)
    best = np.full(num + 1, np.inf)
    best[0] = 0.0
    came = []
    for _ in range(num_buckets):
        after, source = np.full(num + 1, np.inf), np.zeros(num + 1, dtype=int)
        for end in range(1, num + 1):
            added = values[end - 1] * (seen[end] - seen[:end]) - (summed[end] - summed[:end]) + best[:end]
            source[end] = int(np.argmin(added))
            after[end] = added[source[end]]
        best = after
        came.append(source)
    rounded = np.zeros(num, dtype=np.int64)
    end = num
    for source in reversed(came):
        begin = int(source[end])
        rounded[begin:end] = values[end - 1]
        end = begin
        if end == 0:
            break
    return tuple(rounded[inverse].tolist())
