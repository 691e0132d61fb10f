"""Lowering: from a schedule to one program a rank, for one size, cut into pipelined pieces.

Every chunk is cut into pieces, and every transfer becomes one message a piece. All ranks order all messages by one
key, (pipeline step, transfer), where the step of piece p of a transfer is p plus the transfer's level: its depth, or
what ``Columns.order_levels`` makes of that. Dependencies point backwards in that order, and both ends of every
channel follow it, so that first-in-first-out channels cannot deadlock, however little they buffer.

``RankTemplate`` holds what does not depend on the size, as a table of integers. ``mycel.collectives.rows`` makes the
rows for a size of it, in one pass of compiled code, since a training job meets new sizes and must not wait for them:
those that engines run come from there without a ``Program`` around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mycel.collectives.program import COLUMNS, Buffer, Channel, Op, Program, block_sizes
from mycel.collectives.rows import ROW_FIELDS, TOLD, fill, measure, tabulate, work_to_measure
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import POINTED
from mycel.collectives.weights import channel_weights
from mycel.compiled import interpreted_while_small
from mycel.errors import ScheduleError

__all__ = ["RankTemplate", "chunk_bounds", "lower"]

Ints = npt.NDArray[np.int64]
_NONE: Ints = np.zeros(0, dtype=np.int64)


def chunk_bounds(schedule: Schedule, num_elements: int, block_elements: Sequence[int] | None = None) -> Ints:
    """First element and end of each chunk, shape ``[num_chunks, 2]``, for an array of ``num_elements``.

    Units are mapped onto elements proportionally inside each block and rounded down, so that blocks of any length
    are cut without gaps; short ones leave some chunks empty.

    Args:
        schedule: where the chunks are.
        num_elements: length of the whole array.
        block_elements: length of each block; in proportion to the collective's weights if not given.

    Raises:
        ScheduleError: see ``RankTemplate.expand``.
    """
    sizes = block_sizes(schedule.collective, num_elements, block_elements)
    cuts = _Cuts.of(schedule)
    return np.stack(cuts.within(sizes), axis=1) + _starts(sizes)[cuts.block, None]


def _starts(sizes: Ints) -> Ints:
    """Where each of a row of blocks starts."""
    starts = np.zeros(len(sizes), dtype=np.int64)
    np.cumsum(sizes[:-1], out=starts[1:])
    return starts


@dataclass(frozen=True, slots=True, eq=False)
class _Cuts:
    """Of each chunk: its block, its first unit and its end inside it, and the block's units."""

    block: Ints
    start: Ints
    stop: Ints
    units: Ints
    most_units: int
    empty_blocks: tuple[int, ...]

    @classmethod
    def of(cls, schedule: Schedule) -> _Cuts:
        first = schedule.block_bounds
        units = np.diff(first)
        stops = schedule.chunk_stops
        starts = schedule.chunk_starts
        block = np.searchsorted(first, starts, side="right") - 1  # the last of those that start there is not empty
        return cls(
            block=block,
            start=starts - first[block],
            stop=stops - first[block],
            units=units[block],
            most_units=int(units.max()),
            empty_blocks=tuple(np.flatnonzero(units == 0).tolist()),
        )

    def check(self, sizes: Sequence[int] | Ints) -> None:
        """Raises ``ScheduleError`` where a block of these sizes has elements that the schedule does not move."""
        for block in self.empty_blocks:
            if sizes[block]:
                raise ScheduleError(
                    f"block {block} has {sizes[block]} elements, but weight 0 in the schedule, which moves none of it"
                )

    def within(self, sizes: Ints) -> tuple[Ints, Ints]:
        """First element and end of each chunk, counted from the start of its block, where blocks have these sizes."""
        self.check(sizes)
        size, start, stop = sizes[self.block], self.start, self.stop
        if int(sizes.max()) * self.most_units >= 1 << 62:  # exact in Python's integers
            size, start, stop = size.astype(object), start.astype(object), stop.astype(object)
        first, end = size * start // self.units, size * stop // self.units
        return first.astype(np.int64, copy=False), end.astype(np.int64, copy=False)


