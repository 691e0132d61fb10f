"""Reads MSCCL++ execution plans: from JSON to plain data, with every limit checked that the runtime leaves unchecked.

The runtime copies operations, channels and buffers into arrays of fixed length and computes addresses from indices
without looking at either; a plan that is too large or points beyond a buffer overwrites memory there. Here it is an
error that names GPU, thread block and operation.

References:
    microsoft/mscclpp, ``src/core/executor/execution_plan.cc`` (keys), ``src/core/include/execution_common.hpp``
    (limits), ``src/core/include/execution_kernel.hpp`` (what operations do).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mycel.collectives.spec import Collective
from mycel.collectives.verify.plan_data import (
    ALIGNMENT,
    COLLECTIVE_NAMES,
    SENDRECV,
    Chunks,
    End,
    ForeignPlan,
    Operation,
)
from mycel.collectives.verify.plan_entries import Entry
from mycel.collectives.verify.plan_operations import BUFFERS, MAX_CHANNELS, Scope, Switch, read_operations
from mycel.errors import MycelError, ScheduleError

__all__ = ["COLLECTIVE_NAMES", "Chunks", "End", "ForeignPlan", "Operation", "read_plan"]

MAX_THREADS = 1024
_MAX_RANKS = 1 << 14
_PROTOCOLS = ("Simple", "LL")
_TWO_ENDED = ("memory", "port")


def read_plan(data: Any) -> ForeignPlan:
    """The plan in a JSON value.

    Raises:
        ScheduleError: malformed, beyond a limit, or it uses something that is not understood; the message names the
            GPU, thread block and operation.
    """
    top = Entry(data, "plan")
    gpus = [Entry(gpu, f"GPU {rank}") for rank, gpu in enumerate(top.items("gpus", most=_MAX_RANKS))]
    for rank, gpu in enumerate(gpus):
        gpu.expect("id", rank)
    name = top.text("collective")
    if name not in COLLECTIVE_NAMES and name != SENDRECV:
        known = ", ".join((*COLLECTIVE_NAMES, SENDRECV))
        raise ScheduleError(f"plan: collective {name!r} is not understood; known: {known}")
    if (protocol := top.text("protocol")) not in _PROTOCOLS:
        raise ScheduleError(f"plan: protocol {protocol!r} is not understood; known: {', '.join(_PROTOCOLS)}")
    try:
        collective = Collective(name=COLLECTIVE_NAMES.get(name, "all_to_all"), num_ranks=len(gpus))
    except MycelError as error:
        raise ScheduleError(f"plan: {error}") from None
    message_bytes = _check_numbers(top)
    chunks = tuple({key: gpu.whole(f"{word}_chunks") for key, word in BUFFERS.items()} for gpu in gpus)
    _check_chunks(collective, chunks, is_whole=name == SENDRECV)
    connected = [_connected(gpu, len(gpus), rank) for rank, gpu in enumerate(gpus)]
    switches = [_switches(gpu, len(gpus), rank) for rank, gpu in enumerate(gpus)]
    _match_switches(switches)
    semaphores = tuple(_initial(gpu) for gpu in gpus)
    blocks = tuple(
        _blocks(gpu, rank, chunks, connected[rank], switches[rank], len(semaphores[rank]), protocol == "LL")
        for rank, gpu in enumerate(gpus)
    )
    plan = ForeignPlan(
        name=top.text("name"),
        collective=collective,
        is_sendrecv=name == SENDRECV,
        in_place=top.flag("inplace"),
        protocol=protocol,
        chunks=chunks,
        blocks=blocks,
        semaphores=semaphores,
        peers=_pair(connected),
        has_two_scratches="use_double_scratch_buffer" in top.data and top.flag("use_double_scratch_buffer"),
        folds="reuse_resources" in top.data and top.flag("reuse_resources"),
        message_bytes=message_bytes,
    )
    _check_scratch(plan)
    return plan


def _check_numbers(top: Entry) -> tuple[int, int]:
    """Check threads and alignment; the least and greatest length of messages."""
    threads = top.whole("num_threads_per_block") if "num_threads_per_block" in top.data else MAX_THREADS
    if not 0 < threads <= MAX_THREADS or threads % 32:
        raise ScheduleError(f"plan: {threads} threads a block; a multiple of 32 up to {MAX_THREADS} is needed")
    alignment = top.whole("buffer_alignment") if "buffer_alignment" in top.data else ALIGNMENT
    if not alignment or alignment % ALIGNMENT:
        raise ScheduleError(f"plan: buffer_alignment {alignment} is no multiple of {ALIGNMENT}")
    least, most = (
        top.whole(key, below=1 << 64) if key in top.data else default
        for key, default in (("min_message_size", 0), ("max_message_size", (1 << 64) - 1))
    )
    if least > most:
        raise ScheduleError(f"plan: min_message_size {least} is above max_message_size {most}")
    return least, most


def _check_chunks(collective: Collective, chunks: Sequence[Mapping[str, int]], *, is_whole: bool) -> None:
    name, n = collective.name, collective.num_ranks
    for rank, mine in enumerate(chunks):
        given, got = mine["i"], mine["o"]
        expected = {"all_gather": given * n, "reduce_scatter": given // n}.get(name, given)
        whole_blocks = is_whole or name in ("all_gather", "all_reduce") or given % n == 0
        if not given or got != expected or not whole_blocks or given != chunks[0]["i"]:
            raise ScheduleError(
                f"GPU {rank}: {given} input_chunks and {got} output_chunks do not make an "
                f"{SENDRECV if is_whole else name} over {n} ranks of chunks of one size, the same on every GPU"
            )


def _check_scratch(plan: ForeignPlan) -> None:
    """Packets and plain data never share a rank's scratch, and plain data no scratch of two halves of another's."""
    packets = {span.rank for _, op in _all(plan) for span in (*op.sources, *op.targets) if span.is_packet}
    for (rank, number), op in _all(plan):
        for span in (*op.sources, *op.targets):
            if span.buffer != "s" or span.is_packet:
                continue
            where = f"GPU {rank}, thread block {number}, op {op.at} ({op.name})"
            if span.rank in packets:
                raise ScheduleError(
                    f"{where}: plain data in scratch of rank {span.rank}, where packets stand: they take twice the "
                    "place, so that a chunk's number means another place for them"
                )
            if plan.has_two_scratches and span.rank != rank:
                raise ScheduleError(
                    f"{where}: plain data in scratch of rank {span.rank}; with use_double_scratch_buffer the runtime "
                    "finds the half of the run there for packets only"
                )


def _all(plan: ForeignPlan) -> Iterator[tuple[tuple[int, int], Operation]]:
    for rank, blocks in enumerate(plan.blocks):
        for number, block in enumerate(blocks):
            for op in block:
                for each in op.inner or (op,):
                    yield (rank, number), each


def _initial(gpu: Entry) -> tuple[int, ...]:
    """What the GPU's semaphores count at the start."""
    given = gpu.items("semaphores", least=0) if "semaphores" in gpu.data else ()
    return tuple(Entry(each, f"{gpu.where}, semaphores").whole("init_value") for each in given)


