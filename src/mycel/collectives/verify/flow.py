"""Which send meets which receive, and an order in which all programs can run to their end.

Channels are first in, first out: the k-th send of a channel meets the k-th receive at the other end. Deadlock is
looked for under the hardest condition, no buffering at all: a send and its receive are one event, which happens
when both are at the head of their channel and have what they need. Buffers only remove waits, so programs that
end without them end with any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from mycel.collectives.program import Channel, Op, Program
from mycel.collectives.verify.order import find_circle, sort_events
from mycel.errors import VerificationError

__all__ = ["Flow", "describe", "trace_flow"]

#: Links of a cycle that a message shows.
_CYCLE_SHOWN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """All ranks' instructions in one order in which they can happen.

    Instructions are known by their place in that order.

    Attributes:
        nodes: ``(rank, index)`` of each instruction; a receive stands right behind its send.
        waits: of each, those of its rank that must be complete before it starts: needs and channel predecessor.
        sender: of each receive, its send; -1 for the others.
    """

    nodes: tuple[tuple[int, int], ...]
    waits: tuple[tuple[int, ...], ...]
    sender: tuple[int, ...]


def describe(program: Program, index: int) -> str:
    """One instruction in words, for messages."""
    i = program.instruction(index)
    where = f"{i.buffer.name.lower()}[{i.offset}:{i.offset + i.count}]"
    if i.op.is_local:
        peer = f"from {i.operand_buffer.name.lower()}[{i.operand_offset}]"
    else:
        channel = program.channels[i.channel]
        peer = f"to {channel.dst}" if i.op is Op.SEND else f"from {channel.src}"
        peer += f" on channel {i.channel}"
    return f"rank {program.rank} instruction {index} ({i.op.name.lower()} {where} {peer})"


def trace_flow(programs: Sequence[Program], title: str, *, every_size: bool = False) -> Flow:
    """Match sends with receives and find an order for everything.

    Args:
        programs: one a rank, in rank order.
        title: what is verified, for messages.
        every_size: nothing may rest on how messages of different chunks follow each other on a channel, since that
            changes with the size: ``Flow.waits`` are needs alone, and they must point backwards.

    Raises:
        VerificationError: a channel known at one end only or twice at one, a send or receive left over, counts
            that differ, a deadlock, or with ``every_size`` what may be one at another size.
    """
    partner = _match(programs, title)
    return _order(programs, partner, title, every_size=every_size)


def _first_nodes(programs: Sequence[Program]) -> list[int]:
    first = [0]
    for program in programs:
        first.append(first[-1] + len(program.columns))
    return first


def _match(programs: Sequence[Program], title: str) -> list[int]:
    """Of each instruction, numbered rank by rank, the one it meets at its peer; -1 for local ones."""
    first = _first_nodes(programs)
    ends: tuple[dict[Channel, list[int]], dict[Channel, list[int]]] = ({}, {})
    for program in programs:
        for channel in program.channels:
            side = ends[program.rank == channel.dst]
            if channel in side:
                raise VerificationError(
                    f"{title}: rank {program.rank} has two channels {_route(channel)}; which is meant is unclear"
                )
            side[channel] = []
        ops, channels = program.columns["op"].tolist(), program.columns["channel"].tolist()
        for index, (op, number) in enumerate(zip(ops, channels, strict=True)):
            if op < Op.COPY:
                ends[op != Op.SEND][program.channels[number]].append(first[program.rank] + index)
    partner = [-1] * first[-1]
    for channel in [*ends[0], *(c for c in ends[1] if c not in ends[0])]:
        lost = next((r for r, side in ((channel.src, ends[0]), (channel.dst, ends[1])) if channel not in side), None)
        if lost is not None:
            raise VerificationError(f"{title}: rank {lost} lacks the channel {_route(channel)} that its peer has")
        _pair(programs, first, channel, ends[0][channel], ends[1][channel], partner, title)
    return partner


def _pair(
    programs: Sequence[Program],
    first: list[int],
    channel: Channel,
    sends: list[int],
    receives: list[int],
    partner: list[int],
    title: str,
) -> None:
    source, target = programs[channel.src], programs[channel.dst]
    counts_out, counts_in = source.columns["count"], target.columns["count"]
    for send, receive in zip(sends, receives, strict=False):
        i, j = send - first[channel.src], receive - first[channel.dst]
        if counts_out[i] != counts_in[j]:
            raise VerificationError(
                f"{title}: {describe(source, i)} sends {counts_out[i]} elements, but {describe(target, j)}, which "
                f"meets it, expects {counts_in[j]}"
            )
        partner[send], partner[receive] = receive, send
    if len(sends) != len(receives):
        over, rest = (
            (source, sends[len(receives) :]) if len(sends) > len(receives) else (target, receives[len(sends) :])
        )
        index = rest[0] - first[over.rank]
        raise VerificationError(
            f"{title}: {describe(over, index)} is left over: channel {_route(channel)} has {len(sends)} sends and "
            f"{len(receives)} receives"
        )


def _route(channel: Channel) -> str:
    return f"{channel.src} -> {channel.dst} via {'>'.join(map(str, channel.path))}"


def _waits(programs: Sequence[Program], *, by_channel: bool) -> list[list[int]]:
    """Of each instruction, numbered rank by rank: its needs, and its predecessor on its channel; without repeats.

    Local ones that need others follow each other as if on one more channel, -1.
    """
    waits: list[list[int]] = []
    base = 0
    for program in programs:
        starts, needs = program.need_start.tolist(), program.need_index.tolist()
        latest: dict[int, int] = {}
        for index, channel in enumerate(program.columns["channel"].tolist()):
            local = set(needs[starts[index] : starts[index + 1]])
            if (channel >= 0 or local) and by_channel:
                if channel in latest:
                    local.add(latest[channel])
                latest[channel] = index
            waits.append([base + other for other in sorted(local)])
        base += len(program.columns)
    return waits


def _order(programs: Sequence[Program], partner: list[int], title: str, *, every_size: bool) -> Flow:
    """Run everything without buffers; what cannot run is a deadlock."""
    waits = _waits(programs, by_channel=True)
    names = [(p.rank, index) for p in programs for index in range(len(p.columns))]
    ops = [op for p in programs for op in p.columns["op"].tolist()]
    receives = [op in (Op.RECV, Op.RECV_REDUCE) for op in ops]
    # An event is known by its send, or by its copy.
    event = [partner[node] if receives[node] else node for node in range(len(waits))]
    before: list[list[int]] = [[] for _ in waits]
    for node, others in enumerate(waits):
        before[event[node]] += [event[other] for other in others]
    events = [node for node in sort_events(before) if not receives[node]]
    nodes = [node for first in events for node in (first, partner[first]) if node >= 0]
    if len(nodes) < len(waits):
        raise _deadlock(programs, partner, waits, event, before, names, title)
    if every_size:
        waits = _waits(programs, by_channel=False)
        for node, others in enumerate(waits):
            if others and max(others) >= node:
                rank, index = names[node]
                raise VerificationError(
                    f"{title}: {describe(programs[rank], index)} needs instruction {names[max(others)][1]}, which "
                    "stands behind it; at another size that may be a deadlock"
                )
    place = [0] * len(waits)
    for position, node in enumerate(nodes):
        place[node] = position
    return Flow(
        nodes=tuple(names[node] for node in nodes),
        waits=tuple(tuple(place[other] for other in waits[node]) for node in nodes),
        sender=tuple(place[partner[node]] if receives[node] else -1 for node in nodes),
    )


def _deadlock(
    programs: Sequence[Program],
    partner: list[int],
    waits: list[list[int]],
    event: list[int],
    before: list[list[int]],
    names: list[tuple[int, int]],
    title: str,
) -> VerificationError:
    """A circle of events, each of which waits for the next by a need or by its place on a channel."""
    cycle = find_circle(before, sort_events(before))
    parts: list[str] = []
    for stuck, next_ in list(pairwise([*cycle, cycle[0]]))[:_CYCLE_SHOWN]:
        node, other = next(
            (node, other)
            for node in (stuck, partner[stuck])
            for other in (waits[node] if node >= 0 else ())
            if event[other] == next_
        )
        program, index = programs[names[node][0]], names[node][1]
        why = "needs" if names[other][1] in program.instruction(index).needs else "stands on its channel behind"
        parts.append(f"{describe(program, index)} {why} instruction {names[other][1]}")
    more = f"; and {len(cycle) - _CYCLE_SHOWN} more" if len(cycle) > _CYCLE_SHOWN else ""
    return VerificationError(
        f"{title}: deadlock, a cycle of {len(cycle)} waits (a send and its receive are one): {'; '.join(parts)}{more}"
    )
