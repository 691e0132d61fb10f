"""DualPipe: micro-batches enter from both ends; every rank holds a stage of each direction, so parameters twice."""

from __future__ import annotations

from mycel.errors import UsageError
from mycel.pipeline.known.dualpipe_v import folded_row
from mycel.pipeline.known.rows import check_counts, order_of_rows
from mycel.pipeline.order import Order

__all__ = ["both_directions", "dualpipe"]


def dualpipe(num_ranks: int, num_micro_batches: int, chunks: int = 1) -> Order:
    """Half of the micro-batches go down the ranks and half up; forwards overlap backwards of the other direction.

    Stages 0..p-1 lead down, stage s on rank s; stages p..2p-1 are the same model again and lead up, stage p+s on
    rank p-1-s. The first half of the micro-batches takes the former and the second half the latter. Whoever carries
    it out adds the gradients of stage s and p+s.

    Bubble (p/2-1)(F&B + B - 3W), where F&B is the time of a forward and a backward that overlap, for I <= F; where
    nothing overlaps, F&B in turn as torch does it, it is (p/2-1)F at F = I = W. No rank holds more than p+1
    micro-batches' activations of its stages.

    Args:
        num_ranks: p, even.
        num_micro_batches: m, even, at least 2p.
        chunks: 1; each direction has one.

    Raises:
        UsageError: odd counts, too few micro-batches, or several chunks.

    References:
        DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 3.2.1; DualPipe (README and code), 2025.
    """
    check_counts("DualPipe", num_ranks, num_micro_batches, chunks, only=1)
    if num_ranks % 2 or num_micro_batches % 2 or num_micro_batches < 2 * num_ranks:
        raise UsageError(
            f"DualPipe over {num_ranks} ranks with {num_micro_batches} micro-batches: expected even counts, and at "
            "least twice as many micro-batches as ranks"
        )
    half, rows = num_micro_batches // 2, []
    for rank in range(num_ranks):
        down, up = rank, 2 * num_ranks - 1 - rank
        is_near_start = rank < num_ranks // 2
        rows.append(
            folded_row(
                place=min(rank, num_ranks - 1 - rank),
                fold=num_ranks // 2,
                stages=(down, up) if is_near_start else (up, down),
                first=(0, half) if is_near_start else (half, 0),
                num_micro_batches=half,
            )
        )
    return order_of_rows(
        "DualPipe",
        rows,
        num_stages=2 * num_ranks,
        num_micro_batches=num_micro_batches,
        routes=both_directions(num_ranks, num_micro_batches),
    )


def both_directions(num_ranks: int, num_micro_batches: int) -> tuple[tuple[int, ...], ...]:
    """Routes: the first half of the micro-batches over the stages that lead down, the second over those up.

    Args:
        num_ranks: p.
        num_micro_batches: m, even.
    """
    down, up = tuple(range(num_ranks)), tuple(range(num_ranks, 2 * num_ranks))
    return (down,) * (num_micro_batches // 2) + (up,) * (num_micro_batches // 2)
