"""Looped BFS: all micro-batches through a rank's first chunk, then all through its second, and back."""

from __future__ import annotations

from mycel.pipeline.known.rows import act, check_counts, order_of_rows
from mycel.pipeline.order import Kind, Order

__all__ = ["looped_bfs"]


def looped_bfs(num_ranks: int, num_micro_batches: int, chunks: int = 2) -> Order:
    """Breadth first: a chunk treats all micro-batches before the next chunk begins; backwards in reverse.

    Bubble (p-1)(F+B)/v for m >= p; every rank holds the activations of all m micro-batches.

    Args:
        num_ranks: p.
        num_micro_batches: m.
        chunks: v, stages a rank; stage s is on rank s mod p.

    Raises:
        UsageError: counts below 1.

    References:
        Lamy-Poirier, Breadth-First Pipeline Parallelism, MLSys 2023, section 4.1.

    Examples:
        >>> print(looped_bfs(2, 2).to_csv(), end="")
        0F0,0F1,2F0,2F1,2B1,2B0,0B1,0B0
        1F0,1F1,3F0,3F1,3B1,3B0,1B1,1B0
    """
    check_counts("looped BFS", num_ranks, num_micro_batches, chunks)
    micro_batches, num_stages = range(num_micro_batches), num_ranks * chunks
    rows = []
    for rank in range(num_ranks):
        stages = range(rank, num_stages, num_ranks)
        row = [act(stage, Kind.FORWARD, m) for stage in stages for m in micro_batches]
        row += [act(stage, Kind.BACKWARD, m) for stage in reversed(stages) for m in reversed(micro_batches)]
        rows.append(row)
    return order_of_rows("looped BFS", rows, num_stages=num_stages, num_micro_batches=num_micro_batches)
