"""ZB-H2: as ZB-H1 with nearly twice the memory, so that no rank idles between its own first start and last end."""

from __future__ import annotations

from collections.abc import Iterator

from mycel.pipeline.known.rows import act, check_counts, order_of_rows
from mycel.pipeline.order import Action, Kind, Order

__all__ = ["zb_h2"]


def zb_h2(num_ranks: int, num_micro_batches: int, chunks: int = 1) -> Order:
    """Rank r begins with 2(p-r)-1 forwards; its n-th weight gradient comes 2r turns after its n-th input gradient.

    Span bubble (p-1)(F+I-2W), which is 0 at F = I = W, for m >= 2p-1. By makespan nothing is won over ZB-H1 then:
    the last rank cannot start before (p-1)F, and its own span is the work. No rank holds more than 2p-1
    micro-batches, all of them in full until their weight gradient.

    Args:
        num_ranks: p, one stage each.
        num_micro_batches: m.
        chunks: 1.

    Raises:
        UsageError: counts below 1, or several chunks.

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 2.3.

    Examples:
        >>> print(zb_h2(2, 3).to_csv(), end="")
        0F0,0F1,0F2,0I0,0W0,0I1,0W1,0I2,0W2
        1F0,1I0,1F1,1I1,1F2,1I2,1W0,1W1,1W2
    """
    check_counts("ZB-H2", num_ranks, num_micro_batches, chunks, only=1)

    def row(stage: int) -> Iterator[Action]:
        ahead, behind = min(2 * (num_ranks - 1 - stage), num_micro_batches), 2 * stage
        for turn in range(-ahead, num_micro_batches + behind):
            if turn + ahead < num_micro_batches:
                yield act(stage, Kind.FORWARD, turn + ahead)
            if 0 <= turn < num_micro_batches:
                yield act(stage, Kind.INPUT, turn)
            if turn - behind >= 0:
                yield act(stage, Kind.WEIGHT, turn - behind)

    return order_of_rows(
        "ZB-H2", map(row, range(num_ranks)), num_stages=num_ranks, num_micro_batches=num_micro_batches
    )
