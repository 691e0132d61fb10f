"""ZB-H1: 1F1B whose weight gradients wait, so that they fill the cool-down; no more memory than 1F1B."""

from __future__ import annotations

from collections.abc import Iterator

from mycel.pipeline.known.rounds import Rounds
from mycel.pipeline.known.rows import act, check_counts, order_of_rows
from mycel.pipeline.order import Action, Kind, Order

__all__ = ["zb_h1"]


def zb_h1(num_ranks: int, num_micro_batches: int, chunks: int = 1) -> Order:
    """The backward in two halves: the input gradient at once, the weight gradient of rank r's n-th r turns later.

    Bubble (p-1)(F+I-W)/v for m >= 2p-1 with one chunk. No rank holds more than p micro-batches, all of them in
    full until their weight gradient.

    Args:
        num_ranks: p.
        num_micro_batches: m; where there are more than p, a multiple of m // p.
        chunks: v, stages a rank; stage s is on rank s mod p.

    Raises:
        UsageError: counts below 1, or micro-batches that do not divide into rounds.

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 2.2; with several chunks as torch's
        InterleavedZeroBubble.

    Examples:
        >>> print(zb_h1(2, 2).to_csv(), end="")
        0F0,0F1,0I0,0W0,0I1,0W1
        1F0,1I0,1F1,1I1,1W0,1W1
    """
    check_counts("ZB-H1", num_ranks, num_micro_batches, chunks)
    rounds = Rounds(name="ZB-H1", num_ranks=num_ranks, num_micro_batches=num_micro_batches, chunks=chunks)

    def row(rank: int) -> Iterator[Action]:
        ahead = rounds.warm_up(rank, a_hop=1)
        for turn in range(-ahead, rounds.total + rank):
            if turn + ahead < rounds.total:
                chunk, m = rounds.forward(turn + ahead)
                yield act(chunk * num_ranks + rank, Kind.FORWARD, m)
            if 0 <= turn < rounds.total:
                chunk, m = rounds.backward(turn)
                yield act(chunk * num_ranks + rank, Kind.INPUT, m)
            if turn - rank >= 0:
                chunk, m = rounds.backward(turn - rank)
                yield act(chunk * num_ranks + rank, Kind.WEIGHT, m)

    return order_of_rows(
        "ZB-H1", map(row, range(num_ranks)), num_stages=num_ranks * chunks, num_micro_batches=num_micro_batches
    )
