"""What merged flight records say: time by collective and by rank, late ranks, slow links, and what never ended.

One collective has three parts on each rank. *Queued*: called, but an earlier one of the group is still under way,
or its program is being made, as at the first call of a size.
*Waiting*: begun, but some rank has not begun yet. *Moving*: from the last rank's beginning to this rank's end. What
is moved while a rank is awaited counts as waiting, so the figure beside the bound is of the part in which nobody was
awaited. Where so much had gone ahead that this part is shorter than the bound, it is of the time since the first rank
began. What is above 1 even so says nothing of a schedule (links let some bytes through at once, clocks agree only so
far) and is left out.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from mycel.brief import brief
from mycel.collectives.bound import bound
from mycel.collectives.spec import Collective, CollectiveName
from mycel.errors import MycelError
from mycel.report.flight.clocks import Clocks, align
from mycel.report.flight.records import Call, Dump, Group

__all__ = ["Findings", "Kind", "MatchedCall", "RankTime", "Side", "Unfinished", "examine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One rank's part of a collective, in seconds since the first call of all."""

    call: Call
    called_s: float
    started_s: float | None
    ended_s: float | None


@dataclass(frozen=True, kw_only=True)
class MatchedCall:
    """One collective with the sides of all ranks that have it written down.

    Attributes:
        sides: by rank of the whole job.
        present: ranks of the group whose dump is at hand.
        missing: ranks of the group whose dump is at hand and has nothing of it, though it reaches back far enough.
    """

    group: Group
    sequence: int
    sides: dict[int, Side]
    present: tuple[int, ...]
    missing: tuple[int, ...]

    @property
    def call(self) -> Call:
        """The first rank's side; size and kind are the same on all of them."""
        return next(iter(self.sides.values())).call

    @cached_property
    def is_whole(self) -> bool:
        """Whether every rank of the group whose dump is at hand has written down that it is over."""
        return len(self.sides) == len(self.present) and all(s.call.state == "done" for s in self.sides.values())

    @cached_property
    def last(self) -> int:
        """The rank that began last; where all ranks have told of it."""
        return max(self.sides, key=lambda rank: self.sides[rank].started_s or 0.0)

    @cached_property
    def ready_s(self) -> float:
        """When the last rank began."""
        return self.sides[self.last].started_s or 0.0

    def parts_s(self, rank: int) -> tuple[float, float, float]:
        """Seconds that a rank was queued, waited and moved bytes; where all ranks have told of it."""
        side = self.sides[rank]
        start, end = cast(float, side.started_s), cast(float, side.ended_s)
        turn = min(max(self.ready_s, start), end)
        return max(0.0, start - side.called_s), turn - start, end - turn

    @cached_property
    def moving_s(self) -> float:
        """From the last rank's beginning to the last rank's end."""
        return max(cast(float, side.ended_s) for side in self.sides.values()) - self.ready_s

    @cached_property
    def lateness_s(self) -> float:
        """How long the others had waited, on average, when the last one to begin was called."""
        called = self.sides[self.last].called_s
        others = [cast(float, side.started_s) for rank, side in self.sides.items() if rank != self.last]
        return statistics.fmean(max(0.0, called - start) for start in others) if others else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """All collectives of one kind and size in groups of one size, by one schedule. Seconds are of an average rank."""

    what: str
    num_ranks: int
    num_bytes: int
    dtype: str
    method: str
    piece_bytes: int
    count: int
    queued_s: float
    waiting_s: float
    moving_s: float
    median_moving_s: float
    of_bound: float | None

    __repr__ = brief

    @property
    def total_s(self) -> float:
        """Everything together."""
        return self.queued_s + self.waiting_s + self.moving_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTime:
    """Where one rank's time went.

    Attributes:
        window_s: from its first call to its last end.
        inside_s: of it, with at least one collective under way.
        waiting_s, moving_s: sums over its collectives; those of several groups may overlap.
        late: how many times it was the last to begin, because it was called last.
        awaited_s: how long others waited for it then, on average over them; in all.
    """

    rank: int
    host: str
    collectives: int
    window_s: float
    inside_s: float
    waiting_s: float
    moving_s: float
    late: int
    awaited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """A collective that did not end everywhere: the first one of its group.

    Attributes:
        states: by rank: ``done``, ``running``, ``queued``, or ``not called``.
        stalled: channels with messages left, as ``(src, dst, messages done, messages, seen by)`` in ranks of the
            job; those that came least far first.
    """

    group: Group
    call: Call
    states: dict[int, str]
    stalled: tuple[tuple[int, int, int, int, int], ...]

    __repr__ = brief


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Everything that a report of flight records says.

    Attributes:
        silent: ranks whose dump is not at hand.
        skipped: collectives that not every rank has, because rings reach back differently far.
    """

    dumps: tuple[Dump, ...]
    clocks: Clocks
    matched: tuple[MatchedCall, ...]
    kinds: tuple[Kind, ...]
    ranks: tuple[RankTime, ...]
    unfinished: tuple[Unfinished, ...]
    silent: tuple[int, ...]
    skipped: int

    __repr__ = brief

    @cached_property
    def whole(self) -> tuple[MatchedCall, ...]:
        """Collectives that every rank at hand has written down to their end."""
        return tuple(seen for seen in self.matched if seen.is_whole)

    @cached_property
    def parts_s(self) -> tuple[float, float, float]:
        """Seconds of an average rank queued, waiting and moving."""
        return (
            sum(kind.queued_s for kind in self.kinds),
            sum(kind.waiting_s for kind in self.kinds),
            sum(kind.moving_s for kind in self.kinds),
        )

    @cached_property
    def latest(self) -> RankTime | None:
        """The rank that the others waited for longest; ``None`` where nobody was late."""
        most = max(self.ranks, key=lambda rank: rank.awaited_s, default=None)
        return most if most is not None and most.late else None


def examine(dumps: Sequence[Dump]) -> Findings:
    """Puts the dumps of a job's ranks together."""
    clocks = align(dumps)
    matched = _matched_calls(dumps, clocks)
    whole = [seen for seen in matched if seen.is_whole]
    have = {dump.rank for dump in dumps}
    unfinished = _unfinished(matched)
    return Findings(
        dumps=tuple(dumps),
        clocks=clocks,
        matched=tuple(matched),
        kinds=_kinds(whole),
        ranks=tuple(_rank_time(dump, matched, clocks) for dump in dumps),
        unfinished=unfinished,
        silent=tuple(rank for rank in range(dumps[0].world_size) if rank not in have),
        skipped=sum(all(s.call.state == "done" for s in m.sides.values()) for m in matched) - len(whole),
    )


