"""Prepared programs: a program's instructions as the flat integer arrays that the engine reads.

A program is prepared once (``mycel.runtime.forms``) and run many times; a run gets its own job (buffers, sequence
number, deadline) but shares these arrays, which is safe because a communicator runs its jobs one after the other.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mycel.collectives.program import Channel, Program
from mycel.runtime import job_fields as j
from mycel.runtime.forks import let_go_in_children
from mycel.runtime.streaming import cache_bytes

__all__ = [
    "LINE",
    "PREPARED",
    "Held",
    "Job",
    "Line",
    "Origin",
    "Part",
    "Prepared",
    "PreparedCache",
    "Traffic",
    "asking",
    "origin_of",
]

#: Looks at rings before sleeping, some 50 us: twice what a sleep and a wake cost.
_ROUNDS = 512

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a program was made for.

    Attributes:
        collective, root: whose schedule it is of.
        method, piece_bytes: of the schedule.
        even: all blocks of the array are of one length.
    """

    collective: str
    root: int | None
    method: str
    piece_bytes: int
    even: bool


@lru_cache(maxsize=1024)
def origin_of(collective: str, root: int | None, method: str, piece_bytes: int, even: bool) -> Origin:
    """The same for the same arguments, while it is remembered."""
    return Origin(collective=collective, root=root, method=method, piece_bytes=piece_bytes, even=even)


#: Fields of a channel that are its ``Line``.
LINE = (j.C_FD, j.C_RING, j.C_CAPACITY, j.C_BELL, j.C_OWN_BELL, j.C_ARENA, j.C_ARENA_BYTES)


class Line(NamedTuple):
    """What an open channel is for the engine.

    Attributes:
        descriptor: of its socket; -1: it is not open yet.
        ring, capacity: address of its ring and the bytes that it holds; zeros where it has none.
        bell: wakes the other end of the ring.
        own_bell: wakes this end, of a ring that comes in.
        arena, arena_bytes: where the sender's arena is mapped, of a ring that comes in; zeros where it is not.
    """

    descriptor: int
    ring: int = 0
    capacity: int = 0
    bell: int = -1
    own_bell: int = -1
    arena: int = 0
    arena_bytes: int = 0


def _nobody() -> None:
    """Whose preparation has not been made, or was never."""


@dataclass(slots=True, kw_only=True, eq=False)
class Traffic:
    """What a program moves, for those who tell of it later; keeps no array of the program alive.

    Not frozen, as ``Prepared``.

    Attributes:
        origin: what it was made for; ``None`` where nobody said so.
        channels: of the program.
        moved: bytes that a run moves on each of them, and then messages.
        prepared: the preparation while somebody else keeps it, then ``None``.
    """

    origin: Origin | None
    channels: tuple[Channel, ...]
    moved: tuple[int, ...]
    prepared: Callable[[], Prepared | None] = _nobody

    @property
    def num_bytes(self) -> tuple[int, ...]:
        """Bytes that a run moves on each channel."""
        return self.moved[: len(self.channels)]

    @property
    def num_messages(self) -> tuple[int, ...]:
        """Messages of a run on each channel."""
        return self.moved[len(self.channels) :]

    def state(self) -> Ints | None:
        """The rows of the channels as they are, while somebody keeps them."""
        prepared = self.prepared()
        return None if prepared is None else prepared.channel_rows


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Prepared:
    """Arrays the engine reads for one program on given sockets.

    Not frozen, for to make a frozen object of so many parts takes as long as to fill in the arrays.

    Attributes:
        plan: what it was made from.
        lengths: elements of the array, of a piece, and of each block where they differ.
        item_bytes: bytes of an element.
        block: all integers, one part behind the other.
        scratch: the SCRATCH buffer, or more.
        staging: where bytes to be reduced arrive, a part for each incoming channel.
        extras: control descriptors to watch during a run; the array may be changed in place by its owner.
        asking: how long to ask rings again; of the group.
        traffic: what a run moves.
        addresses, scratch_address, watched, asking_address, total_bytes: the part of a job's fields that every run
            shares.
        num_bytes: memory that is this preparation's own, some 1 KB of objects included.
    """

    plan: Part
    lengths: tuple[int, int, tuple[int, ...] | None]
    item_bytes: int
    block: Ints
    scratch: Bytes
    staging: Bytes
    extras: Ints
    traffic: Traffic
    addresses: tuple[int, ...]
    scratch_address: int
    asking: Ints
    watched: tuple[int, int, int]
    asking_address: int
    total_bytes: int
    num_bytes: int

    def part(self, field: int, length: int) -> Ints:
        """An array of the block, by the field of a job that has its address."""
        first = (self.addresses[field - j.J_NUM_ROWS] - self.addresses[j.J_ROWS - j.J_NUM_ROWS]) // 8
        return self.block[first : first + length]

    def attach(self, lines: Sequence[Line]) -> None:
        """Take the plan's channels, now that all are open."""
        if lines:
            self.channel_rows[:, list(LINE)] = lines

    @property
    def channel_rows(self) -> Ints:
        """State of each channel, shape ``[channels, CHANNEL_FIELDS]``."""
        num_channels = self.addresses[1]
        return self.part(j.J_CHANNELS, num_channels * j.CHANNEL_FIELDS).reshape(num_channels, j.CHANNEL_FIELDS)

    @property
    def program(self) -> Program:
        """The same program for people and checkers; made anew each time."""
        num_elements, piece_elements, block_elements = self.lengths
        return self.plan.expand(num_elements, piece_elements, block_elements=block_elements)


