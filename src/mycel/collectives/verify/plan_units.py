"""A plan at a size: chunks in units, pipelines in steps, what a group of thread blocks shares in parts.

A plan stands for every size, and three things in it depend on the size: how many steps a pipeline takes, where the
parts of a group's blocks meet, and, where scratch is of a fixed length, which steps of a pipeline share a place in
it. ``in_units`` works them out, with the runtime's own rounding, and leaves plain operations; ``sizes_of`` gives the
sizes at which all that can differ has differed.

References:
    microsoft/mscclpp, ``src/core/executor/execution_plan.cc``: ``calcOffset``, ``setupOperation``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd, lcm

from mycel.collectives.verify.plan_data import ALIGNMENT, Chunks, ForeignPlan, Operation
from mycel.errors import ScheduleError

__all__ = ["Size", "in_units", "part_of", "sizes_of"]

#: Scratch of a plan that reuses it for all sizes.
FIXED_SCRATCH = 1 << 26
#: Steps of a pipeline in scratch at once that are told apart; with more, less is asked for than is checked.
_MOST_FOLDED = 64
_MOST_SIZES, _MOST_ROUNDS, _MOST_PACKETS = 64, 1 << 12, 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How long a chunk is, in units that nothing divides.

    Attributes:
        units: of a chunk.
        unit_bytes: of a unit, by which the steps of pipelines are measured; 0 where there are none.
        folded: units of a chunk of scratch, where they are fewer; pipelines then go round in it.
        most_steps: of a pipeline, which takes longer ones then; ``None``: as many as come.
    """

    units: int
    unit_bytes: int = 0
    folded: int | None = None
    most_steps: int | None = None


def sizes_of(plan: ForeignPlan) -> list[Size]:
    """Sizes of which one differs from any other that the plan allows in nothing that matters.

    - Groups: where n units of a chunk are cut into g parts depends on n modulo g.
    - Pipelines: one step, two and three, with and without a last one that is shorter. Each step has places of its
      own, so two steps meet only by how they count signals, which three show.
    - Folded scratch: steps meet again in it after so many, so two rounds of it are looked at.

    Raises:
        ScheduleError: scratch of a fixed length that operations outside of pipelines would run over; or too many
            sizes, steps or packets to look at all.
    """
    pipelines = [op for op in _operations(plan) if op.name == "pipeline"]
    parts = lcm(*(op.num_parts for op in _operations(plan)))
    steps = [op.unit_bytes for op in pipelines]
    quantum = gcd(*steps)
    longest = max(steps, default=0) // quantum if steps else 0
    _check_extent(plan, parts, 3 * longest * max((op.num_chunks for op in pipelines), default=0))
    bytes_of = quantum // parts if steps and quantum % parts == 0 else quantum
    scale = quantum // bytes_of if steps else 1
    made = [Size(units=n, unit_bytes=bytes_of) for n in range(parts, 2 * parts)]
    pieces = sorted({1, longest, longest + 1, 2 * longest, 3 * longest} if steps else ())
    made += [Size(units=count * scale, unit_bytes=bytes_of) for count in pieces]
    if plan.folds and _runs_over(plan):
        made += _folded(plan, steps, bytes_of, longest * scale)
    return made


def _check_extent(plan: ForeignPlan, parts: int, rounds: int) -> None:
    """Refuse what would take hours to judge."""
    packets = sum(span.size for op in _operations(plan) for span in (*op.sources, *op.targets) if span.is_packet)
    for count, most, what in (
        (parts, _MOST_SIZES, "sizes at which groups of thread blocks cut differently"),
        (
            rounds,
            _MOST_ROUNDS,
            "rounds of its pipelines, whose steps are of very different lengths, or of many chunks",
        ),
        (packets * parts, _MOST_PACKETS, "packets"),
    ):
        if count > most:
            raise ScheduleError(f"plan: {count} {what}; up to {most} are looked at one by one")


def _runs_over(plan: ForeignPlan) -> bool:
    """Whether chunks can be longer than those of scratch."""
    scratch = max(chunks["s"] for chunks in plan.chunks)
    whole = max(max(chunks["i"], chunks["o"]) for chunks in plan.chunks)
    return scratch > 0 and plan.message_bytes[1] // whole > _scratch_bytes(plan)


