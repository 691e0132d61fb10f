"""Prepared programs: a program's instructions as the flat integer arrays that the engine reads.

A program is prepared once and run many times; a run gets its own job (buffers, sequence number, deadline) but shares
these arrays, which is safe because a communicator runs its jobs one after the other.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mycel.collectives.program import Channel, Op, Program
from mycel.runtime import engine as e
from mycel.runtime.forks import let_go_in_children

__all__ = ["PREPARED", "Held", "Job", "Origin", "Prepared", "PreparedCache", "Traffic", "prepare"]

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traffic:
    """What a program moves, for those who tell of it later; keeps no array of the program alive.

    Attributes:
        origin: what it was made for; ``None`` where nobody said so.
        channels: of the program.
        num_bytes, num_messages: that a run moves on each of them.
        state: the rows of the channels while somebody else keeps them, then ``None``.
    """

    origin: Origin | None
    channels: tuple[Channel, ...]
    num_bytes: tuple[int, ...]
    num_messages: tuple[int, ...]
    state: Callable[[], Ints | None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """Arrays the engine reads for one program on given sockets.

    Attributes:
        program: what it was made from.
        item_bytes: bytes of an element.
        channel_rows: state of each channel, shape ``[channels, CHANNEL_FIELDS]``.
        scratch: the SCRATCH buffer.
        staging: where bytes to be reduced arrive, a part for each incoming channel.
        extras: control descriptors to watch during a run; the array may be changed in place by its owner.
        poll: the array that the engine hands to ``poll``.
        traffic: what a run moves.
        addresses, scratch_address, watched, total_bytes: the part of a job's fields that every run shares.
    """

    program: Program
    item_bytes: int
    rows: Ints
    pending0: Ints
    pending: Ints
    dependent_start: Ints
    dependents: Ints
    queue_start: Ints
    queue: Ints
    channel_rows: Ints
    scratch: Bytes
    staging: Bytes
    extras: Ints
    poll: Ints
    traffic: Traffic
    addresses: tuple[int, ...]
    scratch_address: int
    watched: tuple[int, int, int]
    total_bytes: int

    def attach(self, descriptors: Sequence[int]) -> None:
        """Take the sockets of the program's channels, now that all are open."""
        self.channel_rows[:, e.C_FD] = descriptors

    @property
    def num_bytes(self) -> int:
        """Memory this preparation holds, some 2 KB of objects included."""
        shared = (self.program.columns, self.program.need_start, self.program.need_index)
        own = (self.rows, self.pending0, self.pending, self.dependent_start, self.dependents, self.queue)
        return 2048 + sum(array.nbytes for array in (*shared, *own, self.scratch, self.staging))


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

    Attributes:
        num_bytes: memory that they hold.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
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
            while self.num_bytes > self.limit_bytes and len(self._kept) > 1:
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


#: Of this process. One preparation for 64 MB over 8 ranks takes about 2 MB.
PREPARED = PreparedCache(64 << 20)


def prepare(
    program: Program,
    item_bytes: int,
    descriptors: Sequence[int],
    extras: Ints,
    *,
    states_channel_bytes: bool = False,
    origin: Origin | None = None,
) -> Prepared:
    """Lay a program out for the engine.

    Args:
        program: one rank's program.
        item_bytes: bytes of an element.
        descriptors: socket of each of the program's channels; -1 where it is not open yet, see ``Prepared.attach``.
        extras: control descriptors, at least one (-1 for none).
        states_channel_bytes: headers state the bytes on their channel, for a rank may not know how long the blocks
            between others are; else those of the whole array.
        origin: what the program was made for, to be told later.
    """
    c = program.columns
    rows = np.zeros((len(c), e.ROW_FIELDS), dtype=np.int64)
    rows[:, e.R_OP] = c["op"]
    rows[:, e.R_CHANNEL] = c["channel"]
    rows[:, e.R_ADDRESS_BUFFER] = c["buffer"]
    rows[:, e.R_OFFSET] = c["offset"] * item_bytes
    rows[:, e.R_BYTES] = c["count"] * item_bytes
    rows[:, e.R_OPERAND_BUFFER] = c["operand_buffer"]
    rows[:, e.R_OPERAND_OFFSET] = c["operand_offset"] * item_bytes
    rows[:, e.R_FINAL] = c["final"]
    pending0 = np.diff(program.need_start).astype(np.int64)
    needing = np.repeat(np.arange(len(c), dtype=np.int64), pending0)
    by_needed = np.argsort(program.need_index, kind="stable")
    dependent_start = np.zeros(len(c) + 1, dtype=np.int64)
    np.cumsum(np.bincount(program.need_index, minlength=len(c)), out=dependent_start[1:])
    queue_start, queue = _queues(c["channel"], len(program.channels))
    channel_rows, staging = _channels(program, rows, descriptors)
    total_bytes = program.num_elements * item_bytes
    if states_channel_bytes:
        wire = rows[rows[:, e.R_CHANNEL] >= 0]
        np.add.at(channel_rows[:, e.C_STATED], wire[:, e.R_CHANNEL], wire[:, e.R_BYTES])
    else:
        channel_rows[:, e.C_STATED] = total_bytes
    # One spare element each: an empty array has no address to read from.
    dependents, queue = np.append(needing[by_needed], 0), np.append(queue, 0)
    pending = np.zeros(len(c), dtype=np.int64)
    scratch = np.zeros(max(1, program.scratch_elements * item_bytes), dtype=np.uint8)
    poll = np.zeros(len(channel_rows) + len(extras), dtype=np.int64)
    read = (rows, pending0, pending, dependent_start, dependents, queue_start, queue, channel_rows)
    return Prepared(
        program=program,
        item_bytes=item_bytes,
        rows=rows,
        pending0=pending0,
        pending=pending,
        dependent_start=dependent_start,
        dependents=dependents,
        queue_start=queue_start,
        queue=queue,
        channel_rows=channel_rows,
        scratch=scratch,
        staging=staging,
        extras=extras,
        poll=poll,
        traffic=_traffic(program, origin, rows, queue_start, channel_rows),
        addresses=(len(c), len(channel_rows), *(array.ctypes.data for array in read)),
        scratch_address=scratch.ctypes.data,
        watched=(poll.ctypes.data, len(extras), extras.ctypes.data),
        total_bytes=total_bytes,
    )


