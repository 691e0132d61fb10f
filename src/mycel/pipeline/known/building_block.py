"""Schedules of two chunks a rank in a V, made of one building block that repeats every six units of time.

A block says when one micro-batch goes down the ranks and up again, forward and back: a rank passes it on after a
number of units that differs for the four ways, the *hops*. The shorter the hops, the sooner a rank gives memory back
and the longer the first and last micro-batches take: hops trade memory for bubble. Repeated every six units, the six
operations of a rank (forward, input gradient, weight gradient of both chunks) must fall on different slots, for which
the micro-batch may wait where it turns.
"""

from __future__ import annotations

from collections import deque
from itertools import product

from mycel.pipeline.known.rows import act
from mycel.pipeline.order import Action, Kind

__all__ = ["repeated"]

#: Units of work of a micro-batch on a rank: the period of a steady state without idle time.
_PERIOD = 6
_Hops = tuple[int, int, int, int]


def repeated(num_ranks: int, num_micro_batches: int, hops: _Hops, limit: int) -> list[list[Action]]:
    """The rows of a block repeated for each micro-batch, weight gradients wherever a rank would idle.

    Forwards and input gradients keep the sequence that the block gives them. A forward waits while the rank holds
    as much as it may; a weight gradient is done where nothing else can be.

    Args:
        num_ranks: p; rank r holds stages r and 2p-1-r.
        num_micro_batches: m.
        hops: from rank to rank down, up, and, of gradients, down and up again.
        limit: activations of single stages that a rank may hold.
    """
    micro_batches = range(num_micro_batches)
    waiting = []
    for rank, starts in enumerate(_block(num_ranks, hops)):
        down, up = rank, 2 * num_ranks - 1 - rank
        ways = ((down, Kind.FORWARD), (up, Kind.FORWARD), (up, Kind.INPUT), (down, Kind.INPUT))
        slots = [
            (start + _PERIOD * m, act(*way, m))
            for m in micro_batches
            for start, way in zip(starts, ways, strict=True)
        ]
        waiting.append(deque(action for _, action in sorted(slots, key=lambda slot: slot[0])))
    return _squeezed(waiting, 2 * num_ranks - 1, limit)


def _block(num_ranks: int, hops: _Hops) -> list[tuple[int, int, int, int]]:
    """When each rank does its two forwards and two input gradients: the least waits that let no two meet."""
    last = num_ranks - 1
    for waits in product(range(_PERIOD), repeat=3):
        turn = last * hops[0] + 1 + waits[0]
        top = turn + last * hops[1] + 1 + waits[1]
        end = top + last * hops[2] + 1 + waits[2]
        starts = [
            (r * hops[0], turn + (last - r) * hops[1], top + r * hops[2], end + (last - r) * hops[3])
            for r in range(num_ranks)
        ]
        if all(len({start % _PERIOD for start in row}) == 4 for row in starts):
            return starts
    raise AssertionError(f"hops {hops} leave no slots for {num_ranks} ranks")


def _squeezed(waiting: list[deque[Action]], last_stage: int, limit: int) -> list[list[Action]]:
    """Rows in which every rank does, unit by unit, the next of its sequence if it can, else a weight gradient."""
    rows: list[list[Action]] = [[] for _ in waiting]
    weights: list[deque[Action]] = [deque() for _ in waiting]
    held = [0] * len(rows)
    done: set[tuple[int, Kind, int | None]] = set()

    def is_ready(rank: int, action: Action) -> bool:
        stage, m = action.stage, action.micro_batch
        if action.kind is Kind.FORWARD:
            return held[rank] < limit and (stage == 0 or (stage - 1, Kind.FORWARD, m) in done)
        return (stage, Kind.FORWARD, m) in done and (stage == last_stage or (stage + 1, Kind.INPUT, m) in done)

    while any(waiting) or any(weights):
        now: list[tuple[int, Action]] = []
        for rank, (sequence, kept) in enumerate(zip(waiting, weights, strict=True)):
            if sequence and is_ready(rank, sequence[0]):
                now.append((rank, sequence.popleft()))
            elif kept:
                now.append((rank, kept.popleft()))
        for rank, action in now:
            rows[rank].append(action)
            done.add((action.stage, action.kind, action.micro_batch))
            if action.kind is Kind.INPUT:
                weights[rank].append(act(action.stage, Kind.WEIGHT, action.micro_batch or 0))
            held[rank] += {Kind.FORWARD: 1, Kind.WEIGHT: -1}.get(action.kind, 0)
    return rows
