"""Verifies schedules: what every rank holds in the end, in whatever order the transfers may happen.

A schedule is a partial order: only ``after`` orders transfers. The check has two halves that together cover every
order that is allowed.

1. *No conflict is left open.* At every place (rank, chunk), a read and a write, or two writes, are ordered by the
   transitive closure of ``after``. Two additions may stay unordered, since they commute. Then every allowed order
   leads to the same result, and one of them speaks for all.
2. *That one is right.* The transfers are replayed in the order of the tuple with, at every place, the number of
   times each rank's contribution is in it. Counts, not flags: a contribution added twice is seen.

Places are those of ranks and of switches that copy and add. A switch's hold nothing before, may hold anything after,
and additions start from zero there: they commute with the first of them, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mycel.collectives.schedule import Schedule
from mycel.collectives.verify.grid import draw_grid
from mycel.collectives.verify.order import Turn, find_unordered
from mycel.errors import UsageError, VerificationError

__all__ = ["describe_counts", "verify_link_loads", "verify_schedule"]

#: Counts stop here: mutual additions double them at every step, and any count above 1 is equally wrong.
_MANY = np.int64(1) << 30

_READ, _ADD, _WRITE = "reads", "adds to", "overwrites"


def verify_schedule(schedule: Schedule) -> None:
    """Return if the schedule carries out its collective in every order that it allows; raise otherwise.

    Costs a vector addition of ``num_ranks`` integers a transfer, and a bitset a transfer over the transfers of
    its chunk (over those of several chunks, where ``after`` ties chunks together).

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
    members: list[list[int]] = [[] for _ in schedule.chunks]
    for index, transfer in enumerate(schedule.transfers):
        members[transfer.chunk].append(index)
    # Chunks of a block mostly stand together: one block's counts are enough to keep.
    initial: tuple[int, npt.NDArray[np.int64]] | None = None
    for chunk, indices in enumerate(members):
        block = schedule.block_of(chunk)
        if initial is None or initial[0] != block:
            initial = block, _initial_counts(schedule, block)
        _replay(schedule, chunk, indices, initial[1].copy())
    for chunks in _tied_chunks(schedule):
        _check_order(schedule, sorted(i for chunk in chunks for i in members[chunk]))


def verify_link_loads(schedule: Schedule, algbw: Fraction) -> None:
    """Return if no link carries more than its capacity while the array moves at the claimed rate.

    Args:
        schedule: whose transfers load the links.
        algbw: claimed size over time (see ``Schedule.algbw``), in the topology's unit, exact.

    Raises:
        UsageError: the claim is not positive.
        VerificationError: a link is overloaded; the message names the worst one.
    """
    if algbw <= 0:
        raise UsageError(f"algbw {algbw} must be positive")
    worst: tuple[Fraction, tuple[int, int]] | None = None
    parts = schedule.collective.num_parts
    for hop, units in schedule.link_load.items():
        needed = algbw * parts * units / schedule.num_units / schedule.topology.capacity[hop]
        if needed > 1 and (worst is None or needed > worst[0]):
            worst = (needed, hop)
    if worst:
        needed, (src, dst) = worst
        label = schedule.topology.label
        raise VerificationError(
            f"{_title(schedule)} does not reach algbw {algbw}: link {label(src)} -> {label(dst)} would carry "
            f"{needed} of its capacity ({schedule.link_load[src, dst]} of {schedule.num_units} units over capacity "
            f"{schedule.topology.capacity[src, dst]}); the schedule reaches {schedule.algbw}"
        )


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


# -- replay -----------------------------------------------------------------------------------------------


def _initial_counts(schedule: Schedule, block: int) -> npt.NDArray[np.int64]:
    n = schedule.collective.num_ranks
    counts = np.zeros((schedule.num_nodes, n), dtype=np.int64)  # switches hold nothing before
    for rank in range(n):
        for owner in schedule.collective.initial(rank, block):
            counts[rank, owner] = 1
    return counts