def _matched_calls(dumps: Sequence[Dump], clocks: Clocks) -> list[MatchedCall]:
    shifted = {dump.rank: clocks.shift_ns[dump.rank] for dump in dumps}
    base = min((c.called_ns + shifted[d.rank] for d in dumps for c in d.calls), default=0)

    def seconds(rank: int, time_ns: int | None) -> float | None:
        return None if time_ns is None else (time_ns + shifted[rank] - base) / 1e9

    found: defaultdict[tuple[str, int, bool], dict[int, Side]] = defaultdict(dict)
    groups: dict[str, Group] = {}
    oldest: dict[tuple[str, int], int] = {}
    for dump in dumps:
        groups = {**dump.groups, **groups}
        for call in dump.calls:
            found[call.key][dump.rank] = Side(
                call=call,
                called_s=cast(float, seconds(dump.rank, call.called_ns)),
                started_s=seconds(dump.rank, call.started_ns),
                ended_s=seconds(dump.rank, call.ended_ns),
            )
            key = (call.group, dump.rank)
            oldest[key] = min(oldest.get(key, call.sequence), call.sequence)
    # A rank's ring is whole from its start where nothing was dropped: then what is not in it was never called.
    complete = {dump.rank for dump in dumps if dump.recorded == len(dump.calls)}
    matched = []
    for (identity, sequence, _), sides in found.items():
        group = groups[identity]
        present = tuple(rank for rank in group.ranks if rank in shifted)
        missing = tuple(
            rank
            for rank in present
            if rank not in sides and (rank in complete or oldest.get((identity, rank), sequence) < sequence)
        )
        matched.append(MatchedCall(group=group, sequence=sequence, sides=sides, present=present, missing=missing))
    return sorted(matched, key=lambda seen: min(side.called_s for side in seen.sides.values()))


# -- where time went ----------------------------------------------------------------------------------------------


