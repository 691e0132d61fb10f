"""Forms: a plan on a group's channels, from which the arrays of a call of any size are filled in.

What a size does not change stands in a form, once for each plan of a group: the plan's table, the channels and their
sockets, the memory to work in. What it changes is written by compiled code in one pass, into one array, so that a
size never seen before costs a few microseconds more than one that is kept.

Runs of a group follow each other, so they share the memory that they work in; the largest have their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cached_property
from struct import Struct

import numpy as np
import numpy.typing as npt

from mycel.collectives.lower import RankTemplate
from mycel.collectives.rows import TOLD, fill, measure, work_to_measure
from mycel.errors import ScheduleError
from mycel.runtime import job_fields as j
from mycel.runtime.libc import int64_at
from mycel.runtime.prepared import LINE, Line, Origin, Prepared, Traffic
from mycel.standalone import inlined, standalone

__all__ = ["Form", "Workspace"]

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

#: Bytes up to which runs share an area; beyond, to be given fresh memory is a small part of what a run takes.
_MOST_SHARED = 8 << 20
_LEAST_SHARED = 64 << 10
_LINE_BYTES = 64

# Fields of a request. What is filled in comes first, then addresses and lengths of what it is made from.
_TOLD = 0  # what ``measure`` tells
_TOTAL = _TOLD + TOLD  # integers of the block
_MADE = _TOTAL + 1  # rows, channels, and addresses, as a job has them from J_NUM_ROWS on
_POLL = _MADE + 10
_GIVEN = _POLL + 1
_TABLE, _TABLE_LENGTH, _SPANS, _SPANS_LENGTH, _LENGTHS, _LENGTHS_LENGTH = range(_GIVEN, _GIVEN + 6)
_UNIT, _PIECE, _ITEM_BYTES, _STATED, _CHANNELS, _NUM_CHANNELS, _NUM_EXTRAS = range(_GIVEN + 6, _GIVEN + 13)
_BLOCK, _STAGING = _GIVEN + 13, _GIVEN + 14
_FIELDS = _GIVEN + 15  # there follow bytes and messages of each channel, integers to work in, and lengths of blocks

# A third of the time that numpy takes for as many.
_UNPACK_TOLD = Struct(f"{_MADE}q").unpack_from
_UNPACK_MADE = Struct(f"{_GIVEN - _MADE}q").unpack_from
_PACK_GIVEN = Struct(f"{_BLOCK - _GIVEN}q").pack_into
_PACK_PLACES = Struct("2q").pack_into


@standalone
def size_up(address, num_work) -> None:  # type: ignore[no-untyped-def]
    """Tell in a request how large the block has to be.

    Args:
        address: of a request.
        num_work: integers to work in, at its end.
    """
    num_channels = int64_at(address, _FIELDS)[_NUM_CHANNELS]
    request = int64_at(address, _FIELDS + 2 * num_channels + num_work)
    measure(
        int64_at(request[_TABLE], request[_TABLE_LENGTH]),
        int64_at(request[_LENGTHS], request[_LENGTHS_LENGTH]),
        int64_at(request[_SPANS], request[_SPANS_LENGTH]),
        request[_UNIT],
        request[_PIECE],
        request[_ITEM_BYTES],
        request[_FIELDS + 2 * num_channels :],
        request,
    )
    rows, needs, work = request[0], request[1], request[5]
    kept = rows * (j.ROW_FIELDS + 5) + needs + num_channels * (j.CHANNEL_FIELDS + 3) + request[_NUM_EXTRAS] + 5
    request[_TOTAL] = kept + rows + 1 + needs + work


@standalone
def lay_out(address) -> int:  # type: ignore[no-untyped-def]
    """Fill in the block of a request, and where its parts are.

    Returns:
        0; or 1 and the number of the first row that is outside of its buffers or needs one that stands behind it.
    """
    num_channels = int64_at(address, _FIELDS)[_NUM_CHANNELS]
    request = int64_at(address, _FIELDS + 2 * num_channels)
    num_rows, num_needs, num_work = request[0], request[1], request[5]
    at = request[_BLOCK]
    request[_MADE] = num_rows
    request[_MADE + 1] = num_channels
    request[_MADE + 2] = at
    rows = int64_at(at, num_rows * j.ROW_FIELDS)
    at += 8 * num_rows * j.ROW_FIELDS
    request[_MADE + 3] = at
    pending0 = int64_at(at, num_rows)
    at += 8 * num_rows
    request[_MADE + 4] = at  # what is pending in a run
    at += 8 * num_rows
    request[_MADE + 5] = at
    dependent_start = int64_at(at, num_rows + 1)
    at += 8 * (num_rows + 1)
    request[_MADE + 6] = at
    dependents = int64_at(at, num_needs + 1)
    at += 8 * (num_needs + 1)
    request[_MADE + 7] = at
    queue_start = int64_at(at, num_channels + 1)
    at += 8 * (num_channels + 1)
    request[_MADE + 8] = at
    queue = int64_at(at, num_rows + 1)
    at += 8 * (num_rows + 1)
    request[_MADE + 9] = at
    channels = int64_at(at, num_channels * j.CHANNEL_FIELDS)
    at += 8 * num_channels * j.CHANNEL_FIELDS
    request[_POLL] = at
    at += 8 * (2 * num_channels + request[_NUM_EXTRAS] + 1)
    need_start = int64_at(at, num_rows + 1)  # from here on only while this runs
    need_index = int64_at(at + 8 * (num_rows + 1), num_needs)
    wrong = fill(
        int64_at(request[_TABLE], request[_TABLE_LENGTH]),
        int64_at(request[_LENGTHS], request[_LENGTHS_LENGTH]),
        request[_UNIT],
        request[_PIECE],
        request[_ITEM_BYTES],
        request[4],
        int64_at(at + 8 * (num_rows + 1 + num_needs), num_work),
        rows,
        need_start,
        need_index,
        int64_at(0, 0),
    )
    if wrong == 0:
        wrong = _turn_round(need_start, need_index, pending0, dependent_start, dependents)
    given = int64_at(request[_CHANNELS], num_channels * j.CHANNEL_FIELDS)
    for i in range(len(given)):
        channels[i] = given[i]
    moved = request[_FIELDS : _FIELDS + 2 * num_channels]
    _connect(rows, channels, queue_start, queue, moved, request[_STAGING], request[_STATED])
    return wrong


@inlined
def _turn_round(need_start, need_index, pending0, dependent_start, dependents) -> int:  # type: ignore[no-untyped-def]
    """From what each row needs to what needs each row; 1 and the first row that needs a later one, 0 if none does."""
    num_rows = len(pending0)
    for i in range(num_rows + 1):
        dependent_start[i] = 0
    for i in range(num_rows):
        pending0[i] = need_start[i + 1] - need_start[i]
        for k in range(need_start[i], need_start[i + 1]):
            if need_index[k] >= i:
                return i + 1
            dependent_start[need_index[k] + 1] += 1
    for i in range(num_rows):
        dependent_start[i + 1] += dependent_start[i]
    for i in range(num_rows):
        for k in range(need_start[i], need_start[i + 1]):
            dependents[dependent_start[need_index[k]]] = i
            dependent_start[need_index[k]] += 1  # by the end each is where the next one starts
    for i in range(num_rows, 0, -1):
        dependent_start[i] = dependent_start[i - 1]
    dependent_start[0] = 0
    return 0


@inlined
def _connect(rows, channels, queue_start, queue, moved, staging, stated) -> None:  # type: ignore[no-untyped-def]
    """Queue the rows of each channel, count what it moves, and give it its area of staging."""
    num_channels = len(queue_start) - 1
    for c in range(2 * num_channels):
        moved[c] = 0
    for c in range(num_channels):
        channels[c * j.CHANNEL_FIELDS + j.C_STAGING] = 0
    for at in range(0, len(rows), j.ROW_FIELDS):
        c = rows[at + j.R_CHANNEL]
        if c >= 0:
            moved[c] += rows[at + j.R_BYTES]
            moved[num_channels + c] += 1
            if rows[at + j.R_OP] == 2:
                place = c * j.CHANNEL_FIELDS + j.C_STAGING
                channels[place] = max(channels[place], rows[at + j.R_BYTES])
    queue_start[0] = 0
    for c in range(num_channels):
        place = c * j.CHANNEL_FIELDS
        queue_start[c + 1] = queue_start[c] + moved[num_channels + c]
        length = -(-channels[place + j.C_STAGING] // _LINE_BYTES) * _LINE_BYTES
        channels[place + j.C_STAGING] = staging
        staging += length
        channels[place + j.C_STATED] = moved[c] if stated < 0 else stated
    for at in range(0, len(rows), j.ROW_FIELDS):
        c = rows[at + j.R_CHANNEL]
        if c >= 0:
            queue[queue_start[c]] = at // j.ROW_FIELDS
            queue_start[c] += 1  # by the end each is where the next one starts
    for c in range(num_channels, 0, -1):
        queue_start[c] = queue_start[c - 1]
    queue_start[0] = 0
    queue[queue_start[num_channels]] = -1  # a lowered schedule has no local rows that need others


class _Area:
    """Memory that grows: what has it keeps what it has got."""

    def __init__(self) -> None:
        self._shared: tuple[Bytes, int] = self._fresh(0)  # one thing: a signal handler may come here too

    def at_least(self, num_bytes: int) -> tuple[Bytes, int, bool]:
        """So many bytes, where they are, a multiple of ``_LINE_BYTES``, and whether others have them too."""
        if num_bytes > _MOST_SHARED:
            return *self._fresh(num_bytes), False
        memory, address = self._shared
        if len(memory) < num_bytes + _LINE_BYTES:
            self._shared = self._fresh(min(max(num_bytes, 2 * len(memory), _LEAST_SHARED), _MOST_SHARED))
            memory, address = self._shared
        return memory, address, True

    @staticmethod
    def _fresh(num_bytes: int) -> tuple[Bytes, int]:
        memory = np.empty(num_bytes + _LINE_BYTES, dtype=np.uint8)
        return memory, -(-_address(memory) // _LINE_BYTES) * _LINE_BYTES


class Workspace:
    """Memory that runs of one group work in, one after the other: SCRATCH, and staging for what comes to be added."""

    def __init__(self) -> None:
        self.scratch, self.staging = _Area(), _Area()


def _address(array: npt.NDArray[np.generic]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


class Form:
    """A plan on the channels of one group.

    Args:
        plan: one rank's part of a schedule.
        lines: of each of the plan's channels.
        extras: control descriptors, at least one (-1 for none); the array may be changed in place by its owner.
        asking: how long to ask rings again before sleeping, of the group; see ``prepared.asking``.
        workspace: of the group.
    """

    def __init__(
        self,
        plan: RankTemplate,
        lines: Sequence[Line],
        extras: Ints,
        asking: Ints,
        workspace: Workspace | None = None,
    ) -> None:
        self.plan = plan
        self._channels = _channel_rows(plan, lines)
        self._extras, self._extras_address = extras, _address(extras)
        self._asking, self._asking_address = asking, _address(asking)
        self._workspace = workspace or Workspace()
        self._table = (_address(plan.table), len(plan.table))
        self._num_work = work_to_measure(plan.table)
        self._num_request = _FIELDS + 2 * len(plan.channels) + self._num_work
        self._rest = (_address(self._channels), len(plan.channels), len(extras))
        self._pack_lengths = Struct(f"{plan.num_blocks}q").pack_into
        self._unpack_moved = Struct(f"{2 * len(plan.channels)}q").unpack_from
        #: Requests with their addresses that nobody is filling in: several where threads, or signal handlers, meet.
        self._spare: list[tuple[memoryview, int]] = []

    def attach(self, lines: Sequence[Line]) -> None:
        """Take the plan's channels, now that all are open, for what is prepared from now on."""
        if lines:
            self._channels[:, list(LINE)] = lines

    def _take_request(self) -> tuple[memoryview, int]:
        try:
            return self._spare.pop()
        except IndexError:
            request = np.empty(self._num_request + self.plan.num_blocks, dtype=np.int64)
            return request.data, _address(request)

    @cached_property
    def _even_spans(self) -> tuple[int, int]:
        return _address(self.plan.even_spans), len(self.plan.even_spans)

    @cached_property
    def _spans(self) -> tuple[int, int]:
        return _address(self.plan.spans), len(self.plan.spans)

    def prepare(
        self,
        num_elements: int,
        piece_elements: int,
        item_bytes: int,
        block_elements: tuple[int, ...] | None = None,
        *,
        states_channel_bytes: bool = False,
        origin: Origin | None = None,
    ) -> Prepared:
        """What the engine reads for an array of ``num_elements``.

        Args:
            num_elements, piece_elements, block_elements: as ``RankTemplate.expand`` takes them.
            item_bytes: bytes of an element.
            states_channel_bytes: headers state the bytes on their channel, for a rank may not know how long the
                blocks between others are; else those of the whole array.
            origin: what it is made for, to be told later.

        Raises:
            ScheduleError: as ``RankTemplate.expand``.
        """
        unit = self.plan.unit(num_elements, block_elements)
        even = block_elements is None
        total_bytes = num_elements * item_bytes
        request, address = self._take_request()
        _PACK_GIVEN(
            request,
            8 * _GIVEN,
            *self._table,
            *(self._even_spans if even else self._spans),
            *((0, 0) if even else (address + 8 * self._num_request, self.plan.num_blocks)),
            unit,
            piece_elements,
            item_bytes,
            -1 if states_channel_bytes else total_bytes,
            *self._rest,
        )
        if block_elements is not None:
            self._pack_lengths(request, 8 * self._num_request, *block_elements)
        size_up(address, self._num_work)
        _, _, scratch_elements, staging_bytes, _, _, total = _UNPACK_TOLD(request)
        scratch, scratch_address, shared = self._workspace.scratch.at_least(scratch_elements * item_bytes)
        staging, staging_address, _ = self._workspace.staging.at_least(staging_bytes)
        block = np.empty(total, dtype=np.int64)
        _PACK_PLACES(request, 8 * _BLOCK, _address(block), staging_address)
        if wrong := lay_out(address):
            self._complain(wrong - 1, num_elements, piece_elements, block_elements)
        *made, poll_address = _UNPACK_MADE(request, 8 * _MADE)
        moved = self._unpack_moved(request, 8 * _FIELDS)
        self._spare.append((request, address))
        traffic = Traffic(origin=origin, channels=self.plan.channels, moved=moved)
        prepared = Prepared(
            plan=self.plan,
            lengths=(num_elements, piece_elements, block_elements),
            item_bytes=item_bytes,
            block=block,
            scratch=scratch,
            staging=staging,
            extras=self._extras,
            traffic=traffic,
            addresses=tuple(made),
            scratch_address=scratch_address,
            asking=self._asking,
            watched=(poll_address, len(self._extras), self._extras_address),
            asking_address=self._asking_address,
            total_bytes=total_bytes,
            num_bytes=1024 + block.nbytes + (0 if shared else len(scratch)),
        )
        traffic.prepared = weakref.ref(prepared)
        return prepared

    def _complain(self, row: int, *size: int | tuple[int, ...] | None) -> None:
        num_elements, piece_elements, block_elements = size
        self.plan.expand(num_elements, piece_elements, block_elements=block_elements)  # type: ignore[arg-type]
        raise ScheduleError(
            f"rank {self.plan.rank}, instruction {row} of {self.plan.schedule.collective.name} of {num_elements} "
            f"elements ({self.plan.schedule.method}): it needs one that stands behind it"
        )


def _channel_rows(plan: RankTemplate, lines: Sequence[Line]) -> Ints:
    """The engine's rows of a plan's channels, as they are before a size is known."""
    rows = np.zeros((len(plan.channels), j.CHANNEL_FIELDS), dtype=np.int64)
    if lines:  # a rank may have no part in what others exchange
        rows[:, list(LINE)] = lines
    rows[:, j.C_OUTGOING] = [channel.src == plan.rank for channel in plan.channels]
    return rows
