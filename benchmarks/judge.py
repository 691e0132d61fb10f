"""A plain judge of schedules, programs and MSCCL XML, for ``mutants.py``: events, pairs and numbers.

It shares no code with the verifier and works differently. Every event has two ends, *begins* and *is done*; who must
be done before whom begins is one bitset an event, and every pair of accesses to a place is looked at by itself. What
is computed is computed with numbers, modulo a prime, from random inputs: sums that agree are right, up to a chance of
one in 10^18. The mean of a reduction is taken where the program says so, as a product with a secret factor.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from xml.etree import ElementTree as ET

from mycel.collectives.program import Buffer, Op, Program
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import Collective

__all__ = ["judge_programs", "judge_schedule", "judge_xml"]

_PRIME = (1 << 61) - 1
_MEAN = 987_654_321_987_654_321


@dataclass(slots=True, kw_only=True)
class _Event:
    """``target = source (+) what came``; ``after`` events must be done before it begins.

    Attributes:
        sender: event whose message it takes, -1 for none.
        waits_for_data: touches nothing before its sender has begun.
        adds: to what the target holds; such additions commute.
        is_final: the mean is taken.
        is_sender: passes its value on.
    """

    after: list[int]
    source: list[Hashable] = field(default_factory=list)
    target: list[Hashable] = field(default_factory=list)
    sender: int = -1
    waits_for_data: bool = True
    adds: bool = False
    reads_target: bool = False
    is_final: bool = False
    is_sender: bool = False


def _numbers() -> Callable[[Hashable], int]:
    chance, known = random.Random(20), {}

    def number(key: Hashable) -> int:
        return known.setdefault(key, chance.randrange(1, _PRIME))

    return number


def _defect(
    events: list[_Event],
    edges: list[list[int]],
    given: dict[Hashable, int],
    wanted: dict[Hashable, int],
    zeros: frozenset[Hashable] = frozenset(),
) -> str | None:
    """What is wrong, or ``None``.

    Args:
        edges: of each event, those without which it cannot end (for deadlocks).
        zeros: cells to which the first number is added as if to nothing.
    """
    order = _sorted(edges)
    if order is None:
        return "deadlock"
    begun, done = [0] * len(events), [0] * len(events)
    values: list[list[int]] = [[] for _ in events]
    memory = dict(given)
    touched: dict[Hashable, list[tuple[int, str]]] = {}
    for index in order:
        event = events[index]
        bits = 0
        for other in event.after:
            bits |= done[other]
        if event.sender >= 0 and event.waits_for_data:
            bits |= begun[event.sender]
        begun[index] = bits
        done[index] = bits | (done[event.sender] if event.sender >= 0 else 0) | (1 << index)
        for cell in event.source:
            touched.setdefault(cell, []).append((index, "read"))
        for cell in event.target:
            touched.setdefault(cell, []).append((index, "add" if event.adds else "write"))
            if event.reads_target:
                touched[cell].append((index, "read"))
        value = list(values[event.sender]) if event.sender >= 0 else []
        if event.source:
            if any(cell not in memory for cell in event.source):
                return "reads what nothing was written to"
            own = [memory[cell] for cell in event.source]
            value = [(a + b) % _PRIME for a, b in zip(value, own, strict=True)] if value else own
        if event.adds or event.reads_target:
            for cell in zeros.intersection(event.target):
                memory.setdefault(cell, 0)
            if any(cell not in memory for cell in event.target):
                return "adds to what nothing was written to"
            value = [(memory[cell] + b) % _PRIME for cell, b in zip(event.target, value, strict=True)]
        if event.is_final:
            value = [number * _MEAN % _PRIME for number in value]
        memory.update(zip(event.target, value, strict=True) if event.target else ())
        values[index] = value
    for accesses in touched.values():
        for k, (a, kind_a) in enumerate(accesses):
            for b, kind_b in accesses[k + 1 :]:
                if a == b or (kind_a == kind_b and kind_a != "write"):
                    continue
                if not (begun[b] >> a & 1 or begun[a] >> b & 1):
                    return "two accesses in no order"
    return None if all(memory.get(cell) == number for cell, number in wanted.items()) else "wrong result"


def _sorted(edges: list[list[int]]) -> list[int] | None:
    left = [len(those) for those in edges]
    after: list[list[int]] = [[] for _ in edges]
    for index, those in enumerate(edges):
        for other in those:
            after[other].append(index)
    order = [index for index, count in enumerate(left) if not count]
    for index in order:
        for other in after[index]:
            left[other] -= 1
            if not left[other]:
                order.append(other)
    return order if len(order) == len(edges) else None


def _wanted(collective: Collective, rank: int, block: int, number: Callable[[Hashable], int], at: int) -> int | None:
    """The value of array element ``at`` of a block that a rank must end with."""
    origins = collective.required(rank, block)
    return None if origins is None else sum(number((origin, at)) for origin in origins) % _PRIME


def judge_schedule(schedule: Schedule) -> str | None:
    """What is wrong with a schedule, or ``None``."""
    number, collective = _numbers(), schedule.collective
    given: dict[Hashable, int] = {}
    wanted: dict[Hashable, int] = {}
    for chunk in range(len(schedule.chunks)):
        block = schedule.block_of(chunk)
        for rank in range(collective.num_ranks):
            if holders := collective.initial(rank, block):
                given[rank, chunk] = sum(number((holder, chunk)) for holder in holders) % _PRIME
            needed = _wanted(collective, rank, block, number, chunk)
            if needed is not None:
                wanted[rank, chunk] = needed
    if any(any(t.places) for t in schedule.transfers):
        return _judge_places(schedule, given, wanted)
    events = [
        _Event(after=list(t.after), source=[(t.src, t.chunk)], target=[(t.dst, t.chunk)], adds=t.reduce)
        for t in schedule.transfers
    ]
    switches = range(collective.num_ranks, schedule.num_compute_vertices)
    sums = frozenset((switch, chunk) for switch in switches for chunk in range(len(schedule.chunks)))
    return _defect(events, [event.after for event in events], given, wanted, sums)


def _judge_places(schedule: Schedule, given: dict[Hashable, int], wanted: dict[Hashable, int]) -> str | None:
    """The same where ranks have several places: a transfer is two events, as what it adds to is the other end's."""
    events: list[_Event] = []
    written: dict[tuple[int, int], list[tuple[int, int]]] = {}  # by rank and chunk: place and event, of sums in turn
    top = dict.fromkeys([*given, *wanted], 0)
    for t in schedule.transfers:
        read, place = t.places
        events.append(
            _Event(after=[2 * other + 1 for other in t.after], source=[(t.src, t.chunk, read)], is_sender=True)
        )
        taken = _Event(after=[], target=[(t.dst, t.chunk, place)], sender=len(events) - 1, adds=t.reduce)
        mine = written.setdefault((t.dst, t.chunk), [])
        if t.reduce:
            same = [event for at, event in mine if at == place]
            below = [event for at, event in mine if at == place - 1]
            if place and not same:
                taken.source, taken.adds = [(t.dst, t.chunk, place - 1)], False
            taken.after = (same or below)[-1:]
            mine.append((place, len(events)))
        top[t.dst, t.chunk] = max(top.get((t.dst, t.chunk), 0), place)
        events.append(taken)
    edges = [[*event.after, *([event.sender] if event.sender >= 0 else [])] for event in events]
    cells = {(*cell, 0): number for cell, number in given.items()}  # type: ignore[misc]
    results = {(*cell, top[cell]): number for cell, number in wanted.items()}  # type: ignore[misc,index]
    return _defect(events, edges, cells, results)


