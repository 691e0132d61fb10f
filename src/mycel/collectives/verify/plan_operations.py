"""Reads the operations of MSCCL++ execution plans; see ``plan_form``.

References:
    microsoft/mscclpp, ``src/core/include/execution_kernel.hpp`` (what operations do, and what they leave undone).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mycel.collectives.verify.plan_data import (
    ALIGNMENT,
    PACKETS,
    PUTS,
    SUMS,
    SUPPORTED,
    TO_ALL,
    Chunks,
    End,
    Operation,
)
from mycel.collectives.verify.plan_entries import Entry
from mycel.errors import ScheduleError

__all__ = ["BUFFERS", "MAX_CHANNELS", "Scope", "Switch", "read_operations"]

BUFFERS = {"i": "input", "o": "output", "s": "scratch"}
MAX_OPERATIONS = 64
MAX_CHANNELS = 16
MAX_CHANNELS_AN_OPERATION = 8
MAX_BUFFERS_AN_OPERATION = 10
MAX_SEMAPHORES_AN_OPERATION = 16
MAX_BARRIERS = 16
_SIGNALLING = ("memory", "port")


@dataclass(frozen=True, slots=True)
class Switch:
    """A switch channel: one buffer of a group of ranks."""

    ranks: tuple[int, ...]
    buffer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What the operations of one thread block can refer to.

    Attributes:
        ends: channels of each kind with two ends, by the number that the block has for them.
        switches: the block's switch channels.
        remote: buffers of others that it can reach, by kind of channel: owner and letter.
        is_packets: the plan's protocol is LL.
    """

    rank: int
    chunks: Sequence[Mapping[str, int]]
    ends: Mapping[str, Sequence[End]]
    switches: Sequence[Switch]
    remote: Mapping[str, Sequence[tuple[int, str]]]
    num_semaphores: int
    is_packets: bool


#: Of each operation on data: how many local sources and targets, and whether remote ones may follow; -1: any number.
#: A "switch" side has one entry, which names a switch channel.
_SHAPES: dict[str, tuple[int, bool, int, bool]] = {
    "copy": (1, False, 1, False),
    "put": (-1, False, 0, True),
    "pws": (-1, False, 0, True),
    "pwsf": (-1, False, 0, True),
    "get": (0, True, -1, False),
    "re": (-1, False, 1, False),
    "res": (-1, False, 1, True),
    "rre": (1, True, 1, False),
    "rres": (1, True, 1, True),
    "ppkt": (-1, False, 0, True),
    "rppkt": (1, False, 0, True),
    "cpkt": (1, False, 1, False),
    "upkt": (1, False, 1, False),
    "repkt": (-1, False, 1, False),
    "respkt": (-1, False, 1, True),
    "recpkt": (-1, False, 2, False),
    "recspkt": (-1, False, 2, True),
}
#: Of operations through switches: whether sources and targets are at all ranks behind it.
_THROUGH = {"glre": (True, False), "glres": (True, True), "gstore": (False, True), "gstorepkt": (False, True)}
_OVER_PORTS = (*PUTS, "rppkt")
#: Of operations on packets, from which source and which target on there are packets.
_PACKETS_FROM = {
    "ppkt": (99, 0),
    "rppkt": (0, 0),
    "cpkt": (99, 0),
    "upkt": (0, 99),
    "repkt": (1, 99),
    "respkt": (1, 1),
    "recpkt": (1, 1),
    "recspkt": (1, 1),
    "gstorepkt": (0, 0),
}


def read_operations(block: Entry, scope: Scope) -> tuple[Operation, ...]:
    """The operations of a thread block.

    Raises:
        ScheduleError: malformed, beyond a limit, or what the runtime would not do as it is meant.
    """
    items = block.items("ops", least=0, most=MAX_OPERATIONS)
    made: list[Operation] = []
    for at, item in enumerate(items):
        entry = Entry(item, f"{block.where}, op {at}")
        made.append(replace(_operation(entry, scope), at=at))
    total = sum(1 + len(op.inner) for op in made)
    if total > MAX_OPERATIONS:
        raise ScheduleError(
            f"{block.where}: {total} ops with those of pipelines; at most {MAX_OPERATIONS} are allowed"
        )
    return tuple(made)


