"""Chimera: two 1F1B pipelines in opposite directions that fit into each other's gaps."""

from __future__ import annotations

from mycel.errors import UsageError
from mycel.pipeline.known.dualpipe import both_directions
from mycel.pipeline.known.rows import act, check_counts, order_of_rows
from mycel.pipeline.order import Action, Kind, Order

__all__ = ["chimera"]


def chimera(num_ranks: int, num_micro_batches: int, chunks: int = 1) -> Order:
    """Units of p micro-batches, half of them down the ranks and half up, one unit after the other.

    Stages 0..p-1 lead down, stage s on rank s; stages p..2p-1 are the same model again and lead up, stage p+s on
    rank p-1-s. The first half of all micro-batches takes the former. Whoever carries it out adds the gradients of
    stages s and p+s.

    Within a unit, at F = B = 1, forward k of stage s starts at s + 2k and its backward at 2p-1-s + 2k. As p is even
    the directions fall on slots of different parity, or a unit's half apart, so no two meet; the next unit starts
    2p later, which is its work.

    Bubble (p-2)F for F = B, and (p-2) max(F, B) for one unit. Rank r holds p/2+1 micro-batches at the ends to p in
    the middle, and parameters twice.

    Args:
        num_ranks: p, even.
        num_micro_batches: m, a multiple of p.
        chunks: 1; each direction has one.

    Raises:
        UsageError: an odd number of ranks, micro-batches that are no whole units, or several chunks.

    References:
        Li, Hoefler, Chimera, SC 2021, section 3.1; several units, section 3.5 (direct concatenation).
    """
    check_counts("Chimera", num_ranks, num_micro_batches, chunks, only=1)
    if num_ranks % 2 or num_micro_batches % num_ranks:
        raise UsageError(
            f"Chimera over {num_ranks} ranks with {num_micro_batches} micro-batches: expected an even number of "
            "ranks and a multiple of it of micro-batches"
        )
    rows = []
    for rank in range(num_ranks):
        slots: list[tuple[int, Action]] = []
        for m in range(num_micro_batches // 2):
            unit, k = divmod(m, num_ranks // 2)
            for side, place in enumerate((rank, num_ranks - 1 - rank)):
                stage, number = side * num_ranks + place, side * (num_micro_batches // 2) + m
                start = 2 * (k + unit * num_ranks)
                slots.append((start + place, act(stage, Kind.FORWARD, number)))
                slots.append((start + 2 * num_ranks - 1 - place, act(stage, Kind.BACKWARD, number)))
        rows.append([action for _, action in sorted(slots, key=lambda slot: slot[0])])
    return order_of_rows(
        "Chimera",
        rows,
        num_stages=2 * num_ranks,
        num_micro_batches=num_micro_batches,
        routes=both_directions(num_ranks, num_micro_batches),
    )