# -- programs -------------------------------------------------------------------------------------------------


def judge_programs(programs: list[Program]) -> str | None:
    """What is wrong with all ranks' programs, or ``None``; all_gather both in place and out of place."""
    modes = (False, True) if programs[0].collective.name == "all_gather" else (False,)
    return next((found for found in (_judge_programs(programs, aliased=mode) for mode in modes) if found), None)


def _judge_programs(programs: list[Program], *, aliased: bool) -> str | None:
    first: list[int] = []
    total = 0
    for program in programs:
        first.append(total)
        total += len(program.instructions)
    events: list[_Event] = []
    streams: dict[object, tuple[list[int], list[int]]] = {}
    counts: list[int] = []
    for program in programs:
        latest: dict[int, int] = {}
        for row, i in enumerate(program.instructions):
            index = first[program.rank] + row
            after = [first[program.rank] + need for need in i.needs]
            if i.channel >= 0 or i.needs:  # local ones that need others are as if on one channel
                after += [latest[i.channel]] if i.channel in latest else []
                latest[i.channel] = index
            if i.channel >= 0:
                streams.setdefault(program.channels[i.channel], ([], []))[i.op is not Op.SEND].append(index)
            reads = i.op in (Op.RECV_REDUCE, Op.COPY, Op.REDUCE)
            buffer, at = (i.operand_buffer, i.operand_offset) if reads else (i.buffer, i.offset)
            source = [_cell(program, buffer, at + k, aliased) for k in range(i.count)]
            target = [_cell(program, i.buffer, i.offset + k, aliased) for k in range(i.count)]
            if i.op is Op.COPY and source == target:
                source = target = []
            if i.op is Op.RECV_REDUCE and source != target and set(source) & set(target):
                return "overlaps itself"
            if i.op is Op.COPY and set(source) & set(target):
                return "overlaps itself"
            if i.op is Op.REDUCE and source != target and set(source) & set(target):
                return "overlaps itself"
            events.append(
                _Event(
                    after=after,
                    source=[] if i.op is Op.RECV else source,
                    target=[] if i.op is Op.SEND else target,
                    waits_for_data=i.op is Op.RECV,
                    reads_target=i.op is Op.REDUCE,
                    is_final=i.final and i.op in (Op.RECV_REDUCE, Op.REDUCE),
                )
            )
            counts.append(i.count)
    met = list(range(total))  # without buffers, a send and its receive are one
    for sends, receives in streams.values():
        if [counts[a] for a in sends] != [counts[b] for b in receives]:
            return "messages do not meet"
        for a, b in zip(sends, receives, strict=True):
            events[b].sender = a
            met[b] = a
    joint: list[list[int]] = [[] for _ in events]
    for index, event in enumerate(events):
        joint[met[index]] += [met[other] for other in event.after]
    if _sorted(joint) is None:
        return "deadlock"
    edges = [[*event.after, *([event.sender] if event.sender >= 0 else [])] for event in events]
    return _defect(events, edges, *_arrays(programs, aliased))