def _operation(op: Entry, scope: Scope) -> Operation:
    name = op.text("name")
    if name == "pipeline":
        return _pipeline(op, scope)
    if name not in SUPPORTED:
        known = ", ".join((*SUPPORTED, "pipeline"))
        raise ScheduleError(f"{op.where}: operation {name!r} is not understood; known: {known}")
    op.where += f" ({name})"
    if name in PACKETS and not scope.is_packets:
        raise ScheduleError(f"{op.where}: packets need protocol LL, which gives scratch the place for their flags")
    made = _plain(op, name, scope) or _data_operation(op, name, scope)
    if "tbg_info" not in op.data:
        return made
    if not made.targets or made.kind == "port":
        raise ScheduleError(f"{op.where}: only what thread blocks move themselves can be shared by a group of them")
    group = Entry(op.get("tbg_info"), f"{op.where}, tbg_info")
    size = group.whole("tbg_size")
    return replace(made, part=group.whole("tb_id", below=size), num_parts=size)


def _plain(op: Entry, name: str, scope: Scope) -> Operation | None:
    """An operation that moves no data."""
    if name == "nop":
        return Operation(name=name)
    if name == "barrier":
        barrier = op.whole("barrier_id", below=MAX_BARRIERS)
        return Operation(name=name, barrier=barrier, num_blocks=op.whole("num_threadblocks"))
    if name in ("sem_acquire", "sem_release"):
        ids = op.numbers("semaphore_ids", below=scope.num_semaphores, most=MAX_SEMAPHORES_AN_OPERATION)
        return Operation(name=name, semaphores=tuple(ids))
    if name in ("signal", "wait", "rlxsignal", "rlxwait", "flush"):
        kind = op.kind("channel_type", _SIGNALLING)
        if name == "flush" and kind != "port":
            raise ScheduleError(f"{op.where}: only port channels can be flushed")
        return Operation(name=name, kind=kind, ends=_ends(op, kind, scope))
    return None


def _pipeline(op: Entry, scope: Scope) -> Operation:
    op.where += " (pipeline)"
    context = Entry(op.get("iter_context"), f"{op.where}, iter_context")
    unit, num_chunks = context.whole("unit_size"), context.whole("num_chunks")
    if not unit or unit % ALIGNMENT or not num_chunks:
        raise ScheduleError(
            f"{context.where}: {num_chunks} chunks in steps of {unit} bytes; at least one chunk, and steps in "
            f"multiples of {ALIGNMENT} bytes"
        )
    inner: list[Operation] = []
    for number, item in enumerate(op.items("ops", most=MAX_OPERATIONS)):
        entry = Entry(item, f"{op.where}, op {number}")
        made = _operation(entry, scope)
        if made.name == "pipeline" or made.name in PACKETS or made.num_parts > 1:
            what = "is shared by a group" if made.num_parts > 1 else f"is a {made.name}"
            raise ScheduleError(f"{entry.where} {what}, which the runtime does not cut into a pipeline's steps")
        if made.targets and made.targets[0].size != num_chunks:
            raise ScheduleError(
                f"{entry.where} is of {made.targets[0].size} chunks in a pipeline of {num_chunks}; the runtime's "
                "steps would go beyond it, or not to its end"
            )
        inner.append(made)
    return Operation(name="pipeline", inner=tuple(inner), unit_bytes=unit, num_chunks=num_chunks)


def _ends(op: Entry, kind: str, scope: Scope) -> tuple[End, ...]:
    known = scope.ends[kind]
    ids = op.numbers("channel_ids", below=len(known), most=MAX_CHANNELS_AN_OPERATION)
    if len(set(ids)) != len(ids):
        raise ScheduleError(f"{op.where}: channel_ids {ids} name one channel twice")
    return tuple(known[index] for index in ids)