def _kinds(whole: Sequence[MatchedCall]) -> tuple[Kind, ...]:
    alike: defaultdict[tuple[Any, ...], list[MatchedCall]] = defaultdict(list)
    for seen in whole:
        call = seen.call
        size = len(seen.group.ranks)
        alike[call.what, size, call.num_bytes, call.dtype, call.method, call.piece_bytes].append(seen)
    limits: dict[tuple[str, str, int | None], float | None] = {}
    kinds = []
    for key, matched in alike.items():
        parts = [[seen.parts_s(rank) for rank in seen.sides] for seen in matched]
        queued, waiting, moving = (
            sum(statistics.fmean(side[index] for side in sides) for sides in parts) for index in range(3)
        )
        reached = [
            part
            for seen in matched
            if (least := _least_s(seen, limits)) is not None and (part := _of_bound(seen, least)) is not None
        ]
        what, num_ranks, num_bytes, dtype, method, piece_bytes = key
        kinds.append(
            Kind(
                what=what,
                num_ranks=num_ranks,
                num_bytes=num_bytes,
                dtype=dtype,
                method=method,
                piece_bytes=piece_bytes,
                count=len(matched),
                queued_s=queued,
                waiting_s=waiting,
                moving_s=moving,
                median_moving_s=statistics.median(seen.moving_s for seen in matched),
                of_bound=statistics.median(reached) if reached else None,
            )
        )
    return tuple(sorted(kinds, key=lambda kind: -kind.total_s))


def _of_bound(seen: MatchedCall, least_s: float) -> float | None:
    """Part of the bound that a collective reached; ``None`` where its times cannot be right."""
    first_s = min(cast(float, side.started_s) for side in seen.sides.values())
    for took_s in (seen.moving_s, seen.moving_s + seen.ready_s - first_s):
        if took_s >= least_s > 0:
            return least_s / took_s
    return None


def _least_s(seen: MatchedCall, limits: dict[tuple[str, str, int | None], float | None]) -> float | None:
    """Least seconds that any schedule takes for it; ``None`` where that is unknown."""
    call, topology = seen.call, seen.group.topology
    if not (call.even and seen.group.described) or topology.bytes_per_second_per_unit is None:
        return None
    key = (call.group, call.collective, call.root)
    if key not in limits:
        name = cast(CollectiveName, call.collective)
        collective = Collective(name=name, num_ranks=len(seen.group.ranks), root=call.root)
        try:
            best = bound(topology.without_computing(), collective).algbw
        except MycelError:  # too large a fabric for this collective's bound
            limits[key] = None
        else:
            rate = best * topology.bytes_per_second_per_unit * collective.num_parts
            limits[key] = float(1 / rate)
    per_byte = limits[key]
    return None if per_byte is None else call.num_bytes * per_byte


def _rank_time(dump: Dump, matched: Sequence[MatchedCall], clocks: Clocks) -> RankTime:
    rank = dump.rank
    spans = sorted(
        (side.called_s, side.ended_s)
        for seen in matched
        if (side := seen.sides.get(rank)) is not None and side.ended_s is not None
    )
    inside, reached = 0.0, float("-inf")
    for begin, end in spans:
        inside += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    mine = [seen for seen in matched if seen.is_whole and rank in seen.sides]
    parts = [seen.parts_s(rank) for seen in mine]
    late = [m.lateness_s for m in mine if m.last == rank and m.lateness_s > clocks.uncertainty_s]
    return RankTime(
        rank=rank,
        host=dump.host,
        collectives=len(spans),
        window_s=reached - spans[0][0] if spans else 0.0,
        inside_s=inside,
        waiting_s=sum(part[1] for part in parts),
        moving_s=sum(part[2] for part in parts),
        late=len(late),
        awaited_s=sum(late),
    )


# -- what did not end ---------------------------------------------------------------------------------------------


def _unfinished(matched: Sequence[MatchedCall]) -> tuple[Unfinished, ...]:
    first: dict[str, MatchedCall] = {}
    for seen in matched:
        open_here = seen.missing or any(side.call.state != "done" for side in seen.sides.values())
        known = first.get(seen.group.identity)
        if open_here and (known is None or seen.sequence < known.sequence):
            first[seen.group.identity] = seen
    return tuple(_open(seen) for seen in first.values())


def _open(seen: MatchedCall) -> Unfinished:
    states = {rank: side.call.state for rank, side in seen.sides.items()}
    states |= dict.fromkeys(seen.missing, "not called")
    stalled = []
    for rank, side in sorted(seen.sides.items()):
        call = side.call
        if call.messages_done is None:
            continue
        for (src, dst), done, every in zip(
            call.program.channels, call.messages_done, call.program.num_messages, strict=True
        ):
            if done < every:
                stalled.append((seen.group.ranks[src], seen.group.ranks[dst], done, every, rank))
    stalled.sort(key=lambda channel: channel[2] / channel[3])
    return Unfinished(group=seen.group, call=seen.call, states=dict(sorted(states.items())), stalled=tuple(stalled))