def _cell(program: Program, buffer: Buffer, at: int, aliased: bool) -> Hashable:
    if aliased and buffer is Buffer.INPUT:
        buffer, at = Buffer.OUTPUT, at + program.rank * program.length(Buffer.INPUT)
    return program.rank, int(buffer), at


def _arrays(programs: list[Program], aliased: bool) -> tuple[dict[Hashable, int], dict[Hashable, int]]:
    number = _numbers()
    collective, total = programs[0].collective, programs[0].num_elements
    name, n = collective.name, collective.num_ranks
    lengths = [total * weight // collective.total_weight for weight in collective.block_weights]
    starts = [0, *accumulate(lengths)]
    given: dict[Hashable, int] = {}
    wanted: dict[Hashable, int] = {}
    mean = _MEAN if collective.reduces else 1
    in_place = name in ("all_reduce", "broadcast", "reduce")
    whole = range(len(lengths))

    def elements(blocks: Iterable[int]) -> list[int]:
        return [at for block in blocks for at in range(starts[block], starts[block + 1])]

    for program in programs:
        r = program.rank
        holds = Buffer.OUTPUT if in_place else Buffer.INPUT
        sent, got = range(r * n, r * n + n), range(r, n * n, n)
        held = {"all_gather": [r], "gather": [r], "all_to_all": sent}.get(name, whole)
        for k, at in enumerate(elements(held)[: program.length(holds)]):
            if collective.initial(r, bisect(starts, at) - 1):
                given[_cell(program, holds, k, aliased)] = number((r, at))
        ends = {"reduce_scatter": [r], "scatter": [r], "all_to_all": got}.get(name, whole)
        for k, at in enumerate(elements(ends)[: program.length(Buffer.OUTPUT)]):
            needed = _wanted(collective, r, bisect(starts, at) - 1, number, at)
            if needed is not None:
                wanted[_cell(program, Buffer.OUTPUT, k, aliased)] = needed * mean % _PRIME
    return given, wanted


# -- MSCCL XML ------------------------------------------------------------------------------------------------


def judge_xml(algo: ET.Element) -> str | None:
    """What is wrong with a file of all_gather, reduce_scatter or all_reduce, or ``None``."""
    for in_place, attribute in ((True, "inplace"), (False, "outofplace")):
        if algo.get(attribute) == "1" and (found := _judge_xml(algo, in_place)):
            return found
    return None


def _xml_cell(algo: ET.Element, rank: int, buffer: str, at: int, in_place: bool) -> Hashable:
    if in_place and buffer != "s":
        own = {"allgather": "i", "reducescatter": "o"}.get(algo.attrib["coll"])
        share = int(algo.attrib["nchunksperloop"]) // int(algo.attrib["ngpus"])
        return rank, "array", at + (rank * share if buffer == own else 0)
    return rank, buffer, at


def _judge_xml(algo: ET.Element, in_place: bool) -> str | None:
    events: list[_Event] = []
    streams: dict[tuple[str, str, str], tuple[list[int], list[int]]] = {}
    counts: list[int] = []
    written: set[Hashable] = set()
    for rank, gpu in enumerate(algo):
        base = len(events)
        first = [base + sum(len(other) for other in gpu[:k]) for k in range(len(gpu))]
        ends: set[tuple[str, str, str]] = set()
        for tb in gpu:
            peers = {"send": tb.attrib["send"], "recv": tb.attrib["recv"]}
            if str(rank) in peers.values() or not 0 <= int(tb.attrib["chan"]) < int(algo.attrib["nchannels"]):
                return "no such connection"
            for side, peer in peers.items():
                if peer != "-1" and ((side, peer, tb.attrib["chan"]) in ends or int(peer) >= len(algo)):
                    return "a connection twice, or to nobody"
                ends.add((side, peer, tb.attrib["chan"]))
            for at, step in enumerate(tb):
                found = _xml_event(algo, rank, gpu, tb, step, in_place)
                if isinstance(found, str):
                    return found
                index = len(events)
                found.after = [index - 1] if at else []
                if at and _fused(tb[at - 1].attrib, step.attrib) and tb[at - 1].get("cnt") != step.get("cnt"):
                    return "additions that the runtimes make one"
                if step.attrib["depid"] != "-1":
                    depid, deps = int(step.attrib["depid"]), int(step.attrib["deps"])
                    if not (0 <= depid < len(gpu) and 0 <= deps < len(gpu[depid])):
                        return "waits for what does not exist"
                    awaited = gpu[depid][deps]
                    if awaited.get("hasdep") != "1" or awaited.get("type") == "nop":
                        return "waits for a step that does not announce its end"
                    found.after.append(first[depid] + deps)
                elif step.attrib["type"] == "nop" or (at and tb[at - 1].get("type") == "nop"):
                    return "empty steps that the runtimes refuse"
                events.append(found)
                counts.append(int(step.attrib["cnt"]))
                written.update(found.target)
                if found.is_sender:
                    streams.setdefault((str(rank), peers["send"], tb.attrib["chan"]), ([], []))[0].append(index)
                if step.attrib["type"] in ("r", "rcs", "rrs", "rrc", "rrcs"):
                    streams.setdefault((peers["recv"], str(rank), tb.attrib["chan"]), ([], []))[1].append(index)
            if len(tb) and tb[-1].get("type") == "nop":
                return "empty steps that the runtimes refuse"
    edges = [list(event.after) for event in events]
    slots = 2 if algo.get("proto") == "Simple" else 8
    for sends, receives in streams.values():
        if [counts[a] for a in sends] != [counts[b] for b in receives]:
            return "messages do not meet"
        for k, (a, b) in enumerate(zip(sends, receives, strict=True)):
            events[b].sender = a
            edges[b].append(a)
            edges[a] += [receives[k - slots]] if k >= slots else []
    given, wanted = _xml_arrays(algo, in_place)
    if not in_place and any(cell[1] == "i" for cell in written):  # type: ignore[index]
        return "writes the input"
    return _defect(events, edges, given, wanted)


def _fused(one: dict[str, str], two: dict[str, str]) -> bool:
    """Whether the runtimes make one addition of two steps in a row."""
    alike = all(one[key] == two[key] for key in ("srcbuf", "dstbuf", "dstoff"))
    return alike and one["type"] == two["type"] == "re" and two["depid"] == "-1" and one["hasdep"] == "0"


def _xml_event(
    algo: ET.Element, rank: int, gpu: ET.Element, tb: ET.Element, step: ET.Element, in_place: bool
) -> _Event | str:
    kind, count = step.attrib["type"], int(step.attrib["cnt"])
    if count < 0 or min(int(step.attrib["srcoff"]), int(step.attrib["dstoff"])) < -1:
        return "out of range"
    if kind == "nop":
        return _Event(after=[]) if count < 72 else "count"
    sends, receives = kind in ("s", "rcs", "rrs", "rrcs"), kind in ("r", "rcs", "rrs", "rrc", "rrcs")
    if (sends and tb.get("send") == "-1") or (receives and tb.get("recv") == "-1"):
        return "exchanges with nobody"
    if not 0 < count < 72:
        return "count"
    sides: dict[str, list[Hashable]] = {"src": [], "dst": []}
    for side, used in (("src", kind not in ("r", "rcs")), ("dst", kind not in ("s", "rrs"))):
        buffer, at = step.attrib[f"{side}buf"], int(step.attrib[f"{side}off"])
        if used and not 0 <= at <= int(gpu.attrib[f"{buffer}_chunks"]) - count:
            return "out of range"
        if used:
            sides[side] = [_xml_cell(algo, rank, buffer, at + k, in_place) for k in range(count)]
    source, target = sides["src"], sides["dst"]
    if source and source != target and set(source) & set(target):
        return "overlaps itself"
    if kind == "cpy" and source == target:
        source = target = []
    return _Event(after=[], source=source, target=target, reads_target=kind == "re", is_sender=sends)


def _xml_arrays(algo: ET.Element, in_place: bool) -> tuple[dict[Hashable, int], dict[Hashable, int]]:
    number, coll = _numbers(), algo.attrib["coll"]
    total, n = int(algo.attrib["nchunksperloop"]), int(algo.attrib["ngpus"])
    share = total // n
    given: dict[Hashable, int] = {}
    wanted: dict[Hashable, int] = {}
    for rank in range(n):
        for k in range(share if coll == "allgather" else total):
            at = k + (rank * share if coll == "allgather" else 0)
            given[_xml_cell(algo, rank, "i", k, in_place)] = number((rank, at))
        for k in range(share if coll == "reducescatter" else total):
            at = k + (rank * share if coll == "reducescatter" else 0)
            origins: Iterator[int] = iter([at // share] if coll == "allgather" else range(n))
            sums = sum(number((origin, at)) for origin in origins) % _PRIME
            wanted[_xml_cell(algo, rank, "o", k, in_place)] = sums
    return given, wanted
