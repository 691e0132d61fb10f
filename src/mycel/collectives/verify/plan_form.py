"""Reads MSCCL++ execution plans: from JSON to plain data, with every limit checked that the runtime leaves unchecked.

The runtime copies operations, channels and buffers into arrays of fixed length and computes addresses from indices
without looking at either; a plan that is too large or points beyond a buffer overwrites memory there. Here it is an
error that names GPU, thread block and operation.

References:
    microsoft/mscclpp, ``src/core/executor/execution_plan.cc`` (keys), ``src/core/include/execution_common.hpp``
    (limits), ``src/core/include/execution_kernel.hpp`` (what operations do).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mycel.collectives.spec import Collective, CollectiveName
from mycel.errors import MycelError, ScheduleError

__all__ = ["COLLECTIVE_NAMES", "SUPPORTED", "Chunks", "End", "ForeignPlan", "Operation", "read_plan"]

#: Collectives by their names in plans. Plans have no place for a root.
COLLECTIVE_NAMES: dict[str, CollectiveName] = {
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
}
#: Operations that are understood; packets, switch channels and pipelines are not.
SUPPORTED = (
    "nop", "barrier", "put", "pws", "pwsf", "get", "copy", "signal", "wait", "rlxsignal", "rlxwait", "flush",
    "re", "res", "rre", "rres", "sem_acquire", "sem_release",
)  # fmt: skip
MAX_OPERATIONS = 64
MAX_CHANNELS = 16
MAX_CHANNELS_AN_OPERATION = 8
MAX_BUFFERS_AN_OPERATION = 10
MAX_SEMAPHORES_AN_OPERATION = 16
MAX_BARRIERS = 16
MAX_THREADS = 1024
_MAX_RANKS = 1 << 14
_PUTS = ("put", "pws", "pwsf")
_KINDS = ("memory", "port")
#: A reduction works on 16 bytes at a time and misplaces what is left over.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks ``index .. index+size-1`` of a rank's buffer ``"i"``, ``"o"`` or ``"s"``."""

    rank: int
    buffer: str
    index: int
    size: int