class Part(Protocol):
    """One rank's part of what serves calls, whatever their length: of a schedule, or of a plan."""

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Of this rank."""

    @property
    def rank(self) -> int:
        """Whose part."""

    def expand(
        self, num_elements: int, piece_elements: int, *, block_elements: Sequence[int] | None = None
    ) -> Program:
        """The rank's program for one length."""


class Held(Protocol):
    """What a cache keeps."""

    @property
    def num_bytes(self) -> int:
        """Memory it holds."""


class PreparedCache:
    """Preparations of all groups of a process, for either engine, those not used for longest forgotten first.

    One bound for all of them: a mesh has many groups, and a training step few shapes in each.

    Args:
        limit_bytes: memory that preparations may hold; the last one stays, however large.
        limit: how many of them at most.

    Attributes:
        num_bytes: memory that they hold.
    """

    def __init__(self, limit_bytes: int, limit: int = 2048) -> None:
        self.limit_bytes, self.limit = limit_bytes, limit
        self.num_bytes = 0
        self._kept: OrderedDict[tuple[int, Hashable], Any] = OrderedDict()
        self._lock = threading.RLock()  # a signal handler may call a collective while this very thread holds it
        self._owners = itertools.count()

    def new_owner(self) -> int:
        """A number to keep things under; no other owner has it, nor gets it later."""
        let_go_in_children(self)
        return next(self._owners)

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, owner: int, key: Hashable) -> Any | None:
        """What ``owner`` keeps under a key, if it is still there."""
        with self._lock:
            found = self._kept.get((owner, key))
            if found is not None:
                self._kept.move_to_end((owner, key))
            return found

    def put(self, owner: int, key: Hashable, prepared: Held) -> None:
        """Keep a preparation."""
        with self._lock:
            if (before := self._kept.pop((owner, key), None)) is not None:  # two threads of a group made the same
                self.num_bytes -= before.num_bytes
            self._kept[owner, key] = prepared
            self.num_bytes += prepared.num_bytes
            while (self.num_bytes > self.limit_bytes and len(self._kept) > 1) or len(self._kept) > self.limit:
                _, dropped = self._kept.popitem(last=False)
                self.num_bytes -= dropped.num_bytes

    def forget(self, owner: int) -> None:
        """Drop all that an owner keeps."""
        with self._lock:
            for key in [key for key in self._kept if key[0] == owner]:
                self.num_bytes -= self._kept.pop(key).num_bytes

    def after_fork_in_child(self) -> None:
        """Of the threads that may have held the lock, none is here."""
        self._lock = threading.RLock()


#: Of this process. One preparation for 64 MB over 8 ranks takes 0.2 MB, most take 2 KB and are made anew in 20 us.
PREPARED = PreparedCache(64 << 20)


