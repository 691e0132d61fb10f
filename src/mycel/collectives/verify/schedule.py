"""Verifies schedules: what every rank holds in the end, in whatever order the transfers may happen.

A schedule is a partial order: only ``after`` orders transfers. The check has two halves that together cover every
order that is allowed.

1. *No conflict is left open.* At every place (rank, chunk), a read and a write, or two writes, are ordered by the
   transitive closure of ``after``. Two additions may stay unordered, since they commute. Then every allowed order
   leads to the same result, and one of them speaks for all.
2. *That one is right.* The transfers are replayed in the order of the tuple with, at every place, the number of
   times each rank's contribution is in it. Counts, not flags: a contribution added twice is seen.

Places are those of ranks and of switches that copy and add. A switch's hold nothing before, may hold anything after,
and additions start from zero there: they commute with the first of them, too. Where partners add each other's sums, a
rank has several for a chunk, each checked by itself: the first addition to a further place reads the one before it,
and is a write of its own. A rank keeps the order of its additions to places that follow each other by itself, so that
order counts for what is done at the destination, though not for what is read at the source, which may happen before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mycel.arguments import the
from mycel.collectives.columns import BoolArray, Columns, IntArray
from mycel.collectives.orbit import Orbit
from mycel.collectives.schedule import Schedule
from mycel.collectives.slots import Slots
from mycel.collectives.verify.grid import draw_grid
from mycel.collectives.verify.places import (
    ADDS_TO_EMPTY,
    ADDS_TO_NOTHING,
    HOLDS_WRONG,
    READS_EMPTY,
    find_open_order,
    find_wrong_content,
)
from mycel.compiled import interpreted_while_small
from mycel.errors import VerificationError

__all__ = ["describe_counts", "verify_schedule"]

#: Bits held at once (32 MiB) while order is traced; more transfers that are tied together need several passes.
_MAX_BITS = 1 << 28


def verify_schedule(schedule: Schedule) -> None:
    """Return if the schedule carries out its collective in every order that it allows; raise otherwise.

    Costs a vector addition of ``num_ranks`` integers a reduction, and a bitset a transfer over the transfers of
    its chunk (over those of several chunks, where ``after`` ties chunks together); no object for what is right.

    Args:
        schedule: any well-formed schedule, whoever made it.

    Raises:
        VerificationError: the message names rank, chunk and transfer, and its ``grid`` draws the steps around:
            a place is read while empty; a required place holds a contribution too few, too many or a wrong one;
            two accesses to a place conflict and are not ordered; a collective that combines nothing adds.

    Examples:
        >>> from mycel.collectives.schedule import Chunk, Transfer
        >>> from mycel.collectives.spec import Collective
        >>> from mycel.topology.model import Link, Topology, Vertex
        >>> pair = Topology(name="pair", unit="link",
        ...     vertices=(Vertex(kind="rank", label="a"), Vertex(kind="rank", label="b")),
        ...     links=(Link(src=0, dst=1, capacity=1), Link(src=1, dst=0, capacity=1)))
        >>> def reduce_then_send_back(after):
        ...     return Schedule(collective=Collective(name="all_reduce", num_ranks=2), topology=pair,
        ...         method="by_hand", num_units=1, chunks=(Chunk(start=0, stop=1),),
        ...         transfers=(Transfer(chunk=0, src=0, dst=1, reduce=True, path=(0, 1)),
        ...                    Transfer(chunk=0, src=1, dst=0, reduce=False, path=(1, 0), after=after)))
        >>> verify_schedule(reduce_then_send_back(after=(0,)))
        >>> verify_schedule(reduce_then_send_back(after=()))
        Traceback (most recent call last):
        mycel.errors.VerificationError: all_reduce over 2 ranks is wrong at rank 0, chunk 0: transfer 0 (step 0, \
0 -> 1) reads it and transfer 1 (step 0, 1 -> 0) overwrites it in no fixed order; let transfer 1 come after 0
    """
    schedule = the(Schedule, schedule, "a schedule", hint="mycel.synthesize makes one")
    orbit, factor = schedule.orbit, 1
    if orbit is None:
        columns, num_chunks = schedule.columns, len(schedule.chunks)
    else:
        _require_moves(schedule, orbit)
        columns, num_chunks, factor = orbit.columns, len(orbit.stops), orbit.num_ranks
    steps = len(columns) + num_chunks * schedule.collective.num_ranks
    slots = schedule.slots
    wrong, chunk, transfer, slot, counts = interpreted_while_small(find_wrong_content, steps)(
        *_by_chunk(schedule, columns, slots, num_chunks), *_contents(schedule, num_chunks)
    )
    if wrong:
        transfer = transfer * factor if transfer >= 0 else transfer
        problem = _describe_content(schedule, wrong, chunk, transfer, slot // slots.width, counts)
        raise _wrong(schedule, chunk, slot, problem, transfer)
    steps = 4 * len(columns)
    first, second, slot = interpreted_while_small(find_open_order, steps)(
        *_tied(columns, num_chunks),
        *(columns.chunk, slots.source, slots.target, slots.base, slots.previous),
        columns.reduce,
        *(columns.after_start, columns.after),
        *(schedule.num_compute_vertices * slots.width, _MAX_BITS),
    )
    if first >= 0:
        raise _conflict(schedule, slot, first * factor, second * factor)


def describe_counts(counts: Sequence[int], required: frozenset[int]) -> str:
    """What is wrong with the contributions in a place; empty if each required one is there once, and no other.

    Examples:
        >>> describe_counts([1, 0, 2], frozenset({0, 1, 2}))
        'contribution of rank 1 is missing, contribution of rank 2 is counted twice'
        >>> describe_counts([1, 1], frozenset({0}))
        'contribution of rank 1 is there and should not be'
    """
    missing = [r for r, count in enumerate(counts) if r in required and not count]
    foreign = [r for r, count in enumerate(counts) if r not in required and count]
    parts = [f"{_whose(missing)} missing"] if missing else []
    for r, count in enumerate(counts):
        if r in required and count > 1:
            parts.append(f"{_whose([r])} counted {'twice' if count == 2 else f'{count} times'}")
    if foreign:
        parts.append(f"{_whose(foreign)} there and should not be")
    return ", ".join(parts)


def _whose(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"contribution of rank {ranks[0]} is"
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"contributions of ranks {shown} are"


# -- what is replayed and traced ----------------------------------------------------------------------------


def _require_moves(schedule: Schedule, orbit: Orbit) -> None:
    """Raise unless rank 0's part speaks for all.

    It does if the moves are a group of the fabric, one for each rank. Then move ``r`` makes of rank 0's chunks those
    of rank ``r``, and of each rank that holds, or must hold, a contribution the one that does so there: blocks are
    numbered by their ranks. Transfers of a chunk wait for others of the same chunk only, or of the same share.
    """
    if not orbit.moves.is_group_of(schedule.topology):
        raise VerificationError(
            f"{_title(schedule)} is wrong: the moves that make it of rank 0's part do not take the fabric "
            f"{schedule.topology.name} onto itself, rank 0 to each rank once"
        )


def _by_chunk(
    schedule: Schedule, columns: Columns, slots: Slots, num_chunks: int
) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray, BoolArray, bool, int, int]:
    """Transfers chunk by chunk, for ``find_wrong_content``."""
    begin = np.concatenate([[0], np.cumsum(np.bincount(columns.chunk, minlength=num_chunks))])
    members = np.argsort(columns.chunk, kind="stable")
    num_slots = schedule.num_compute_vertices * slots.width
    ends = slots.source, slots.target, slots.base, columns.reduce
    return begin, members, *ends, schedule.collective.reduces, num_slots, slots.width


def _contents(schedule: Schedule, num_chunks: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Who holds each chunk before, who must hold it after, and what, for ``find_wrong_content``."""
    collective, n = schedule.collective, schedule.collective.num_ranks
    blocks = schedule.blocks_of(num_chunks)
    if collective.name == "all_to_all":  # a million blocks of a thousand ranks: all at once
        holder, taker = np.divmod(blocks, n)
    else:
        holder, taker = (
            np.array([-1 if one is None else one for one in map(ask, range(collective.num_blocks))])[blocks]
            for ask in (collective.holder, collective.taker)
        )
    wanted = np.full(num_chunks, n, dtype=np.int64) if collective.reduces else holder
    known = np.concatenate([np.eye(n, dtype=np.int64), np.ones((1, n), dtype=np.int64)])
    return holder, taker, wanted, known


