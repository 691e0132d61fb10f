"""Steps: schedules with proven numbers of steps and rounds, for small fabrics and small arrays (SCCL).

``synthesize`` gives one schedule: the fewest steps there are and, for these, the fewest rounds a chunk, unless
options ask for others. ``front`` gives all schedules worth having, from fewest steps to most bandwidth: each has
more steps than the one before and fewer rounds a chunk. See ``steps_instance`` for what steps, rounds and chunks are.

all_reduce is a reduce_scatter and then an all_gather with equally many steps; collectives that reduce are those that
spread on the reversed fabric, backwards. Between nodes, messages take ways through switches that pass no rank, the
shortest few of each pair: what is proven holds for schedules along them.

References:
    Z. Cai, Z. Liu, S. Maleki, M. Musuvathi, T. Mytkowicz, J. Nelson, O. Saarikivi, "Synthesizing Optimal Collective
    Algorithms", PPoPP 2021, section 3.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import Literal

from mycel.brief import brief
from mycel.collectives.bound import bound
from mycel.collectives.schedule import Chunk, Schedule, Transfer
from mycel.collectives.spec import COLLECTIVES, Collective, CollectiveName, check_ranks
from mycel.collectives.synth.steps_instance import (
    TOLERANCE,
    Problem,
    Send,
    find_sends,
    least_ratio,
    problem_of,
)
from mycel.errors import SynthesisError, UsageError
from mycel.topology.model import Topology

__all__ = ["MOST_CHUNKS", "SERVES", "Front", "Point", "front", "synthesize"]

SERVES: tuple[CollectiveName, ...] = COLLECTIVES
#: Chunks a block that are tried where nobody says how many.
MOST_CHUNKS = 8
#: The same for broadcast and reduce, whose array is one block.
MOST_CHUNKS_OF_ONE = 16
#: What one attempt of several may use of the time that is left.
_SHARE_OF_TIME = 1 / 3
#: Steps beyond the fewest that a front goes.
_FURTHER_STEPS = 6

Proof = Literal["any chunks", "chunks tried", "not proven"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One schedule of the front.

    Attributes:
        steps: one after the other.
        rounds: in all steps together.
        chunks: a block; of all_reduce a rank's share.
        floor: rounds a chunk below which no schedule of so many steps goes; 0 where that is not known.
        proof: that no schedule with so many steps has fewer rounds a chunk: with any number of chunks, with the
            numbers of chunks tried, or not at all because time ran out.
    """

    steps: int
    rounds: int
    chunks: int
    floor: Fraction
    proof: Proof
    schedule: Schedule

    __repr__ = brief

    @property
    def ratio(self) -> Fraction:
        """Rounds a chunk."""
        return Fraction(self.rounds, self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """All schedules worth having, by steps.

    Attributes:
        optimum: rounds a chunk of the bandwidth bound.
        ended: why it ends: the last point meets the bound, or what stopped the search.
    """

    points: tuple[Point, ...]
    optimum: Fraction
    ended: str

    __repr__ = brief


@dataclass(slots=True, kw_only=True)
class _Search:
    """A collective as one problem, or as two that follow each other and are solved apart.

    Attributes:
        problems: one, or of all_reduce reduce_scatter's and all_gather's.
        optimum: rounds a chunk of the bandwidth bound, of all problems together.
        deadline: by ``time.monotonic``.
    """

    topology: Topology
    collective: Collective
    problems: tuple[Problem, ...]
    optimum: Fraction
    deadline: float

    @classmethod
    def of(cls, topology: Topology, collective: Collective, time_limit_s: float) -> _Search:
        n = collective.num_ranks
        check_ranks(topology, collective)
        if not 0 < time_limit_s < float("inf"):
            raise UsageError(f"steps: a time limit of {time_limit_s} s; expected more than 0")
        deadline = time.monotonic() + time_limit_s
        parts = [collective]  # all_reduce's halves are solved one by one
        if collective.name == "all_reduce":
            parts = [Collective(name=name, num_ranks=n) for name in ("reduce_scatter", "all_gather")]
        problems = tuple(problem_of(topology, part) for part in parts)
        for problem in problems:
            problem.check_size(problem.least_steps, 1)
        optimum = sum(
            Fraction(part.num_blocks * problems[0].unit) / (bound(topology, part).algbw * part.num_parts)
            for part in parts
        )
        return cls(
            topology=topology,
            collective=collective,
            problems=problems,
            optimum=Fraction(optimum),
            deadline=deadline,
        )

    @property
    def least_steps(self) -> int:
        """Below which some rank cannot be reached."""
        return len(self.problems) * max(problem.least_steps for problem in self.problems)

    def different(self) -> tuple[tuple[Problem, int], ...]:
        """The problems, each with how often it occurs: twice where the fabric is like its mirror image."""
        first, last = self.problems[0], self.problems[-1]
        if first.capacity == last.capacity and first.demands == last.demands:
            return ((first, len(self.problems)),)
        return tuple((problem, 1) for problem in self.problems)

    def floors(self, steps: int) -> list[Fraction]:
        """Rounds a chunk that each different problem cannot go below with its part of so many steps."""
        each = steps // len(self.problems)
        return [least_ratio(p, each, time_limit_s=self.left_s / 4) for p, _ in self.different()]

    def solve(
        self,
        steps: int,
        rounds: int | None,
        chunks: int,
        floors: Sequence[Fraction],
        *,
        deadline: float,
        slack: int = 1,
    ) -> tuple[int, list[tuple[Send, ...]]] | Literal["none", "late"]:
        """The fewest rounds, up to ``rounds``, with so many steps and chunks, and the messages of each problem.

        With ``slack`` 2 or more it begins with so many times the least, and what it gives may not be the fewest.
        """
        each = steps // len(self.problems)
        if any(each < problem.least_steps for problem in self.problems):
            return "none"
        least = [slack * max(each, ceil(chunks * floor - Fraction(TOLERANCE))) for floor in floors]
        found: list[tuple[Send, ...]] = []
        for place, (problem, times) in enumerate(self.different()):
            while True:
                total = sum(few * often for few, (_, often) in zip(least, self.different(), strict=True))
                if rounds is not None and total > rounds:
                    return "none"
                sends = find_sends(problem, each, least[place], chunks, deadline=deadline)
                if sends == "late":
                    return "late"
                if sends != "none":
                    found += [sends] * times
                    break
                least[place] += 1
        return total, found

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return max(self.deadline - time.monotonic(), 0.0)

    def best(
        self,
        steps: int,
        chunk_counts: Sequence[int],
        *,
        deadline: float,
        rounds: int | None = None,
        below: Fraction | None = None,
    ) -> Point | Literal["none", "late"]:
        """The schedule with the fewest rounds a chunk for so many steps.

        Args:
            steps: of all problems together.
            chunk_counts: numbers of chunks to try.
            deadline: by ``time.monotonic``.
            rounds: at most so many.
            below: fewer rounds a chunk than this.
        """
        floors = self.floors(steps)
        parts = sum(f * often for f, (_, often) in zip(floors, self.different(), strict=True))
        floor = max(self.optimum, Fraction(parts))
        if below is not None and floor >= below:
            return "none"
        kept: tuple[int, int, list[tuple[Send, ...]]] | None = None
        tried = [(chunks, rounds, 1) for chunks in chunk_counts]
        if rounds is None and below is None:  # something to fall back on, should proofs take too long
            tried.insert(0, (chunk_counts[0], None, 2))
        if (
            floor.denominator in chunk_counts and len(tried) > 1
        ):  # the number that could meet the floor: straight away
            met = int(floor * floor.denominator)
            tried.insert(0, (floor.denominator, met if rounds is None else min(met, rounds), 1))
        late = False
        for number, (chunks, most, slack) in enumerate(tried):
            ratio = below if kept is None else Fraction(kept[0], kept[1])
            if ratio is not None:
                fewer = ceil(ratio * chunks) - 1
                most = fewer if most is None else min(most, fewer)
            if most is not None and most < max(steps, ceil(floor * chunks - Fraction(TOLERANCE))):
                continue
            last = number == len(tried) - 1
            until = deadline if last else time.monotonic() + (deadline - time.monotonic()) * _SHARE_OF_TIME
            result = self.solve(steps, most, chunks, floors, deadline=until, slack=slack)
            if not isinstance(result, str):
                kept = (result[0], chunks, result[1])
                if Fraction(result[0], chunks) <= floor:
                    break
            late = late or result == "late"
        if kept is None:
            return "late" if late else "none"
        total, chunks, sends = kept
        proof: Proof = "chunks tried"
        if Fraction(total, chunks) <= floor:
            proof = "any chunks"
        elif late:
            proof = "not proven"
        return Point(
            steps=steps,
            rounds=total,
            chunks=chunks,
            floor=floor,
            proof=proof,
            schedule=_schedule(self, steps, chunks, sends),
        )

    def counts(self, steps: int, most: int | None) -> list[int]:
        """Numbers of chunks to try, without those that make the problem too large."""
        if most is None:
            most = MOST_CHUNKS if self.problems[0].num_groups > 1 else MOST_CHUNKS_OF_ONE
        fitting = []
        for chunks in range(1, most + 1):
            try:
                self.problems[0].check_size(steps // len(self.problems), chunks)
            except SynthesisError:
                if chunks == 1:
                    raise
                break
            fitting.append(chunks)
        return fitting


def synthesize(
    topology: Topology,
    collective: Collective,
    *,
    steps: int | None = None,
    rounds: int | None = None,
    chunks: int | None = None,
    time_limit_s: float = 60.0,
) -> Schedule:
    """A schedule with a proven number of steps, and the fewest rounds a chunk for these.

    Args:
        topology: a small fabric; see the limit in ``steps_instance``.
        collective: what to move, over all of its ranks.
        steps: messages one after the other; the fewest with which there is a schedule if not given. Even for
            all_reduce.
        rounds: at most so many in all steps together.
        chunks: a block (of all_reduce a rank's share); the best of 1 to 8 if not given, for broadcast
            and reduce of 1 to 16.
        time_limit_s: when to give up, or to be content with what was found so far.

    Raises:
        UsageError: the collective is over another number of ranks, or an option makes no sense.
        SynthesisError: there is no such schedule (proven), the fabric is too large, or time ran out.

    Examples:
        >>> from mycel.topology.builders import dgx1_v100
        >>> from mycel.collectives.spec import Collective
        >>> fastest = synthesize(dgx1_v100(), Collective(name="all_gather", num_ranks=8))
        >>> fastest.depth, fastest.num_units // 8
        (2, 2)
    """
    for name, value in (("steps", steps), ("rounds", rounds), ("chunks", chunks)):
        if value is not None and value < 1:
            raise UsageError(f"steps: option {name!r} is {value}; expected at least 1")
    search = _Search.of(topology, collective, time_limit_s)
    stride = len(search.problems)
    if steps is not None and steps % stride:
        raise UsageError(f"steps: all_reduce is two halves with equally many steps, and {steps} is odd")
    first = search.least_steps
    tried = [steps] if steps is not None else range(first, max(first, rounds or first) + 1, stride)
    for few in tried:
        counts = search.counts(few, None) if chunks is None else [chunks]
        point = search.best(few, counts, deadline=search.deadline, rounds=rounds)
        if point == "late":
            raise SynthesisError(
                f"steps on {topology.name}: {collective.name} with {_asked(few, rounds, chunks)} was neither "
                f"found nor ruled out in {time_limit_s:g} s; set time_limit_s to more, or ask for fewer chunks"
            )
        if point != "none":
            return point.schedule
    raise SynthesisError(
        f"steps on {topology.name}: no {collective.name} exists with {_asked(steps, rounds, chunks)}; "
        f"at least {_plural(first, 'step')} and {search.optimum} rounds a chunk are needed"
    )


def _asked(steps: int | None, rounds: int | None, chunks: int | None) -> str:
    parts = [] if steps is None else [_plural(steps, "step")]
    parts += [] if rounds is None else [f"at most {_plural(rounds, 'round')}"]
    parts.append("any number of chunks that is tried" if chunks is None else _plural(chunks, "chunk"))
    return ", ".join(parts)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def front(
    topology: Topology,
    collective: Collective,
    *,
    chunks: int | None = None,
    time_limit_s: float = 60.0,
    found: Callable[[Point], None] | None = None,
) -> Front:
    """All schedules worth having, from the fewest steps to the most bandwidth.

    Args:
        topology: a small fabric.
        collective: what to move, over all of its ranks.
        chunks: a block, at most; 8 if not given, and 16 for broadcast and reduce.
        time_limit_s: for all of it; what was found by then is kept.
        found: called with each point as it is found.

    Raises:
        UsageError, SynthesisError: as ``synthesize``, where not even one point was found.
    """
    if chunks is not None and chunks < 1:
        raise UsageError(f"steps: at most {chunks} chunks; expected at least 1")
    search = _Search.of(topology, collective, time_limit_s)
    points: list[Point] = []
    first, stride = search.least_steps, len(search.problems)
    ended = f"not looked for beyond {first + _FURTHER_STEPS * stride} steps"
    for steps in range(first, first + _FURTHER_STEPS * stride + 1, stride):
        try:
            counts = search.counts(steps, chunks)
        except SynthesisError as error:
            ended = str(error)
            break
        if search.left_s <= 0:
            ended = f"time ran out before {steps} steps"
            break
        until = time.monotonic() + search.left_s / 2 if points else search.deadline
        point = search.best(steps, counts, deadline=until, below=points[-1].ratio if points else None)
        if isinstance(point, str):
            continue
        points.append(point)
        if found is not None:
            found(point)
        if point.ratio <= search.optimum:
            ended = "the last one meets the bandwidth bound"
            break
    if not points:
        raise SynthesisError(f"steps on {topology.name}: {ended}; allow more time")
    return Front(points=tuple(points), optimum=search.optimum, ended=ended)


def _schedule(search: _Search, steps: int, chunks: int, sends: Sequence[Sequence[Send]]) -> Schedule:
    """Messages as transfers; chunks of a block that travel alike become one."""
    n, each = search.collective.num_ranks, steps // len(sends)
    units: list[Chunk] = []
    rows: list[tuple[int, int, Transfer]] = []
    for group in range(search.problems[0].num_groups):
        travels = list(zip(*(_travels(part, group, chunks) for part in sends), strict=True))
        start = 0
        while start < chunks:
            stop = next((i for i in range(start, chunks) if travels[i] != travels[start]), chunks)
            number = len(units)
            units.append(Chunk(start=group * chunks + start, stop=group * chunks + stop))
            for part, travel in enumerate(travels[start]):
                adding = search.collective.reduces and part == 0
                for step, path in travel:
                    way = path[::-1] if adding else path
                    src, dst = search.topology.rank_of[way[0]], search.topology.rank_of[way[-1]]
                    at = part * each + (each + 1 - step if adding else step)
                    rows.append(
                        (at, (dst - src) % n, Transfer(chunk=number, src=src, dst=dst, reduce=adding, path=way))
                    )
            start = stop
    rows.sort(key=lambda row: (*row[:2], row[2].src, row[2].chunk, row[2].path))
    into: dict[tuple[int, int], tuple[int, ...]] = {}
    transfers: list[Transfer] = []
    for _, _, t in rows:
        number = len(transfers)
        transfers.append(replace(t, after=into.get((t.chunk, t.src), ())))
        earlier = into.get((t.chunk, t.dst), ()) if t.reduce else ()
        into[t.chunk, t.dst] = (*earlier, number)
    return Schedule(
        collective=search.collective,
        topology=search.topology,
        method="steps",
        num_units=search.problems[0].num_groups * chunks,
        chunks=tuple(units),
        transfers=tuple(transfers),
    )


def _travels(sends: Sequence[Send], group: int, chunks: int) -> list[tuple[tuple[int, tuple[int, ...]], ...]]:
    """Of each chunk of a group its messages, ``(step, path)``; chunks that travel alike next to each other."""
    travels: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(chunks)]
    for send in sends:
        if send.group == group:
            travels[send.chunk].append((send.step, send.arc.path))
    return sorted(tuple(sorted(travel)) for travel in travels)
