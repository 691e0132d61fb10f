"""V-Min: the least memory of a V of two chunks a rank, a third of 1F1B's."""

from __future__ import annotations

from mycel.pipeline.known.building_block import repeated
from mycel.pipeline.known.rows import check_counts, order_of_rows
from mycel.pipeline.order import Order

__all__ = ["v_min"]


def v_min(num_ranks: int, num_micro_batches: int, chunks: int = 2) -> Order:
    """Every rank passes a micro-batch on as soon as it can, in all four ways, so that its memory comes back soonest.

    No rank holds more than (p+4)//3 micro-batches until their weight gradients. At F = I = W the bubble is about
    two thirds of 1F1B's: 2(p-1) - 1/2, or 2(p-1) + 1/2 where p is a multiple of 3, for m >= 2.

    Args:
        num_ranks: p; rank r holds stages r and 2p-1-r.
        num_micro_batches: m.
        chunks: 2.

    Raises:
        UsageError: counts below 1, or other chunks.

    References:
        Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024, section 3.
    """
    check_counts("V-Min", num_ranks, num_micro_batches, chunks, only=2)
    rows = repeated(num_ranks, num_micro_batches, (1, 1, 1, 1), limit=2 * ((num_ranks + 4) // 3))
    return order_of_rows("V-Min", rows, num_stages=2 * num_ranks, num_micro_batches=num_micro_batches)
