"""1F1B: one forward, one backward, in turn."""

from __future__ import annotations

from collections.abc import Iterator

from mycel.pipeline.known.rows import act, check_counts, order_of_rows
from mycel.pipeline.order import Kind, Order

__all__ = ["one_f_one_b", "one_f_one_b_cells"]


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

    rows = one_f_one_b_cells(num_ranks, num_micro_batches)
    return order_of_rows(
        "1F1B",
        (
            (act(stage, Kind.FORWARD if is_forward else Kind.BACKWARD, m) for stage, is_forward, m in row)
            for row in rows
        ),
        num_stages=num_ranks,
        num_micro_batches=num_micro_batches,
    )


def one_f_one_b_cells(num_ranks: int, num_micro_batches: int) -> list[list[tuple[int, bool, int]]]:
    """The same as plain tuples, for who only counts: of every rank stage, whether it is a forward, micro-batch.

    Args:
        num_ranks: p.
        num_micro_batches: m.
    """

    def row(stage: int) -> Iterator[tuple[int, bool, int]]:
        ahead = min(num_ranks - 1 - stage, num_micro_batches)
        for m in range(ahead):
            yield stage, True, m
        for m in range(num_micro_batches):
            if m + ahead < num_micro_batches:
                yield stage, True, m + ahead
            yield stage, False, m

    return [list(row(stage)) for stage in range(num_ranks)]