def _connected(gpu: Entry, num_ranks: int, rank: int) -> dict[str, list[int]]:
    """To whom the channels of each kind lead, in the order in which the runtime numbers them."""
    peers: dict[str, list[int]] = {kind: [] for kind in _TWO_ENDED}
    for number, entry in enumerate(gpu.items("channels", least=0)):
        channel = Entry(entry, f"{gpu.where}, channels {number}")
        kind = channel.kind("channel_type")
        if kind == "switch":
            continue
        for peer in channel.numbers("connected_to", below=num_ranks, most=1 << 16):
            if peer == rank:
                raise ScheduleError(f"{channel.where}: a channel leads from rank {rank} to itself")
            peers[kind].append(peer)
    return peers


def _switches(gpu: Entry, num_ranks: int, rank: int) -> list[Switch]:
    """The GPU's switch channels, in the order in which the runtime numbers them."""
    made: list[Switch] = []
    for number, entry in enumerate(gpu.items("channels", least=0)):
        channel = Entry(entry, f"{gpu.where}, channels {number}")
        if channel.kind("channel_type") != "switch":
            continue
        letter = channel.text("buffer_type")
        if letter not in BUFFERS:
            raise ScheduleError(f"{channel.where}: unknown buffer {letter!r}; known: i, o, s")
        for each in channel.items("rank_groups"):
            group = Entry(each, f"{channel.where}, rank_groups")
            ranks = group.numbers("ranks", below=num_ranks, most=num_ranks)
            if (
                rank not in ranks
                or len(set(ranks)) != len(ranks)
                or group.whole("size") != len(ranks)
                or len(ranks) < 2
            ):
                raise ScheduleError(
                    f"{group.where}: a group of {group.whole('size')} ranks {ranks}; expected that many different "
                    f"ones, at least two, and rank {rank} among them"
                )
            made.append(Switch(tuple(sorted(ranks)), letter))
    return made