def asking(num_neighbours: int, bell: int, arena: tuple[int, int] = (0, 0)) -> Ints:
    """What the jobs of a group know together of how long asking a ring again has paid: the ``ASK_*`` integers.

    Args:
        num_neighbours: ranks of the group on this node. Where they are more than processors, one that asks keeps
            another from answering, so it lets go of the processor now and then.
        bell: this rank's, which those ring that have made room in its rings; -1: none.
        arena: address and bytes of what this process shares with the other ranks of its node.
    """
    crowded = num_neighbours > len(os.sched_getaffinity(0))
    large = cache_bytes() // num_neighbours
    return np.array([_ROUNDS, _ROUNDS, int(crowded), bell, 1, *arena, large], dtype=np.int64)


class Job:
    """One run of a prepared program. Keeps alive everything whose address the engine holds.

    Args:
        prepared: the program.
        bases: addresses of INPUT and OUTPUT.
        dtype, reduce_op, divisor: codes of ``reduce_kernels``; divisor 0 leaves sums undivided.
        header: sequence number and kind, as every rank must state them; number 0: the next one when it is queued, or
            begins.
        limit_ns: after which to give up, from when it begins.
        keep: objects that own the buffers.
        numbers_address: of the last number that was given, where the job takes the next.
    """

    __slots__ = ("address", "fields", "keep", "prepared")

    def __init__(
        self,
        prepared: Prepared,
        *,
        bases: tuple[int, int],
        dtype: int,
        reduce_op: int,
        divisor: int,
        header: tuple[int, int],
        limit_ns: int,
        keep: tuple[object, ...],
        numbers_address: int = 0,
    ) -> None:
        # One assignment for all fields: this runs once a call, where a small message counts microseconds.
        fields = np.zeros(j.JOB_FIELDS, dtype=np.int64)
        address: int = fields.__array_interface__["data"][0]
        fields[: j.J_WORK + 1] = (
            j.PENDING,
            *prepared.addresses,
            *bases,
            prepared.scratch_address,
            dtype,
            reduce_op,
            divisor,
            -1,
            j.HEADER_MAGIC,
            *header,
            prepared.total_bytes,
            0,
            *prepared.watched,
            0,
            0,
            0,
            0,
            prepared.item_bytes,
            limit_ns,
            numbers_address,
            -1,
            prepared.asking_address,
            0,
            address + (j.J_WORK + 1) * 8,
        )
        self.prepared = prepared
        self.fields = fields
        self.keep = keep
        self.address = address

    @classmethod
    def again(cls, prepared: Prepared, fields: Ints, address: int, keep: tuple[object, ...]) -> Job:
        """A run whose fields were copied from a pattern.

        Args:
            prepared: the program.
            fields: of the run; their memory stays.
            address: of the fields.
            keep: objects that own the buffers.
        """
        made = cls.__new__(cls)
        made.prepared, made.fields, made.address, made.keep = prepared, fields, address, keep
        return made

    def pattern(self) -> Ints:
        """Fields to be copied for runs of the same program with other arrays in place; see ``engine.again``."""
        fields = self.fields.copy()
        fields[j.J_STATUS], fields[j.J_REMAINING], fields[j.J_HEADER + 1], fields[j.J_POSITION] = j.PENDING, -1, 0, -1
        return fields

    @property
    def done(self) -> bool:
        """Whether the run is over and right."""
        return bool(self.fields[j.J_STATUS] == j.DONE)

    def waiting_for(self) -> tuple[int, ...]:
        """Peers on whose sockets the run is waiting right now."""
        p, peers = self.prepared, set()
        if self.fields[j.J_REMAINING] < 0:
            return ()
        num_rows, num_channels, *_ = p.addresses
        queue_start, queue = p.part(j.J_QUEUE_START, num_channels + 1), p.part(j.J_QUEUE, num_rows)
        pending = p.part(j.J_PENDING, num_rows)
        for number, channel in enumerate(p.plan.channels):
            position = int(queue_start[number] + p.channel_rows[number, j.C_HEAD])
            is_stuck = position < queue_start[number + 1] and pending[queue[position]] == 0
            if is_stuck or p.channel_rows[number, j.C_BLOCKED] & j.NOT_TAKEN:
                peers.add(channel.dst if channel.src == p.plan.rank else channel.src)
        return tuple(sorted(peers))
