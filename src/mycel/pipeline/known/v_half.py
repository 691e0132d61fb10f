"""V-Half: half of 1F1B's memory and half of its bubble, with two chunks a rank in a V."""

from __future__ import annotations

from mycel.pipeline.known.building_block import repeated
from mycel.pipeline.known.rows import check_counts, order_of_rows
from mycel.pipeline.order import Order

__all__ = ["v_half"]


def v_half(num_ranks: int, num_micro_batches: int, chunks: int = 2) -> Order:
    """Every rank passes a micro-batch on after two units on the way down and one on the way up.

    No rank holds more than (p+2)//2 micro-batches until their weight gradients. At F = I = W the bubble is half of
    1F1B's less half a unit, (3(p-1) - 1)/2, for p > 2 and m >= p.

    Args:
        num_ranks: p; rank r holds stages r and 2p-1-r.
        num_micro_batches: m.
        chunks: 2.

    Raises:
        UsageError: counts below 1, or other chunks.

    References:
        Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024, section 3.
    """
    check_counts("V-Half", num_ranks, num_micro_batches, chunks, only=2)
    rows = repeated(num_ranks, num_micro_batches, (2, 1, 2, 1), limit=2 * ((num_ranks + 2) // 2))
    return order_of_rows("V-Half", rows, num_stages=2 * num_ranks, num_micro_batches=num_micro_batches)
