"""Interleaved 1F1B: several chunks a rank, one forward and one backward in turn."""

from __future__ import annotations

from collections.abc import Iterator

from mycel.pipeline.known.rounds import Rounds
from mycel.pipeline.known.rows import act, check_counts, order_of_rows
from mycel.pipeline.order import Kind, Order

__all__ = ["interleaved", "interleaved_cells"]


def interleaved(num_ranks: int, num_micro_batches: int, chunks: int = 2) -> Order:
    """Micro-batches in rounds of about p, each round through all chunks of a rank before the next one.

    Bubble (p-1)(F+B)/v for m a multiple of p. Rank 0 holds p + (p-1)/v micro-batches at most, rank r 2r/v less.

    Args:
        num_ranks: p.
        num_micro_batches: m; where there are more than p, a multiple of m // p.
        chunks: v, stages a rank; stage s is on rank s mod p.

    Raises:
        UsageError: counts below 1, or micro-batches that do not divide into rounds.

    References:
        Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, SC 2021,
        section 2.2.2.

    Examples:
        >>> print(interleaved(2, 2).to_csv(), end="")
        0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1
        1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1
    """
    check_counts("interleaved 1F1B", num_ranks, num_micro_batches, chunks)
    rows = interleaved_cells(num_ranks, num_micro_batches, chunks)
    return order_of_rows(
        "interleaved 1F1B",
        (
            (act(stage, Kind.FORWARD if is_forward else Kind.BACKWARD, m) for stage, is_forward, m in row)
            for row in rows
        ),
        num_stages=num_ranks * chunks,
        num_micro_batches=num_micro_batches,
    )


def interleaved_cells(num_ranks: int, num_micro_batches: int, chunks: int) -> list[list[tuple[int, bool, int]]]:
    """The same as plain tuples, for who only counts: of every rank stage, whether it is a forward, micro-batch.

    Args:
        num_ranks: p.
        num_micro_batches: m.
        chunks: v.

    Raises:
        UsageError: micro-batches that do not divide into rounds.
    """
    rounds = Rounds(name="interleaved 1F1B", num_ranks=num_ranks, num_micro_batches=num_micro_batches, chunks=chunks)

    def row(rank: int) -> Iterator[tuple[int, bool, int]]:
        ahead = rounds.warm_up(rank, a_hop=2)
        for turn in range(-ahead, rounds.total):
            if turn + ahead < rounds.total:
                chunk, m = rounds.forward(turn + ahead)
                yield chunk * num_ranks + rank, True, m
            if turn >= 0:
                chunk, m = rounds.backward(turn)
                yield chunk * num_ranks + rank, False, m

    return [list(row(rank)) for rank in range(num_ranks)]