def _tied(columns: Columns, num_chunks: int) -> tuple[IntArray, IntArray]:
    """Transfers by sets of chunks such that ``after`` never leaves a set; usually each chunk alone."""
    waiting = np.repeat(columns.chunk, np.diff(columns.after_start))
    awaited = columns.chunk[columns.after]
    label = np.arange(num_chunks)  # of each chunk, the lowest chunk that it is tied to
    between = waiting != awaited
    ties = np.unique(np.stack([waiting[between], awaited[between]]), axis=1)
    while not np.array_equal(label[ties[0]], label[ties[1]]):
        for one, other in (ties, ties[::-1]):
            np.minimum.at(label, label[one], label[other])
        label = label[label]
    mine = label[columns.chunk] if ties.size else columns.chunk
    begin = np.concatenate([[0], np.cumsum(np.bincount(mine, minlength=len(label)))])
    return begin, np.argsort(mine, kind="stable")


# -- messages ---------------------------------------------------------------------------------------------


def _describe_content(schedule: Schedule, wrong: int, chunk: int, transfer: int, rank: int, counts: IntArray) -> str:
    """What ``find_wrong_content`` found, in words."""
    if wrong == HOLDS_WRONG:
        required = schedule.collective.required(rank, schedule.block_of(chunk)) or frozenset()
        history = "it is never written"
        if transfer >= 0:
            t = schedule.transfers[transfer]
            history = f"last write: transfer {transfer}, step {schedule.levels[transfer]}, {t.src} -> {t.dst}"
        return f"{describe_counts(counts.tolist(), required)}; {history}"
    problem = {
        READS_EMPTY: "reads it while it is empty",
        ADDS_TO_NOTHING: f"adds, but {schedule.collective.name} combines nothing",
        ADDS_TO_EMPTY: "adds to it while it is empty",
    }[wrong]
    return f"{_name(schedule, transfer)} {problem}"