@dataclass(slots=True, kw_only=True)
class _Role:
    """This rank's part in one transfer."""

    level: int
    chunk: int
    op: Op
    channel: int
    buffer: Buffer
    operand: Buffer
    final: bool
    needs: list[int] = field(default_factory=list)


class RankTemplate:
    """One rank's part of a schedule, ready to be expanded for any size.

    A switch that copies and adds has a part as well: everything it holds is in SCRATCH, and what comes first of a
    chunk starts the sum.

    Args:
        schedule: a schedule; verify it first.
        rank: whose part; a vertex, see ``Topology.compute_vertices``.

    Raises:
        ScheduleError: the schedule needs something a program cannot express: a dependency on a transfer that
            neither arrives at nor leaves the waiting rank, or on another chunk.
    """

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule = schedule
        self.rank = rank
        self._is_switch = rank >= schedule.collective.num_ranks
        self.num_blocks, self._total_weight = schedule.collective.num_blocks, schedule.collective.total_weight
        self._in_place = not self._is_switch and schedule.collective.name in ("all_reduce", "broadcast", "reduce")
        # By how far around the other end is: ranks that send to all others begin with different ones, so that no
        # link to a rank waits while all of them fill another's. Slow paths come last, where queues are their own; but
        # first where one rank sends everything: theirs is the longest way, and all others have time.
        capacity = schedule.topology.capacity
        self._part = schedule.parts.of(rank)
        slow_first = schedule.is_from_one

        def place(channel: Channel) -> tuple[int, int, Channel]:
            rate = min(capacity[hop] for hop in pairwise(channel.path))
            return rate if slow_first else -rate, (channel.dst - channel.src) % schedule.num_compute_vertices, channel

        weights = channel_weights(schedule, rank)
        keys = sorted(weights, key=place)
        self.channels: tuple[Channel, ...] = tuple(keys)
        #: Of each channel, in units of the schedule: see ``mycel.collectives.weights``.
        self.weights = tuple(weights[channel] for channel in keys)
        self._roles: list[_Role] = []
        self._scratch_chunks: list[int] = []
        channel_of = {channel: number for number, channel in enumerate(keys)}
        if schedule.has_places:
            self._build_exchange(channel_of)
        else:
            self._build(channel_of)
        self._tabulate()

    def _build(self, channel_of: dict[Channel, int]) -> None:
        schedule, rank = self.schedule, self.rank
        final, levels = self._part.final, self._part.levels
        role_of: dict[int, int] = {}
        last_reduce: dict[int, int] = {}
        for number, t in self._part.transfers.items():
            channel = channel_of[Channel(src=t.src, dst=t.dst, path=t.path)]
            if t.src == rank:
                role = _Role(
                    level=levels[number],
                    chunk=t.chunk,
                    op=Op.SEND,
                    channel=channel,
                    buffer=self._place(t.chunk, reduced=t.chunk in last_reduce),
                    operand=Buffer.INPUT,
                    final=False,
                    needs=[self._need(number, earlier, role_of) for earlier in t.after],
                )
            elif t.reduce:
                first = t.chunk not in last_reduce
                starts = first and self._is_switch
                if first and self._place(t.chunk, reduced=True) is Buffer.SCRATCH:
                    self._scratch_chunks.append(t.chunk)
                role = _Role(
                    level=levels[number],
                    chunk=t.chunk,
                    op=Op.RECV if starts else Op.RECV_REDUCE,
                    channel=channel,
                    buffer=self._place(t.chunk, reduced=True),
                    operand=self._place(t.chunk, reduced=not first),
                    final=number in final and not starts,
                    # Reduced one after the other in the schedule's order: the same result in every run.
                    needs=[] if first else [last_reduce[t.chunk]],
                )
                last_reduce[t.chunk] = len(self._roles)
            else:
                if schedule.collective.name == "reduce_scatter" and not self._is_switch:
                    raise ScheduleError(f"transfer {number}: a reduce_scatter program cannot copy into a partial sum")
                role = _Role(
                    level=levels[number],
                    chunk=t.chunk,
                    op=Op.RECV,
                    channel=channel,
                    buffer=self._landing(number, t.chunk),
                    operand=Buffer.INPUT,
                    final=False,
                )
                if self._is_switch:
                    last_reduce[t.chunk] = len(self._roles)  # what is added later is added to this
            role_of[number] = len(self._roles)
            self._roles.append(role)

    def _build_exchange(self, channel_of: dict[Channel, int]) -> None:
        """The roles of an all_reduce in which partners add each other's sums, whose places take turns in two buffers.

        The last place of a chunk is in OUTPUT, the one before it in SCRATCH, and so on. What is in OUTPUT at first is
        copied where the first place is in SCRATCH, unless an addition brings it there. A new sum is put where the one
        before the last was, so it comes after the sends of that one.
        """
        mine, final = self._part.transfers, self._part.final
        last_place: dict[int, int] = {}
        for t in mine.values():
            if t.dst == self.rank:
                last_place[t.chunk] = max(last_place.get(t.chunk, 0), t.places[1])
        role_of: dict[int, int] = {}
        adding: dict[int, int] = {}  # the last addition to each chunk, or the copy before all
        copying: dict[int, int] = {}
        held = dict.fromkeys((t.chunk for t in mine.values()), 0)  # the place that was written last
        moved: set[int] = set()  # chunks whose first place is in SCRATCH, and no longer in OUTPUT alone
        readers: dict[tuple[int, Buffer], list[int]] = {}  # sends since a buffer was written

        def buffer_of(chunk: int, place: int) -> Buffer:
            odd = (last_place.get(chunk, 0) - place) % 2 == 1
            return Buffer.SCRATCH if odd and (place > 0 or chunk in moved) else Buffer.OUTPUT

        for number, t in mine.items():
            chunk = t.chunk
            starts_apart = last_place.get(chunk, 0) % 2 == 1 and chunk not in moved
            if starts_apart and not (t.dst == self.rank and t.reduce and t.places[1] == 0):
                moved.add(chunk)
                adding[chunk] = copying[chunk] = len(self._roles)
                self._roles.append(
                    _Role(
                        level=0,
                        chunk=chunk,
                        op=Op.COPY,
                        channel=-1,
                        buffer=Buffer.SCRATCH,
                        operand=Buffer.OUTPUT,
                        final=False,
                    )
                )
            role = _Role(
                level=self._part.levels[number],
                chunk=chunk,
                op=Op.SEND if t.src == self.rank else Op.RECV_REDUCE if t.reduce else Op.RECV,
                channel=channel_of[Channel(src=t.src, dst=t.dst, path=t.path)],
                buffer=Buffer.OUTPUT,
                operand=Buffer.INPUT,
                final=number in final and t.dst == self.rank,
            )
            if t.src == self.rank:
                if not held[chunk] - 1 <= t.places[0] <= held[chunk]:
                    raise ScheduleError(
                        f"transfer {number} reads place {t.places[0]} of chunk {chunk} at rank {self.rank}, which "
                        f"has written place {held[chunk]} before; a program keeps the last two sums"
                    )
                role.buffer = buffer_of(chunk, t.places[0])
                role.needs = [self._need(number, earlier, role_of) for earlier in t.after]
                if not role.needs and t.places[0] == 0 and chunk in copying:
                    role.needs = [copying[chunk]]
                readers.setdefault((chunk, role.buffer), []).append(len(self._roles))
            else:
                place = t.places[1]
                if not held[chunk] <= place <= held[chunk] + 1:
                    raise ScheduleError(
                        f"transfer {number} writes place {place} of chunk {chunk} at rank {self.rank}, which has "
                        f"written place {held[chunk]} before; a program forms its sums one after the other"
                    )
                role.operand = buffer_of(chunk, held[chunk])
                if starts_apart:
                    moved.add(chunk)
                role.buffer = buffer_of(chunk, place)
                role.needs = [adding[chunk]] if chunk in adding else []
                if role.buffer != role.operand or not t.reduce:
                    role.needs = sorted({*role.needs, *readers.pop((chunk, role.buffer), [])})
                held[chunk] = place
                if t.reduce:
                    adding[chunk] = len(self._roles)
                else:
                    role.operand = Buffer.INPUT
            role_of[number] = len(self._roles)
            self._roles.append(role)
        self._scratch_chunks = sorted({role.chunk for role in self._roles if role.buffer is Buffer.SCRATCH})

    def _need(self, number: int, earlier: int, role_of: dict[int, int]) -> int:
        mine = self._part.transfers
        if earlier not in role_of or mine[earlier].chunk != mine[number].chunk:
            t = self.schedule.transfers[earlier]
            raise ScheduleError(
                f"transfer {number} waits for transfer {earlier} (chunk {t.chunk}, {t.src} -> {t.dst}); a program "
                "can only wait for its own rank's transfers of the same chunk"
            )
        return role_of[earlier]

    def _landing(self, number: int, chunk: int) -> Buffer:
        """Where a chunk that is copied here lands; SCRATCH is set aside for one that only passes through."""
        if self.schedule.collective.name not in POINTED and not self._is_switch:
            return Buffer.OUTPUT
        place = self._place(chunk, reduced=False)
        if place is Buffer.INPUT:
            raise ScheduleError(
                f"transfer {number}: rank {self.rank} has the chunk in INPUT, which no program writes"
            )
        if place is Buffer.SCRATCH and chunk not in self._scratch_chunks:
            self._scratch_chunks.append(chunk)
        return place

    def _place(self, chunk: int, *, reduced: bool) -> Buffer:
        """Where this rank keeps a chunk, once something was reduced into it or before."""
        if self._is_switch:
            return Buffer.SCRATCH
        if self._in_place:
            return Buffer.OUTPUT
        collective, block = self.schedule.collective, self.schedule.block_of(chunk)
        if collective.name in POINTED:
            if collective.initial(self.rank, block):
                return Buffer.INPUT
            return Buffer.SCRATCH if collective.required(self.rank, block) is None else Buffer.OUTPUT
        own = block == self.rank
        if self.schedule.collective.name == "all_gather":
            return Buffer.INPUT if own else Buffer.OUTPUT
        if not reduced:
            return Buffer.INPUT
        return Buffer.OUTPUT if own else Buffer.SCRATCH

    def _tabulate(self) -> None:
        roles, collective = self._roles, self.schedule.collective
        cuts, weights = _Cuts.of(self.schedule), collective.block_weights
        self._cuts = cuts
        inputs, outputs = self._blocks_in(Buffer.INPUT), self._blocks_in(Buffer.OUTPUT)
        place_in = [{block: place for place, block in enumerate(blocks)} for blocks in (inputs, outputs)]
        own = self._own_block()
        mine = sorted({role.chunk for role in roles})  # of other chunks this rank sees nothing
        number_of = {chunk: number for number, chunk in enumerate(mine)}
        chunks = []
        for chunk in mine:
            block = int(cuts.block[chunk])
            units = (int(part[chunk]) for part in (cuts.start, cuts.stop, cuts.units))
            chunks.append((block, weights[block], *units, *(places.get(block, 0) for places in place_in)))
        #: What ``mycel.collectives.rows`` makes programs of.
        self.table = tabulate(
            chunks,
            [(r.op, r.channel, r.buffer, number_of[r.chunk], r.level, r.operand, r.final) for r in roles],
            [r.needs for r in roles],
            ([(b, weights[b]) for b in inputs], [(b, weights[b]) for b in outputs]),
            [number_of[chunk] for chunk in self._scratch_chunks],
            num_channels=len(self.channels),
            own=(-1, -1) if own is None else (place_in[0][own], place_in[1][own]),
        )

    def _blocks_in(self, buffer: Buffer) -> range:
        """The blocks of the array that this rank has in INPUT or OUTPUT, in order."""
        collective, rank = self.schedule.collective, self.rank
        n, every, none = collective.num_ranks, range(collective.num_blocks), range(0)
        if self._is_switch:
            return none
        if collective.name == "all_to_all":  # s * N + d, at d in the input of s and at s in the output of d
            return range(rank * n, (rank + 1) * n) if buffer is Buffer.INPUT else range(rank, n * n, n)
        if self._in_place:
            return none if buffer is Buffer.INPUT else every
        own, at_root = range(rank, rank + 1), every if rank == collective.root else none
        if buffer is Buffer.INPUT:
            return {"all_gather": own, "reduce_scatter": every, "gather": own, "scatter": at_root}[collective.name]
        return {"all_gather": every, "reduce_scatter": own, "gather": at_root, "scatter": own}[collective.name]

    @cached_property
    def even_spans(self) -> Ints:
        """Of each of the schedule's chunks weight of the block, first unit, end and units of it; alike ones once."""
        orbit, cuts = self.schedule.orbit, self._cuts
        # Of ranks that are alike, the blocks of each fall into chunks as those of rank 0 do.
        first = slice(None if orbit is None or self.num_blocks == 1 else len(orbit.stops))
        weights = np.array(self.schedule.collective.block_weights, dtype=np.int64)[cuts.block[first]]
        spans = np.stack([weights, cuts.start[first], cuts.stop[first], cuts.units[first]], axis=1)
        return np.unique(spans, axis=0).ravel()

    @cached_property
    def spans(self) -> Ints:
        """Of each of the schedule's chunks block, first unit, end and units of the block."""
        cuts = self._cuts
        return np.stack([cuts.block, cuts.start, cuts.stop, cuts.units], axis=1).ravel()

    def unit(self, num_elements: int, block_elements: Sequence[int] | None) -> int:
        """Elements of an array of ``num_elements`` for each weight; 0 where the blocks have lengths of their own.

        Raises:
            ScheduleError: these lengths do not go together, or not with the schedule; see ``expand``.
        """
        if block_elements is None:
            if num_elements % self._total_weight:
                block_sizes(self.schedule.collective, num_elements)  # says what is wrong
            return num_elements // self._total_weight
        # Of few numbers Python's own sum takes a tenth of numpy's time.
        if len(block_elements) != self.num_blocks or sum(block_elements) != num_elements or min(block_elements) < 0:
            block_sizes(self.schedule.collective, num_elements, block_elements)
        self._cuts.check(block_elements)
        return 0

    def expand(
        self, num_elements: int, piece_elements: int, *, block_elements: Sequence[int] | None = None
    ) -> Program:
        """The program for an array of ``num_elements``, in pieces of at most ``piece_elements``.

        Args:
            num_elements: length of the whole array.
            piece_elements: longest message.
            block_elements: length of each block, 0 for none of it, if they are not in proportion to the collective's
                weights. Any sizes will do: each chunk is its part of its own block, whatever that block's length.

        Raises:
            ScheduleError: the elements do not divide into the collective's blocks, or are not what the blocks hold
                together; a block has elements that the schedule does not move (weight 0); a piece holds none.
        """
        return self._expand(num_elements, piece_elements, block_elements, _NONE)[0]

    def steps(self, num_elements: int, piece_elements: int, *, block_elements: Sequence[int] | None = None) -> Ints:
        """Pipeline step of each row of the program that ``expand`` makes of the same arguments.

        Both ends of a message have it in the same step, and in a step all that go from one rank to another stand in
        the same order at both. What a row needs is in an earlier step; only additions to one place can share one.
        Copies, which wait for nothing, have -1.

        Args:
            num_elements, piece_elements, block_elements: as for ``expand``.

        Raises:
            ScheduleError: as ``expand``.
        """
        return self._expand(num_elements, piece_elements, block_elements, None)[1]

    def _expand(
        self, num_elements: int, piece_elements: int, block_elements: Sequence[int] | None, steps: Ints | None
    ) -> tuple[Program, Ints]:
        """Program and steps, which are made where none are given."""
        if piece_elements <= 0:
            raise ScheduleError(f"pieces of {piece_elements} elements; at least 1 is needed")
        unit = self.unit(num_elements, block_elements)
        lengths = _NONE if block_elements is None else np.array(block_elements, dtype=np.int64)
        spans = self.even_spans if block_elements is None else self.spans
        seen = len(self.table) + len(spans)
        told = np.zeros(TOLD, dtype=np.int64)
        work = np.zeros(work_to_measure(self.table), dtype=np.int64)
        interpreted_while_small(measure, seen)(self.table, lengths, spans, unit, piece_elements, 1, work, told)
        num_rows, num_needs, scratch, _, most, num_work = told.tolist()
        rows, work = np.zeros((num_rows, ROW_FIELDS), dtype=np.int64), np.zeros(num_work, dtype=np.int64)
        need_start, need_index = np.zeros(num_rows + 1, dtype=np.int64), np.zeros(num_needs, dtype=np.int64)
        steps = np.zeros(num_rows, dtype=np.int64) if steps is None else steps
        # Rows outside of their buffers are the program's to complain of.
        interpreted_while_small(fill, seen + num_rows)(
            *(self.table, lengths, unit, piece_elements, 1, most, work),
            *(rows.ravel(), need_start, need_index, steps),
        )
        program = Program(
            collective=self.schedule.collective,
            rank=self.rank,
            num_elements=num_elements,
            scratch_elements=scratch,
            channels=self.channels,
            columns=rows.view(COLUMNS)[:, 0],
            need_start=need_start,
            need_index=need_index,
            block_elements=None if block_elements is None else tuple(map(int, block_elements)),
            weights=self.weights,
        )
        return program, steps

    def _own_block(self) -> int | None:
        """The block, if any, that is in this rank's INPUT and belongs in its OUTPUT, and that nobody sends."""
        c = self.schedule.collective
        if self._is_switch:
            return None
        if c.name == "all_to_all":
            return self.rank * (c.num_ranks + 1)
        return self.rank if c.name == "all_gather" or (c.name in POINTED and c.root == self.rank) else None


