"""ZB-V: two chunks a rank in a V, weight gradients right behind input gradients until the cool-down."""

from __future__ import annotations

from collections.abc import Iterator

from mycel.pipeline.known.rows import act, check_counts, order_of_rows
from mycel.pipeline.order import Action, Kind, Order

__all__ = ["zb_v"]


def zb_v(num_ranks: int, num_micro_batches: int, chunks: int = 2) -> Order:
    """Rank r holds stages r and 2p-1-r: what it passed down comes back to it, and the last stage is on rank 0.

    At F = I = W no rank idles between its first start and its last end (span bubble 0), and the makespan is
    (p-1)F/2 above the work, for m >= 2p-1. No rank holds more than p micro-batches.

    Args:
        num_ranks: p.
        num_micro_batches: m; the order for fewer than 2p-1 is that for 2p-1 with the rest left out.
        chunks: 2.

    Raises:
        UsageError: counts below 1, or other chunks.

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 6.

    Examples:
        >>> print(zb_v(2, 1).to_csv(), end="")
        0F0,3F0,3I0,3W0,0I0,0W0
        1F0,2F0,2I0,2W0,1I0,1W0
    """
    check_counts("ZB-V", num_ranks, num_micro_batches, chunks, only=2)
    rows = (
        (a for a in _row(r, num_ranks, num_micro_batches) if (a.micro_batch or 0) < num_micro_batches)
        for r in range(num_ranks)
    )
    return order_of_rows("ZB-V", rows, num_stages=2 * num_ranks, num_micro_batches=num_micro_batches)


def _row(rank: int, num_ranks: int, num_micro_batches: int) -> Iterator[Action]:
    total = max(2 * num_ranks - 1, num_micro_batches)
    down, up = rank, 2 * num_ranks - 1 - rank
    done = dict.fromkeys(((stage, kind) for stage in (down, up) for kind in Kind), 0)

    def following(stage: int, kind: Kind) -> Action:
        done[stage, kind] += 1
        return act(stage, kind, done[stage, kind] - 1)

    for _ in range(2 * (num_ranks - rank) - 1):
        yield following(down, Kind.FORWARD)
    for _ in range(rank):
        yield following(up, Kind.FORWARD)
        yield following(down, Kind.FORWARD)
    for _ in range(num_ranks - rank):
        for kind in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT):
            yield following(up, kind)
    while done[up, Kind.FORWARD] < total:
        if done[down, Kind.FORWARD] < total:
            yield following(down, Kind.FORWARD)
        yield following(down, Kind.INPUT)
        yield following(down, Kind.WEIGHT)
        for kind in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT):
            yield following(up, kind)
    # From here on there are no forwards: weight gradients are kept back, so that input gradients come sooner.
    for _ in range(rank):
        yield following(down, Kind.INPUT)
        yield following(up, Kind.INPUT)
    for _ in range(num_ranks - rank):
        yield following(down, Kind.INPUT)
        yield following(down, Kind.WEIGHT)
    for stage in (up, down):
        while done[stage, Kind.WEIGHT] < total:
            yield following(stage, Kind.WEIGHT)