def _scratch_bytes(plan: ForeignPlan) -> int:
    """Bytes of a chunk of scratch of fixed length, at the rank that has most."""
    chunks = max(chunks["s"] for chunks in plan.chunks)
    length = FIXED_SCRATCH // (2 if plan.has_two_scratches else 1) // (2 if plan.protocol == "LL" else 1) // chunks
    return -(-length // ALIGNMENT) * ALIGNMENT


def _folded(plan: ForeignPlan, steps: Sequence[int], bytes_of: int, longest: int) -> list[Size]:
    length = _scratch_bytes(plan)
    limit = f"messages of more than {length} bytes a chunk do not fit into its scratch"
    for rank, blocks in enumerate(plan.blocks):
        for number, block in enumerate(blocks):
            for op in block:
                if any(span.buffer == "s" for span in (*op.sources, *op.targets)):
                    raise ScheduleError(
                        f"GPU {rank}, thread block {number}, op {op.at} ({op.name}): with reuse_resources, {limit}, "
                        "and only pipelines go round in it; give a lower max_message_size"
                    )
    if any(length % step for step in steps):
        raise ScheduleError(
            f"plan: with reuse_resources, {limit}, and steps of {', '.join(map(str, sorted(set(steps))))} bytes do "
            "not divide it: one would run over its end; give a lower max_message_size"
        )
    if bytes_of == 0:
        return []
    folded = length // bytes_of
    if folded > _MOST_FOLDED * longest:
        folded = _MOST_FOLDED * longest
    return [Size(units=folded + 2 * longest, unit_bytes=bytes_of, folded=folded)]


def _operations(plan: ForeignPlan) -> Iterator[Operation]:
    return (op for blocks in plan.blocks for block in blocks for op in block)


def part_of(num_units: int, part: int, num_parts: int) -> tuple[int, int]:
    """First unit and end of what one of a group's thread blocks does, as the runtime cuts it.

    Args:
        num_units: of the operation's data, at least ``num_parts``.
        part: the block's number in the group.
        num_parts: blocks of the group.

    Examples:
        >>> [part_of(6, part, 4) for part in range(4)]
        [(0, 2), (2, 4), (4, 5), (5, 6)]
    """
    least, rest = divmod(num_units, num_parts)
    first, stop = (number * least + min(number, rest) for number in (part, part + 1))
    return first, stop


def in_units(plan: ForeignPlan, size: Size) -> ForeignPlan:
    """The plan at a size, without pipelines and groups; chunks are units then."""
    return replace(
        plan,
        chunks=tuple(
            {letter: count * _length(letter, size) for letter, count in chunks.items()} for chunks in plan.chunks
        ),
        blocks=tuple(tuple(tuple(_flat(block, size)) for block in blocks) for blocks in plan.blocks),
    )


def _length(letter: str, size: Size) -> int:
    return size.folded if letter == "s" and size.folded is not None else size.units


def _flat(block: Sequence[Operation], size: Size) -> Iterator[Operation]:
    for op in block:
        if op.name != "pipeline":
            yield _cut(op, size)
            continue
        step = max(1, op.unit_bytes // size.unit_bytes)
        total = op.num_chunks * size.units
        if size.most_steps is not None:
            step = max(step, -(-total // size.most_steps))
        for number, first in enumerate(range(0, total, step)):
            length = min(step, total - first)
            for inner in op.inner:
                yield replace(_step(inner, first, length, size), at=op.at, step=number)


def _cut(op: Operation, size: Size) -> Operation:
    """An operation of a thread block, or its part of it."""

    def span(chunks: Chunks) -> Chunks:
        total = chunks.size * size.units
        first, stop = part_of(total, op.part, op.num_parts)
        return replace(chunks, index=chunks.index * _length(chunks.buffer, size) + first, size=stop - first)

    return _with_spans(op, [span(chunks) for chunks in op.sources], [span(chunks) for chunks in op.targets])


def _step(op: Operation, offset: int, length: int, size: Size) -> Operation:
    """An operation of a pipeline, in one of its steps."""

    def span(chunks: Chunks) -> Chunks:
        whole = _length(chunks.buffer, size)
        start = offset if whole == size.units else offset % whole
        return replace(chunks, index=chunks.index * whole + start, size=length)

    return _with_spans(op, [span(chunks) for chunks in op.sources], [span(chunks) for chunks in op.targets])


def _with_spans(op: Operation, sources: list[Chunks], targets: list[Chunks]) -> Operation:
    if not sources:
        return op
    return replace(op, sources=tuple(sources), targets=tuple(targets), part=0, num_parts=1)
