"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from mycel.pipeline.known.rows import act, check_counts, order_of_rows
from mycel.pipeline.order import Kind, Order

__all__ = ["gpipe"]


def gpipe(num_ranks: int, num_micro_batches: int, chunks: int = 1) -> Order:
    """Forwards of all micro-batches, then their backwards, both in index order.

    Bubble (p-1)(F+B); every rank holds the activations of all m micro-batches.

    Args:
        num_ranks: p, one stage each.
        num_micro_batches: m.
        chunks: 1.

    Raises:
        UsageError: counts below 1, or several chunks.

    References:
        Huang et al., GPipe, NeurIPS 2019, section 2.3.

    Examples:
        >>> print(gpipe(2, 2).to_csv(), end="")
        0F0,0F1,0B0,0B1
        1F0,1F1,1B0,1B1
    """
    check_counts("GPipe", num_ranks, num_micro_batches, chunks, only=1)
    micro_batches = range(num_micro_batches)
    rows = (
        [act(stage, kind, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in micro_batches]
        for stage in range(num_ranks)
    )
    return order_of_rows("GPipe", rows, num_stages=num_ranks, num_micro_batches=num_micro_batches)
