"""Whether all ranks of an all_reduce round alike: floating-point addition commutes, but does not associate.

Where a sum is formed at one rank and copied to all others they hold the same bits. Where partners add each other's
sums, each rank forms its own, and they are the same if all were formed as one tree of additions: of an addition's two
sides, each partner has its own first, which makes no difference to IEEE 754 sums and products (but for which of two
NaNs comes out, and for which of +0 and -0, which are equal, is the maximum).
"""

from __future__ import annotations

from collections.abc import Sequence

from mycel.collectives.program import Buffer, Op, Program
from mycel.collectives.schedule import Schedule
from mycel.collectives.verify.flow import trace_flow

__all__ = ["program_sums_agree", "sums_agree"]


def sums_agree(schedule: Schedule) -> bool:
    """Whether every rank that must hold a chunk's sum holds one that was formed by the same additions.

    Takes time in proportion to the transfers.

    Args:
        schedule: a verified schedule.

    Examples:
        >>> from mycel.collectives.synth import synthesize
        >>> from mycel.topology import load_topology
        >>> fabric = load_topology("star:ranks=8")
        >>> [sums_agree(synthesize(fabric, "all_reduce", method)) for method in ("exchange", "swing_latency")]
        [True, False]
    """
    if not schedule.collective.reduces:
        return True
    slots, columns, n = schedule.slots, schedule.columns, schedule.collective.num_ranks
    if schedule.orbit is not None:
        slots = type(slots).of(columns)
    sums: dict[tuple[int, int], int] = {}  # of two sums, whichever comes first: the number of their sum
    held: dict[tuple[int, int], int] = {}  # by chunk and slot; a rank's own contribution has its number
    rows = zip(
        *(c.tolist() for c in (columns.chunk, slots.source, slots.target, slots.base, columns.reduce)), strict=True
    )
    for chunk, source, target, base, adds in rows:
        value = _held(held, chunk, source, slots.width, n)
        if adds:
            there = _held(held, chunk, base if base >= 0 else target, slots.width, n)
            if there >= 0:  # a switch may hold nothing
                pair = (value, there) if value < there else (there, value)
                value = sums.setdefault(pair, n + len(sums))
        held[chunk, target] = value
    for chunk in range(len(schedule.chunks)):
        taker = schedule.collective.taker(schedule.block_of(chunk))
        found = set()
        for rank in range(n) if taker is None else (taker,):
            places = range(rank * slots.width, (rank + 1) * slots.width)
            last = max((slot for slot in places if (chunk, slot) in held), default=places.start)
            found.add(_held(held, chunk, last, slots.width, n))
        if len(found) > 1:
            return False
    return True


def _held(held: dict[tuple[int, int], int], chunk: int, slot: int, width: int, num_ranks: int) -> int:
    """What is in a slot: what was put there, a rank's own contribution in its first place, or nothing (-1)."""
    vertex, place = divmod(slot, width)
    return held.get((chunk, slot), vertex if vertex < num_ranks and not place else -1)


def program_sums_agree(programs: Sequence[Program]) -> bool:
    """Whether all ranks hold sums of the same bits after an all_reduce: added in the same order, element by element.

    An element's history is a number: of a rank's own, or of two that were added, in either order, which gives the
    same bits. Programs of other collectives, which leave no sum with two ranks, agree.

    Args:
        programs: of all ranks, verified, of few elements, for every element is followed by itself.
    """
    c = programs[0].collective
    if c.name != "all_reduce":
        return True
    known: dict[tuple[int, ...], int] = {}

    def number(*history: int) -> int:
        return known.setdefault(tuple(sorted(history)), len(known))

    memory: dict[tuple[int, int, int], int] = {}
    for program in programs:
        for at in range(program.length(Buffer.OUTPUT)):
            memory[program.rank, int(Buffer.OUTPUT), at] = number(-1 - program.rank)
    ordered = sorted(programs, key=lambda program: program.rank)
    flow = trace_flow(ordered, c.name)
    sent: dict[int, list[int]] = {}
    for event, (rank, index) in enumerate(flow.nodes):
        i = ordered[rank].instruction(index)
        place = [(rank, int(i.buffer), at) for at in range(i.offset, i.offset + i.count)]
        operand = [(rank, int(i.operand_buffer), at) for at in range(i.operand_offset, i.operand_offset + i.count)]
        if i.op == Op.SEND:
            sent[event] = [memory[cell] for cell in place]
            continue
        value = sent.pop(flow.sender[event]) if not i.op.is_local else [memory[cell] for cell in operand]
        if i.op in (Op.RECV_REDUCE, Op.REDUCE):
            other = operand if i.op == Op.RECV_REDUCE else place
            value = [number(a, memory[cell]) for a, cell in zip(value, other, strict=True)]
        memory.update(zip(place, value, strict=True))
    length = ordered[0].length(Buffer.OUTPUT)
    rows = [[memory[rank, int(Buffer.OUTPUT), at] for at in range(length)] for rank in range(c.num_ranks)]
    return all(row == rows[0] for row in rows)