def _replay(schedule: Schedule, chunk: int, members: list[int], held: npt.NDArray[np.int64]) -> None:
    """Run the chunk's transfers in tuple order on count vectors ``held[rank]`` and check what is left."""
    last_write: dict[int, int] = {}
    filled = [bool(row.any()) for row in held]
    for index in members:
        t = schedule.transfers[index]
        if not filled[t.src]:
            raise _wrong(schedule, chunk, t.src, f"{_name(schedule, index)} reads it while it is empty", index)
        if t.reduce:
            if not schedule.collective.reduces:
                problem = f"{_name(schedule, index)} adds, but {schedule.collective.name} combines nothing"
                raise _wrong(schedule, chunk, t.dst, problem, index)
            if not filled[t.dst] and t.dst < schedule.collective.num_ranks:
                problem = f"{_name(schedule, index)} adds to it while it is empty"
                raise _wrong(schedule, chunk, t.dst, problem, index)
            np.minimum(held[t.dst] + held[t.src], _MANY, out=held[t.dst])
        else:
            held[t.dst] = held[t.src]
        filled[t.dst] = True
        last_write[t.dst] = index
    block = schedule.block_of(chunk)
    for rank in range(schedule.collective.num_ranks):
        required = schedule.collective.required(rank, block)
        if required is None:
            continue
        problem = describe_counts(held[rank].tolist(), required)
        if problem:
            index = last_write.get(rank, -1)
            history = "it is never written"
            if index >= 0:
                t = schedule.transfers[index]
                history = f"last write: transfer {index}, step {schedule.levels[index]}, {t.src} -> {t.dst}"
            raise _wrong(schedule, chunk, rank, f"{problem}; {history}", index)


# -- order ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """At one place, accesses that must all come after all of those before."""

    chunk: int
    rank: int
    before: tuple[int, ...]
    before_kind: str
    now: tuple[int, ...]
    now_kind: str


def _tied_chunks(schedule: Schedule) -> list[list[int]]:
    """Sets of chunks such that ``after`` never leaves a set; usually each chunk alone."""
    parent = list(range(len(schedule.chunks)))

    def find(chunk: int) -> int:
        while parent[chunk] != chunk:
            parent[chunk] = parent[parent[chunk]]
            chunk = parent[chunk]
        return chunk

    for t in schedule.transfers:
        for earlier in t.after:
            other = schedule.transfers[earlier].chunk
            if other != t.chunk:
                parent[find(other)] = find(t.chunk)
    sets: dict[int, list[int]] = {}
    for chunk in range(len(schedule.chunks)):
        sets.setdefault(find(chunk), []).append(chunk)
    return list(sets.values())


def _check_order(schedule: Schedule, members: list[int]) -> None:
    """Every turn's accesses happen after all of the turn before; ``members`` is closed under ``after``.

    Adjacent turns suffice: an access two turns away is ordered through any access between.
    """
    places = list(_places(schedule, members))
    local = {index: position for position, index in enumerate(members)}
    waits = [[local[i] for i in schedule.transfers[index].after] for index in members]
    turns = [Turn(tuple(local[i] for i in place.before), tuple(local[i] for i in place.now)) for place in places]
    found = find_unordered(waits, turns)
    if found:
        position, first, second = found
        raise _conflict(schedule, places[position], members[first], members[second])


def _places(schedule: Schedule, members: list[int]) -> Iterator[_Place]:
    places: dict[tuple[int, int], list[tuple[int, str]]] = {}
    for index in members:
        t = schedule.transfers[index]
        places.setdefault((t.src, t.chunk), []).append((index, _READ))
        places.setdefault((t.dst, t.chunk), []).append((index, _ADD if t.reduce else _WRITE))
    for (rank, chunk), accesses in places.items():
        runs: list[tuple[str, list[int]]] = []
        for index, kind in accesses:
            if not runs or runs[-1][0] != kind or kind == _WRITE:
                runs.append((kind, []))
            runs[-1][1].append(index)
        for (kind_a, a), (kind_b, b) in pairwise(runs):
            yield _Place(chunk, rank, tuple(a), kind_a, tuple(b), kind_b)


def _conflict(schedule: Schedule, place: _Place, first: int, second: int) -> VerificationError:
    return _wrong(
        schedule,
        place.chunk,
        place.rank,
        f"{_name(schedule, first)} {place.before_kind} it and {_name(schedule, second)} {place.now_kind} it in no "
        f"fixed order; let transfer {second} come after {first}",
        second,
    )


# -- messages ---------------------------------------------------------------------------------------------


def _title(schedule: Schedule) -> str:
    return f"{schedule.collective.name} over {schedule.collective.num_ranks} ranks"


def _node(schedule: Schedule, node: int) -> str:
    n = schedule.collective.num_ranks
    return f"rank {node}" if node < n else f"switch {schedule.topology.label(schedule.topology.nodes[node])} ({node})"


def _name(schedule: Schedule, index: int) -> str:
    t = schedule.transfers[index]
    return f"transfer {index} (step {schedule.levels[index]}, {t.src} -> {t.dst})"


def _wrong(schedule: Schedule, chunk: int, rank: int, problem: str, index: int) -> VerificationError:
    members = [i for i, t in enumerate(schedule.transfers) if t.chunk == chunk]
    step = schedule.levels[index] if index >= 0 else -1
    return VerificationError(
        f"{_title(schedule)} is wrong at {_node(schedule, rank)}, chunk {chunk}: {problem}",
        grid=draw_grid(schedule, chunk, rank, step, members),
    )