@dataclass(frozen=True, slots=True)
class End:
    """One end of a channel: the ``number``-th of its kind at a rank."""

    rank: int
    kind: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation; what it has no use for is empty."""

    name: str
    kind: str = ""
    sources: tuple[Chunks, ...] = ()
    targets: tuple[Chunks, ...] = ()
    ends: tuple[End, ...] = ()
    semaphores: tuple[int, ...] = ()
    barrier: int = -1
    num_blocks: int = 0


@dataclass(frozen=True, kw_only=True)
class ForeignPlan:
    """A plan of well-formed operations.

    Attributes:
        chunks: of each rank, chunks in its buffers ``"i"``, ``"o"`` and ``"s"``.
        blocks: of each rank, the operations of each thread block.
        semaphores: of each rank, what its semaphores count at the start.
        peers: the other end of every channel that has one.
    """

    name: str
    collective: Collective
    in_place: bool
    chunks: tuple[Mapping[str, int], ...]
    blocks: tuple[tuple[tuple[Operation, ...], ...], ...]
    semaphores: tuple[tuple[int, ...], ...]
    peers: Mapping[End, End]


def read_plan(data: Any) -> ForeignPlan:
    """The plan in a JSON value.

    Raises:
        ScheduleError: malformed, beyond a limit, or it uses something that is not understood; the message names the
            GPU, thread block and operation.
    """
    top = _Object(data, "plan")
    gpus = [_Object(gpu, f"GPU {rank}") for rank, gpu in enumerate(top.items("gpus", most=_MAX_RANKS))]
    for rank, gpu in enumerate(gpus):
        gpu.expect("id", rank)
    name = top.text("collective")
    if name not in COLLECTIVE_NAMES:
        raise ScheduleError(f"plan: collective {name!r} is not understood; known: {', '.join(COLLECTIVE_NAMES)}")
    if (protocol := top.text("protocol")) != "Simple":
        raise ScheduleError(f"plan: protocol {protocol!r} is not understood; only 'Simple' is")
    try:
        collective = Collective(name=COLLECTIVE_NAMES[name], num_ranks=len(gpus))
    except MycelError as error:
        raise ScheduleError(f"plan: {error}") from None
    _check_numbers(top)
    chunks = tuple({key: gpu.whole(f"{word}_chunks") for key, word in _BUFFERS.items()} for gpu in gpus)
    _check_chunks(collective, chunks)
    connected = [_connected(gpu, len(gpus), rank) for rank, gpu in enumerate(gpus)]
    semaphores = tuple(_initial(gpu) for gpu in gpus)
    return ForeignPlan(
        name=top.text("name"),
        collective=collective,
        in_place=top.flag("inplace"),
        chunks=chunks,
        blocks=tuple(
            _blocks(gpu, rank, chunks, connected[rank], len(semaphores[rank])) for rank, gpu in enumerate(gpus)
        ),
        semaphores=semaphores,
        peers=_pair(connected),
    )


_BUFFERS = {"i": "input", "o": "output", "s": "scratch"}


class _Object:
    """A JSON object and where it stands."""

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, Mapping):
            raise ScheduleError(f"{where}: expected an object, got {type(data).__name__}")
        self.data: Mapping[str, Any] = data
        self.where = where

    def get(self, key: str) -> Any:
        if key not in self.data:
            raise ScheduleError(f"{self.where}: lacks the key {key!r}")
        return self.data[key]

    def whole(self, key: str, *, below: int = 1 << 31) -> int:
        return _whole(self.get(key), f"{self.where}: {key}", below)

    def expect(self, key: str, value: int) -> None:
        if (got := self.whole(key)) != value:
            raise ScheduleError(f"{self.where}: {key} is {got}; the runtime looks for it at position {got}")

    def text(self, key: str) -> str:
        if not isinstance(value := self.get(key), str):
            raise ScheduleError(f"{self.where}: {key} is {value!r}; expected text")
        return value

    def flag(self, key: str) -> bool:
        if not isinstance(value := self.get(key), bool):
            raise ScheduleError(f"{self.where}: {key} is {value!r}; expected true or false")
        return value

    def kind(self, key: str) -> str:
        if (value := self.text(key)) not in _KINDS:
            raise ScheduleError(f"{self.where}: {key} {value!r} is not understood; known: {', '.join(_KINDS)}")
        return value

    def items(self, key: str, *, least: int = 1, most: int = 1 << 20) -> Sequence[Any]:
        value = self.get(key)
        if not isinstance(value, list) or len(value) < least:
            raise ScheduleError(f"{self.where}: {key} is no list of at least {least}")
        if len(value) > most:
            raise ScheduleError(f"{self.where}: {len(value)} {key}; at most {most} are allowed")
        return value

    def numbers(self, key: str, *, below: int, most: int) -> list[int]:
        return [_whole(value, f"{self.where}: {key}", below) for value in self.items(key, most=most)]


def _whole(value: Any, what: str, below: int) -> int:
    if not below:
        raise ScheduleError(f"{what} is {value!r}; there is none to name")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < below:
        raise ScheduleError(f"{what} is {value!r}; expected a whole number from 0 to {below - 1}")
    return value


def _check_numbers(top: _Object) -> None:
    threads = top.whole("num_threads_per_block") if "num_threads_per_block" in top.data else MAX_THREADS
    if not 0 < threads <= MAX_THREADS or threads % 32:
        raise ScheduleError(f"plan: {threads} threads a block; a multiple of 32 up to {MAX_THREADS} is needed")
    alignment = top.whole("buffer_alignment") if "buffer_alignment" in top.data else _ALIGNMENT
    if not alignment or alignment % _ALIGNMENT:
        raise ScheduleError(f"plan: buffer_alignment {alignment} is no multiple of {_ALIGNMENT}")
    sizes = [
        top.whole(key, below=1 << 64) if key in top.data else default
        for key, default in (("min_message_size", 0), ("max_message_size", (1 << 64) - 1))
    ]
    if sizes[0] > sizes[1]:
        raise ScheduleError(f"plan: min_message_size {sizes[0]} is above max_message_size {sizes[1]}")


def _check_chunks(collective: Collective, chunks: Sequence[Mapping[str, int]]) -> None:
    name, n = collective.name, collective.num_ranks
    for rank, mine in enumerate(chunks):
        given, got = mine["i"], mine["o"]
        expected = {"all_gather": given * n, "reduce_scatter": given // n}.get(name, given)
        whole_blocks = name in ("all_gather", "all_reduce") or given % n == 0
        if not given or got != expected or not whole_blocks or given != chunks[0]["i"]:
            raise ScheduleError(
                f"GPU {rank}: {given} input_chunks and {got} output_chunks do not make an {name} over {n} ranks of "
                "chunks of one size, the same on every GPU"
            )


def _initial(gpu: _Object) -> tuple[int, ...]:
    """What the GPU's semaphores count at the start."""
    given = gpu.items("semaphores", least=0) if "semaphores" in gpu.data else ()
    return tuple(_Object(each, f"{gpu.where}, semaphores").whole("init_value") for each in given)


