"""1F1B: one forward, one backward, in turn."""

from __future__ import annotations

from collections.abc import Iterator

from mycel.pipeline.known.rows import act, check_counts, order_of_rows
from mycel.pipeline.order import Action, Kind, Order

__all__ = ["one_f_one_b"]


def one_f_one_b(num_ranks: int, num_micro_batches: int, chunks: int = 1) -> Order:
    """Rank r begins with p-1-r forwards, then takes one forward and one backward in turn.

    Bubble (p-1)(F+B) as of GPipe; rank r holds at most min(p-r, m) micro-batches.

    Args:
        num_ranks: p, one stage each.
        num_micro_batches: m.
        chunks: 1; ``interleaved`` has several.

    Raises:
        UsageError: counts below 1, or several chunks.

    References:
        Narayanan et al., PipeDream, SOSP 2019, section 3.2; with a flush: Memory-Efficient Pipeline-Parallel DNN
        Training, ICML 2021, section 3.2.

    Examples:
        >>> print(one_f_one_b(2, 3).to_csv(), end="")
        0F0,0F1,0B0,0F2,0B1,0B2
        1F0,1B0,1F1,1B1,1F2,1B2
    """
    check_counts("1F1B", num_ranks, num_micro_batches, chunks, only=1)

    def row(stage: int) -> Iterator[Action]:
        ahead = min(num_ranks - 1 - stage, num_micro_batches)
        for m in range(ahead):
            yield act(stage, Kind.FORWARD, m)
        for m in range(num_micro_batches):
            if m + ahead < num_micro_batches:
                yield act(stage, Kind.FORWARD, m + ahead)
            yield act(stage, Kind.BACKWARD, m)

    return order_of_rows(
        "1F1B", map(row, range(num_ranks)), num_stages=num_ranks, num_micro_batches=num_micro_batches
    )