def _data_operation(op: Entry, name: str, scope: Scope) -> Operation:
    if name in _THROUGH:
        kind, (sources, targets) = "switch", _sides_through(op, name, scope)
    else:
        local_sources, remote_sources, local_targets, remote_targets = _SHAPES[name]
        kind = op.kind("channel_type", _SIGNALLING) if remote_sources or remote_targets else "memory"
        if kind == "port" and name not in _OVER_PORTS:
            why = "; rppkt does" if name == "ppkt" else ""
            raise ScheduleError(f"{op.where}: {name} does not work over port channels{why}")
        if kind == "memory" and name in PUTS[1:]:
            raise ScheduleError(f"{op.where}: {name} does not work over memory channels")
        sources = _spans(op, "src_buff", local_sources, remote_sources, kind, scope)
        targets = _spans(op, "dst_buff", local_targets, remote_targets, kind, scope)
    _check_sides(op, name, kind, sources, targets)
    if name in PACKETS:
        sources, targets = (
            tuple(replace(span, is_packet=at >= first) for at, span in enumerate(side))
            for side, first in zip((sources, targets), _PACKETS_FROM[name], strict=True)
        )
        for span in sources + targets:
            if span.is_packet and span.buffer != "s":
                raise ScheduleError(
                    f"{op.where}: packets stand in {BUFFERS[span.buffer]} of rank {span.rank}; only scratch has the "
                    "place for their flags"
                )
    ends: tuple[End, ...] = ()
    if kind == "port":
        ends = _ends(op, kind, scope)
        if len(ends) != len(targets):
            raise ScheduleError(f"{op.where}: {len(ends)} channels for {len(targets)} targets")
    return Operation(name=name, kind=kind, sources=sources, targets=targets, ends=ends)


def _check_sides(op: Entry, name: str, kind: str, sources: Sequence[Chunks], targets: Sequence[Chunks]) -> None:
    if len({span.size for span in (*sources, *targets)}) != 1:
        raise ScheduleError(f"{op.where}: sources and targets differ in size")
    if name not in (*SUMS, *TO_ALL) and len(sources) != len(targets):
        raise ScheduleError(f"{op.where}: {len(sources)} sources for {len(targets)} targets")
    if name in SUMS and len(sources) < 2:
        raise ScheduleError(f"{op.where}: {name} needs at least two sources")
    if (name == "ppkt" or (name == "put" and kind == "memory")) and len({span.buffer for span in sources}) > 1:
        raise ScheduleError(f"{op.where}: the runtime takes all sources from the first one's buffer")
    if name == "get" and any(a.index != b.index for a, b in zip(sources, targets, strict=True)):
        raise ScheduleError(f"{op.where}: the runtime exchanges the indices of source and target; they must be equal")


def _sides_through(op: Entry, name: str, scope: Scope) -> tuple[tuple[Chunks, ...], tuple[Chunks, ...]]:
    """Sources and targets of an operation through a switch."""
    if op.kind("channel_type") != "switch":
        raise ScheduleError(f"{op.where}: {name} works over switch channels only")
    sides: list[tuple[Chunks, ...]] = []
    for key, through in zip(("src_buff", "dst_buff"), _THROUGH[name], strict=True):
        if not through:
            sides.append(_spans(op, key, 1, False, "switch", scope))
            continue
        (item,) = op.items(key, most=1)
        entry = Entry(item, f"{op.where}, {key} 0")
        switch = scope.switches[entry.whole("switch_channel_id", below=len(scope.switches))]
        sides.append(tuple(_span(entry, rank, switch.buffer, scope) for rank in switch.ranks))
    return sides[0], sides[1]


def _spans(op: Entry, key: str, num_local: int, more: bool, kind: str, scope: Scope) -> tuple[Chunks, ...]:
    spans: list[Chunks] = []
    for at, item in enumerate(op.items(key, most=MAX_BUFFERS_AN_OPERATION)):
        entry = Entry(item, f"{op.where}, {key} {at}")
        if num_local < 0 or at < num_local:
            owner, letter = scope.rank, entry.text("type")
            if letter not in BUFFERS:
                raise ScheduleError(f"{entry.where}: unknown buffer {letter!r}; known: i, o, s")
            if "rank" in entry.data and entry.whole("rank") != owner:
                raise ScheduleError(
                    f"{entry.where}: a buffer of rank {entry.whole('rank')}, but it is rank {owner}'s op"
                )
        elif more:
            owner, letter = scope.remote[kind][entry.whole("buffer_id", below=len(scope.remote[kind]))]
        else:
            raise ScheduleError(f"{op.where}: {key} has more than {num_local}")
        spans.append(_span(entry, owner, letter, scope))
    if len(spans) < num_local:
        raise ScheduleError(f"{op.where}: {key} has {len(spans)}; {num_local} are needed")
    return tuple(spans)


def _span(entry: Entry, owner: int, letter: str, scope: Scope) -> Chunks:
    index, size, length = entry.whole("index"), entry.whole("size"), scope.chunks[owner][letter]
    if not size or index + size > length:
        raise ScheduleError(
            f"{entry.where}: chunks {index}..{index + size - 1} of {BUFFERS[letter]} of rank {owner}, "
            f"which has {length}"
        )
    return Chunks(owner, letter, index, size)