def lower(
    schedule: Schedule, num_elements: int, *, piece_elements: int, block_elements: Sequence[int] | None = None
) -> Sequence[Program]:
    """Programs of all ranks for one size, and of the switches in which transfers end.

    Args:
        schedule: a verified schedule.
        num_elements: length of the collective's whole array.
        piece_elements: longest message, in elements.
        block_elements: length of each block, if they are not in proportion to the collective's weights.

    Returns:
        One program for each rank, in order, and then one for each such switch.

    Raises:
        ScheduleError: see ``RankTemplate`` and ``RankTemplate.expand``.

    Examples:
        >>> from mycel.collectives.synth import synthesize
        >>> from mycel.topology import load_topology
        >>> hop = synthesize(load_topology("ring:ranks=4,bandwidth=1 GB/s"), "all_gather", "ring")
        >>> [len(program.columns) for program in lower(hop, 64, piece_elements=16)]  # 3 sends, 3 receives, a copy
        [7, 7, 7, 7]
        >>> len(lower(hop, 64, piece_elements=8)[0].columns)  # twice as many messages
        13
    """
    vertices = range(schedule.num_compute_vertices)
    return tuple(
        RankTemplate(schedule, vertex).expand(num_elements, piece_elements, block_elements=block_elements)
        for vertex in vertices
    )