def _connected(gpu: _Object, num_ranks: int, rank: int) -> dict[str, list[int]]:
    """To whom the channels of each kind lead, in the order in which the runtime numbers them."""
    peers: dict[str, list[int]] = {kind: [] for kind in _KINDS}
    for number, entry in enumerate(gpu.items("channels", least=0)):
        channel = _Object(entry, f"{gpu.where}, channels {number}")
        kind = channel.kind("channel_type")
        for peer in channel.numbers("connected_to", below=num_ranks, most=1 << 16):
            if peer == rank:
                raise ScheduleError(f"{channel.where}: a channel leads from rank {rank} to itself")
            peers[kind].append(peer)
    return peers


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scope:
    """What the operations of one thread block can refer to."""

    rank: int
    chunks: Sequence[Mapping[str, int]]
    ends: Mapping[str, Sequence[End]]
    remote: Mapping[str, Sequence[tuple[int, str]]]
    num_semaphores: int


def _blocks(
    gpu: _Object,
    rank: int,
    chunks: Sequence[Mapping[str, int]],
    connected: Mapping[str, Sequence[int]],
    num_semaphores: int,
) -> tuple[tuple[Operation, ...], ...]:
    buffers: list[tuple[int, str, frozenset[str]]] = []
    for number, entry in enumerate(gpu.items("remote_buffers", least=0)):
        buffer = _Object(entry, f"{gpu.where}, remote buffer {number}")
        letter, owner = buffer.text("type"), buffer.whole("rank", below=len(chunks))
        if letter not in _BUFFERS or owner == rank:
            raise ScheduleError(f"{buffer.where}: buffer {letter!r} of rank {owner} is none of another rank's")
        kinds = frozenset(
            _Object({"kind": kind}, buffer.where).kind("kind") for kind in buffer.items("access_channel_types")
        )
        buffers.append((owner, letter, kinds))
    blocks: list[tuple[Operation, ...]] = []
    for number, entry in enumerate(gpu.items("threadblocks", least=0)):
        block = _Object(entry, f"{gpu.where}, thread block {number}")
        block.expect("id", number)
        ends: dict[str, list[End]] = {kind: [] for kind in _KINDS}
        for each in block.items("channels", least=0):
            channel = _Object(each, f"{block.where}, channels")
            kind = channel.kind("channel_type")
            here = channel.numbers("channel_ids", below=len(connected[kind]), most=MAX_CHANNELS)
            ends[kind] += [End(rank, kind, index) for index in here]
        remote: dict[str, list[tuple[int, str]]] = {kind: [] for kind in _KINDS}
        for each in block.items("remote_buffer_refs", least=0) if "remote_buffer_refs" in block.data else ():
            reference = _Object(each, f"{block.where}, remote_buffer_refs")
            kind = reference.kind("access_channel_type")
            for index in reference.numbers("remote_buffer_ids", below=len(buffers), most=MAX_CHANNELS):
                owner, letter, kinds = buffers[index]
                if kind not in kinds:
                    raise ScheduleError(f"{reference.where}: remote buffer {index} is not open to {kind} channels")
                remote[kind].append((owner, letter))
        for what, lists in (("channels", ends), ("remote buffers", remote)):
            for kind in _KINDS:
                if len(lists[kind]) > MAX_CHANNELS:
                    raise ScheduleError(
                        f"{block.where}: {len(lists[kind])} {kind} {what}; at most {MAX_CHANNELS} are allowed"
                    )
        scope = _Scope(rank=rank, chunks=chunks, ends=ends, remote=remote, num_semaphores=num_semaphores)
        operations = block.items("ops", least=0, most=MAX_OPERATIONS)
        blocks.append(
            tuple(_operation(_Object(op, f"{block.where}, op {at}"), scope) for at, op in enumerate(operations))
        )
    return tuple(blocks)


def _operation(op: _Object, scope: _Scope) -> Operation:
    name = op.text("name")
    if name not in SUPPORTED:
        raise ScheduleError(f"{op.where}: operation {name!r} is not understood; known: {', '.join(SUPPORTED)}")
    if "tbg_info" in op.data:
        raise ScheduleError(f"{op.where}: {name} is shared by a group of thread blocks, which is not understood")
    op.where += f" ({name})"
    if name == "nop":
        return Operation(name=name)
    if name == "barrier":
        barrier = op.whole("barrier_id", below=MAX_BARRIERS)
        return Operation(name=name, barrier=barrier, num_blocks=op.whole("num_threadblocks"))
    if name in ("sem_acquire", "sem_release"):
        ids = op.numbers("semaphore_ids", below=scope.num_semaphores, most=MAX_SEMAPHORES_AN_OPERATION)
        return Operation(name=name, semaphores=tuple(ids))
    if name in ("signal", "wait", "rlxsignal", "rlxwait", "flush"):
        kind = op.kind("channel_type")
        if name == "flush" and kind != "port":
            raise ScheduleError(f"{op.where}: only port channels can be flushed")
        return Operation(name=name, kind=kind, ends=_ends(op, kind, scope))
    return _data_operation(op, name, scope)