def _queues(channel_of_row: npt.NDArray[Any], num_channels: int) -> tuple[Ints, Ints]:
    wire = np.flatnonzero(channel_of_row >= 0)
    order = wire[np.argsort(channel_of_row[wire], kind="stable")]
    start = np.zeros(num_channels + 1, dtype=np.int64)
    np.cumsum(np.bincount(channel_of_row[wire], minlength=num_channels), out=start[1:])
    return start, order.astype(np.int64)


def _traffic(program: Program, origin: Origin | None, rows: Ints, queue_start: Ints, channel_rows: Ints) -> Traffic:
    moved = np.zeros(len(program.channels), dtype=np.int64)
    wire = rows[rows[:, e.R_CHANNEL] >= 0]
    np.add.at(moved, wire[:, e.R_CHANNEL], wire[:, e.R_BYTES])
    return Traffic(
        origin=origin,
        channels=program.channels,
        num_bytes=tuple(moved.tolist()),
        num_messages=tuple(np.diff(queue_start).tolist()),
        state=weakref.ref(channel_rows),
    )


def _channels(program: Program, rows: Ints, descriptors: Sequence[int]) -> tuple[Ints, Bytes]:
    table = np.zeros((len(program.channels), e.CHANNEL_FIELDS), dtype=np.int64)
    longest = np.zeros(len(program.channels), dtype=np.int64)
    reducing = rows[:, e.R_OP] == Op.RECV_REDUCE
    np.maximum.at(longest, rows[reducing, e.R_CHANNEL], rows[reducing, e.R_BYTES])
    longest = -(-longest // 64) * 64
    staging = np.zeros(int(longest.sum()) + 64, dtype=np.uint8)
    base = -(-staging.ctypes.data // 64) * 64
    for number, channel in enumerate(program.channels):
        table[number, e.C_FD] = descriptors[number]
        table[number, e.C_OUTGOING] = channel.src == program.rank
        table[number, e.C_STAGING] = base + int(longest[:number].sum())
    return table, staging


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
        fields = np.zeros(e.JOB_FIELDS, dtype=np.int64)
        address: int = fields.__array_interface__["data"][0]
        fields[: e.J_WORK + 1] = (
            e.PENDING,
            *prepared.addresses,
            *bases,
            prepared.scratch_address,
            dtype,
            reduce_op,
            divisor,
            -1,
            e.HEADER_MAGIC,
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
            address + (e.J_WORK + 1) * 8,
        )
        self.prepared = prepared
        self.fields = fields
        self.keep = keep
        self.address = address

    @property
    def done(self) -> bool:
        """Whether the run is over and right."""
        return bool(self.fields[e.J_STATUS] == e.DONE)

    def waiting_for(self) -> tuple[int, ...]:
        """Peers on whose sockets the run is waiting right now."""
        p, peers = self.prepared, set()
        if self.fields[e.J_REMAINING] < 0:
            return ()
        for number, channel in enumerate(p.program.channels):
            position = int(p.queue_start[number] + p.channel_rows[number, e.C_HEAD])
            if position < p.queue_start[number + 1] and p.pending[p.queue[position]] == 0:
                peers.add(channel.dst if channel.src == p.program.rank else channel.src)
        return tuple(sorted(peers))
