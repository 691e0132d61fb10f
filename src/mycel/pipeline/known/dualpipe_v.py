"""DualPipeV: a V of two chunks a rank whose forwards and backwards overlap in pairs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from mycel.errors import UsageError
from mycel.pipeline.known.rows import act, check_counts, order_of_rows
from mycel.pipeline.order import NO_STAGE, Action, Kind, Order

__all__ = ["dualpipe_v", "folded_row"]


def dualpipe_v(num_ranks: int, num_micro_batches: int, chunks: int = 2) -> Order:
    """Rank r holds stages r and 2p-1-r; in the steady state each forward overlaps a backward of the other stage.

    Bubble (p-1)(F&B + B - 3W)/2, where F&B is the time of a forward and a backward that overlap, for I <= F: that
    of DualPipe on twice the ranks, with half a rank's share a stage. Where nothing overlaps, as torch does it,
    it is (p-1)F/2 at F = I = W. No rank holds more than p + 1/2 micro-batches.

    Args:
        num_ranks: p.
        num_micro_batches: m, at least 2p.
        chunks: 2.

    Raises:
        UsageError: counts below 1, fewer micro-batches than stages, or other chunks.

    References:
        DeepSeek-AI, DualPipe (README and code), 2025; as torch's DualPipeV.

    Examples:
        >>> print(dualpipe_v(1, 2).to_csv(), end="")
        0F0,1F0,0F1,1B0,(1F1;0B0)OVERLAP_F_B,1B1,0I1,0W1
    """
    check_counts("DualPipeV", num_ranks, num_micro_batches, chunks, only=2)
    num_stages = 2 * num_ranks
    if num_micro_batches < num_stages:
        raise UsageError(
            f"DualPipeV over {num_ranks} ranks with {num_micro_batches} micro-batches: expected at least as many as "
            f"stages, which are {num_stages}"
        )
    rows = (
        folded_row(
            place=rank,
            fold=num_ranks,
            stages=(rank, num_stages - 1 - rank),
            first=(0, 0),
            num_micro_batches=num_micro_batches,
        )
        for rank in range(num_ranks)
    )
    return order_of_rows("DualPipeV", rows, num_stages=num_stages, num_micro_batches=num_micro_batches)


def folded_row(
    *, place: int, fold: int, stages: tuple[int, int], first: tuple[int, int], num_micro_batches: int
) -> Iterator[Action]:
    """The row of one rank of a folded pipeline, whose two stages see different ends of it.

    Args:
        place: of the rank, from the ends of the pipeline (0) to the fold.
        fold: ranks from the ends to the fold.
        stages: the one near the pipeline's beginning, and the one near its end.
        first: number of the first micro-batch of each.
        num_micro_batches: that each treats.
    """
    to_fold = fold - place - 1
    done = {(side, kind): first[side] for side in (0, 1) for kind in Kind}
    kept: deque[Action] = deque()

    def following(side: int, kind: Kind) -> Action:
        counted = Kind.INPUT if kind is Kind.BACKWARD else kind
        made = act(stages[side], kind, done[side, counted])
        done[side, counted] += 1
        if kind is Kind.INPUT:
            kept.append(act(stages[side], Kind.WEIGHT, done[side, counted] - 1))
        return made

    def pair(forward: int, backward: int) -> Action:
        parts = following(forward, Kind.FORWARD), following(backward, Kind.BACKWARD)
        return Action(stage=NO_STAGE, kind=Kind.OVERLAP, parts=parts)

    for _ in range(2 * to_fold):
        yield following(0, Kind.FORWARD)
    for _ in range(place + 1):
        yield following(0, Kind.FORWARD)
        yield following(1, Kind.FORWARD)
    for _ in range(to_fold):
        yield following(1, Kind.INPUT)
        yield kept.popleft()
        yield following(1, Kind.FORWARD)
    for turn in range(num_micro_batches - 2 * fold + place + 1):
        if turn == 0 and to_fold == 0:
            # At the fold these two are not overlapped: the backward is what the other ranks wait for.
            yield following(0, Kind.FORWARD)
            yield following(1, Kind.BACKWARD)
        else:
            yield pair(0, 1)
        yield pair(1, 0)
    for _ in range(to_fold):
        yield following(1, Kind.BACKWARD)
        yield pair(1, 0)
    # Of the last backwards, the second half are split: their weight gradients fill what would be idle at the end.
    for turn in range(2 * (place + 1)):
        yield following(1 - turn % 2, Kind.BACKWARD if turn <= place else Kind.INPUT)
    for _ in range(to_fold):
        yield kept.popleft()
        yield following(0, Kind.INPUT)
    yield from kept