def _ends(op: _Object, kind: str, scope: _Scope) -> tuple[End, ...]:
    known = scope.ends[kind]
    ids = op.numbers("channel_ids", below=len(known), most=MAX_CHANNELS_AN_OPERATION)
    if len(set(ids)) != len(ids):
        raise ScheduleError(f"{op.where}: channel_ids {ids} name one channel twice")
    return tuple(known[index] for index in ids)


#: Of each operation on data: how many local sources and targets, and whether remote ones may follow; -1: any number.
_SHAPES = {
    "copy": (1, False, 1, False),
    "put": (-1, False, 0, True),
    "pws": (-1, False, 0, True),
    "pwsf": (-1, False, 0, True),
    "get": (0, True, -1, False),
    "re": (-1, False, 1, False),
    "res": (-1, False, 1, True),
    "rre": (1, True, 1, False),
    "rres": (1, True, 1, True),
}


def _data_operation(op: _Object, name: str, scope: _Scope) -> Operation:
    local_sources, remote_sources, local_targets, remote_targets = _SHAPES[name]
    kind = op.kind("channel_type") if remote_sources or remote_targets else "memory"
    if name not in {"port": _PUTS, "memory": [known for known in _SHAPES if known not in _PUTS[1:]]}[kind]:
        raise ScheduleError(f"{op.where}: {name} does not work over {kind} channels")
    sources = _spans(op, "src_buff", local_sources, remote_sources, kind, scope)
    targets = _spans(op, "dst_buff", local_targets, remote_targets, kind, scope)
    if len({span.size for span in sources + targets}) != 1:
        raise ScheduleError(f"{op.where}: sources and targets differ in size")
    if name in (*_PUTS, "get") and len(sources) != len(targets):
        raise ScheduleError(f"{op.where}: {len(sources)} sources for {len(targets)} targets")
    if name in ("re", "res", "rre", "rres") and len(sources) < 2:
        raise ScheduleError(f"{op.where}: {name} needs at least two sources")
    if name == "put" and kind == "memory" and len({span.buffer for span in sources}) > 1:
        raise ScheduleError(f"{op.where}: the runtime takes all sources from the first one's buffer")
    if name == "get" and any(a.index != b.index for a, b in zip(sources, targets, strict=True)):
        raise ScheduleError(f"{op.where}: the runtime exchanges the indices of source and target; they must be equal")
    ends: tuple[End, ...] = ()
    if kind == "port":
        ends = _ends(op, kind, scope)
        if len(ends) != len(targets):
            raise ScheduleError(f"{op.where}: {len(ends)} channels for {len(targets)} targets")
    return Operation(name=name, kind=kind, sources=sources, targets=targets, ends=ends)


def _spans(op: _Object, key: str, num_local: int, more: bool, kind: str, scope: _Scope) -> tuple[Chunks, ...]:
    spans: list[Chunks] = []
    for at, entry in enumerate(op.items(key, most=MAX_BUFFERS_AN_OPERATION)):
        buffer = _Object(entry, f"{op.where}, {key} {at}")
        if num_local < 0 or at < num_local:
            owner, letter = scope.rank, buffer.text("type")
            if letter not in _BUFFERS:
                raise ScheduleError(f"{buffer.where}: unknown buffer {letter!r}; known: i, o, s")
        elif more:
            owner, letter = scope.remote[kind][buffer.whole("buffer_id", below=len(scope.remote[kind]))]
        else:
            raise ScheduleError(f"{op.where}: {key} has more than {num_local}")
        index, size, length = buffer.whole("index"), buffer.whole("size"), scope.chunks[owner][letter]
        if not size or index + size > length:
            raise ScheduleError(
                f"{buffer.where}: chunks {index}..{index + size - 1} of {_BUFFERS[letter]} of rank {owner}, "
                f"which has {length}"
            )
        spans.append(Chunks(owner, letter, index, size))
    if len(spans) < num_local:
        raise ScheduleError(f"{op.where}: {key} has {len(spans)}; {num_local} are needed")
    return tuple(spans)
