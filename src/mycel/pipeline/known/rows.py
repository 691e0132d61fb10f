"""What generators of known schedules share: short names for actions, and the tests of what they are asked for."""

from __future__ import annotations

from collections.abc import Iterable

from mycel.errors import UsageError
from mycel.pipeline.order import Action, Kind, Order

__all__ = ["act", "check_counts", "order_of_rows"]

#: Forwards of an order: a thousand ranks and as many micro-batches.
_MOST = 1 << 20


def act(stage: int, kind: Kind, micro_batch: int) -> Action:
    """One computation.

    Args:
        stage: whose.
        kind: which.
        micro_batch: of which.
    """
    return Action(stage=stage, kind=kind, micro_batch=micro_batch)


def check_counts(name: str, num_ranks: int, num_micro_batches: int, chunks: int, *, only: int | None = None) -> None:
    """Refuses counts that make no sense.

    Args:
        name: of the schedule.
        num_ranks: that were asked for.
        num_micro_batches: that were asked for.
        chunks: that were asked for.
        only: the one count of chunks that the schedule knows, if there is just one.

    Raises:
        UsageError: a count below 1, other chunks, or more actions than anybody needs.
    """
    for what, count in (("ranks", num_ranks), ("micro-batches", num_micro_batches), ("chunks", chunks)):
        if count < 1:
            raise UsageError(f"{name} with {count} {what}: expected at least 1")
    if num_ranks * chunks * num_micro_batches > _MOST:
        raise UsageError(
            f"{name} over {num_ranks} ranks with {chunks} chunks and {num_micro_batches} micro-batches: at most "
            f"{_MOST} forwards are written down, such as {max(1, _MOST // (num_ranks * chunks))} micro-batches"
        )
    if only is not None and chunks != only:
        raise UsageError(f"{name} has {only} {'chunk' if only == 1 else 'chunks'} a rank, not {chunks}")


def order_of_rows(
    name: str,
    rows: Iterable[Iterable[Action]],
    *,
    num_stages: int,
    num_micro_batches: int,
    routes: tuple[tuple[int, ...], ...] | None = None,
) -> Order:
    """The order of rows given as anything that can be gone through.

    Args:
        name: of the schedule.
        rows: one a rank.
        num_stages: of the model; replicas count.
        num_micro_batches: of the batch.
        routes: of the micro-batches, where not all visit all stages.
    """
    return Order(
        rows=tuple(map(tuple, rows)),
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        name=name,
        routes=routes,
    )