def _conflict(schedule: Schedule, slot: int, first: int, second: int) -> VerificationError:
    targets = schedule.slots.target

    def access(number: int) -> str:
        t = schedule.transfers[number]
        whole = number if schedule.orbit is None else number // schedule.collective.num_ranks
        kind = "reads" if targets[whole] != slot else "adds to" if t.reduce else "overwrites"
        return f"{_name(schedule, number)} {kind} it"

    return _wrong(
        schedule,
        schedule.transfers[first].chunk,
        slot,
        f"{access(first)} and {access(second)} in no fixed order; let transfer {second} come after {first}",
        second,
    )


def _title(schedule: Schedule) -> str:
    return f"{schedule.collective.name} over {schedule.collective.num_ranks} ranks"


def _vertex(schedule: Schedule, vertex: int) -> str:
    n = schedule.collective.num_ranks
    return (
        f"rank {vertex}"
        if vertex < n
        else f"switch {schedule.topology.label(schedule.topology.compute_vertices[vertex])} ({vertex})"
    )


def _name(schedule: Schedule, index: int) -> str:
    t = schedule.transfers[index]
    return f"transfer {index} (step {schedule.levels[index]}, {t.src} -> {t.dst})"


def _wrong(schedule: Schedule, chunk: int, slot: int, problem: str, index: int) -> VerificationError:
    members = [i for i, t in enumerate(schedule.transfers) if t.chunk == chunk]
    step = schedule.levels[index] if index >= 0 else -1
    rank, place = divmod(slot, schedule.slots.width)
    where = f"chunk {chunk}, place {place}" if schedule.slots.width > 1 else f"chunk {chunk}"
    return VerificationError(
        f"{_title(schedule)} is wrong at {_vertex(schedule, rank)}, {where}: {problem}",
        grid=draw_grid(schedule, chunk, rank, step, members),
    )