def _match_switches(switches: Sequence[Sequence[Switch]]) -> None:
    """All ranks of a group must make the same channels, for they make each together."""
    for rank, mine in enumerate(switches):
        for switch, count in Counter(mine).items():
            for other in switch.ranks:
                if (theirs := switches[other].count(switch)) != count:
                    raise ScheduleError(
                        f"GPU {rank}: {count} switch channels to {BUFFERS[switch.buffer]} of ranks "
                        f"{', '.join(map(str, switch.ranks))}, but rank {other} has {theirs}; all make them together"
                    )


def _pair(connected: Sequence[Mapping[str, Sequence[int]]]) -> dict[End, End]:
    """Channels between two ranks meet in the order in which both list them; what is left over leads nowhere."""
    known: dict[tuple[str, int, int], list[int]] = {}
    for rank, kinds in enumerate(connected):
        for kind, peers in kinds.items():
            for number, peer in enumerate(peers):
                known.setdefault((kind, rank, peer), []).append(number)
    return {
        End(rank, kind, ours): End(peer, kind, theirs)
        for (kind, rank, peer), numbers in known.items()
        for ours, theirs in zip(numbers, known.get((kind, peer, rank), []), strict=False)
    }


def _remote_buffers(gpu: Entry, rank: int, num_ranks: int) -> list[tuple[int, str, frozenset[str]]]:
    """Buffers of other ranks that the GPU can reach: owner, letter, and over which kinds of channels."""
    buffers: list[tuple[int, str, frozenset[str]]] = []
    for number, entry in enumerate(gpu.items("remote_buffers", least=0)):
        buffer = Entry(entry, f"{gpu.where}, remote buffer {number}")
        letter, owner = buffer.text("type"), buffer.whole("rank", below=num_ranks)
        if letter not in BUFFERS or owner == rank:
            raise ScheduleError(f"{buffer.where}: buffer {letter!r} of rank {owner} is none of another rank's")
        kinds = frozenset(
            Entry({"kind": kind}, buffer.where).kind("kind", _TWO_ENDED)
            for kind in buffer.items("access_channel_types")
        )
        buffers.append((owner, letter, kinds))
    return buffers


def _blocks(
    gpu: Entry,
    rank: int,
    chunks: Sequence[Mapping[str, int]],
    connected: Mapping[str, Sequence[int]],
    switches: Sequence[Switch],
    num_semaphores: int,
    is_packets: bool,
) -> tuple[tuple[Operation, ...], ...]:
    buffers = _remote_buffers(gpu, rank, len(chunks))
    blocks: list[tuple[Operation, ...]] = []
    for number, entry in enumerate(gpu.items("threadblocks", least=0)):
        block = Entry(entry, f"{gpu.where}, thread block {number}")
        block.expect("id", number)
        ends: dict[str, list[End]] = {kind: [] for kind in _TWO_ENDED}
        behind: list[Switch] = []
        for each in block.items("channels", least=0):
            channel = Entry(each, f"{block.where}, channels")
            kind = channel.kind("channel_type")
            known = len(switches) if kind == "switch" else len(connected[kind])
            here = channel.numbers("channel_ids", below=known, most=MAX_CHANNELS)
            if kind == "switch":
                behind += [switches[index] for index in here]
            else:
                ends[kind] += [End(rank, kind, index) for index in here]
        remote: dict[str, list[tuple[int, str]]] = {kind: [] for kind in _TWO_ENDED}
        for each in block.items("remote_buffer_refs", least=0) if "remote_buffer_refs" in block.data else ():
            reference = Entry(each, f"{block.where}, remote_buffer_refs")
            kind = reference.kind("access_channel_type", _TWO_ENDED)
            for index in reference.numbers("remote_buffer_ids", below=len(buffers), most=MAX_CHANNELS):
                owner, letter, kinds = buffers[index]
                if kind not in kinds:
                    raise ScheduleError(f"{reference.where}: remote buffer {index} is not open to {kind} channels")
                remote[kind].append((owner, letter))
        limited: list[tuple[int, str, str]] = [(len(behind), "switch", "channels")]
        for kind in _TWO_ENDED:
            limited += [(len(ends[kind]), kind, "channels"), (len(remote[kind]), kind, "remote buffers")]
        for count, kind, what in limited:
            if count > MAX_CHANNELS:
                raise ScheduleError(f"{block.where}: {count} {kind} {what}; at most {MAX_CHANNELS} are allowed")
        scope = Scope(
            rank=rank,
            chunks=chunks,
            ends=ends,
            switches=behind,
            remote=remote,
            num_semaphores=num_semaphores,
            is_packets=is_packets,
        )
        blocks.append(read_operations(block, scope))
    return tuple(blocks)
