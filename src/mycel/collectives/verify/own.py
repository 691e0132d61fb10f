"""Verifies one rank's program by itself: that it carries out the rank's part of a verified schedule.

``verify_programs`` looks at all ranks' programs together, which takes time in proportion to the square of the ranks.
Where every rank looks at its own in this way, and refuses to run a wrong one, all together are right too:

- *Messages meet, and nothing deadlocks.* All ranks order all messages by one key: the piece's place in the pipeline,
  then the transfer. A program's rows are in that order, row for row with the counts that both ends compute, and need
  earlier rows only. So the message with the least key of those that are left can always go.
- *Contents.* Each row reads and writes the memory in which this rank keeps the chunk at that point of the schedule,
  from where INPUT holds it to where OUTPUT must; additions follow each other in the schedule's order; and no two
  chunks share memory. So a place ends as the schedule has it.
- *Races.* A send needs the rows of what its transfer comes after, and an addition the row that wrote what it adds to.
  What overwrites a chunk that was read or written before comes after that in the schedule, through other ranks if
  need be: each of them keeps its own sends behind what they come after, and a receive writes only what has come in.

What may be reordered beyond that (classics in which a rank adds to what it is still sending) is refused here: such
schedules need the check of all programs. Pieces at another size are cut by the same rule, so what is found of one
size in which chunks are cut, and of whole ones, is true of others (``mycel.collectives.proof``).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from mycel.collectives.columns import Transfer
from mycel.collectives.program import COLUMNS, Buffer, Op, Program
from mycel.collectives.schedule import Schedule
from mycel.collectives.verify.flow import describe
from mycel.collectives.verify.program import blocks_in
from mycel.errors import VerificationError

__all__ = ["verify_own_program"]

Ints = npt.NDArray[np.int64]
#: A buffer, and the offset in it.
Place = tuple[int, int]


def verify_own_program(schedule: Schedule, program: Program, piece_elements: int) -> None:
    """Return if a program carries out its rank's part of a schedule; raise otherwise.

    Args:
        schedule: a verified schedule.
        program: of one of its ranks, for any size.
        piece_elements: the longest message that all ranks have agreed on.

    Raises:
        VerificationError: the message names rank, instruction, channel and elements.

    Examples:
        >>> from mycel.collectives.lower import lower
        >>> from mycel.collectives.synth import synthesize
        >>> from mycel.topology import load_topology
        >>> schedule = synthesize(load_topology("star:ranks=3"), "all_reduce")
        >>> programs = lower(schedule, 12, piece_elements=2)
        >>> for program in programs:
        ...     verify_own_program(schedule, program, 2)
        >>> verify_own_program(schedule, programs[0], 4)
        Traceback (most recent call last):
        mycel.errors.VerificationError: all_reduce over 3 ranks: rank 0 has 16 messages, its part of the schedule 8
    """
    _Check(schedule, program, piece_elements).run()


class _Check:
    def __init__(self, schedule: Schedule, program: Program, piece_elements: int) -> None:
        self.schedule, self.program, self.rank = schedule, program, program.rank
        c = schedule.collective
        self.title = f"{c.name} over {c.num_ranks} ranks"
        if program.collective != c or not 0 <= self.rank < c.num_ranks:
            raise VerificationError(f"{self.title}: a program of {program.collective.to_text()}, rank {self.rank}")
        self.part = schedule.parts.of(self.rank)
        self._measure(piece_elements)
        self.input, self.output = (self._layout(buffer) for buffer in (Buffer.INPUT, Buffer.OUTPUT))
        columns = program.columns
        self.rows = list(zip(*(columns[name].tolist() for name in COLUMNS.fields or ()), strict=True))
        starts, needs = program.need_start.tolist(), program.need_index.tolist()
        self.needs = [needs[first:stop] for first, stop in pairwise(starts)]

    def run(self) -> None:
        self._check_part()
        rows_of = self._match_rows()
        self._check_needs(rows_of)
        self._follow_chunks(rows_of)

    # -- what is to be seen -------------------------------------------------------------------------------

    def _measure(self, piece_elements: int) -> None:
        """First element of each chunk in its block, its length, and its pieces."""
        schedule, sizes = self.schedule, self.program.block_sizes
        first = schedule.block_bounds
        starts, stops = schedule.chunk_starts, schedule.chunk_stops
        self.block = np.searchsorted(first, starts, side="right") - 1
        units, size = np.diff(first)[self.block], sizes[self.block]
        if int(sizes.max()) * int(units.max()) >= 1 << 62:
            units, size = units.astype(object), size.astype(object)
        begin = size * (starts - first[self.block]) // units
        end = size * (stops - first[self.block]) // units
        self.begin, self.length = begin.astype(np.int64), (end - begin).astype(np.int64)
        self.pieces = -(-self.length // piece_elements)
        self.most = int(self.pieces.max(initial=1))

    def _layout(self, buffer: Buffer) -> dict[int, int]:
        """Where each block that stands in INPUT or OUTPUT begins there."""
        blocks = list(blocks_in(self.schedule.collective, self.rank, buffer))
        lengths = self.program.block_sizes[blocks] if blocks else np.zeros(0, dtype=np.int64)
        return dict(zip(blocks, (np.cumsum(lengths) - lengths).tolist(), strict=True))

    def _check_part(self) -> None:
        """That these are the rank's transfers, and all of them."""
        ends = {(number, t.src == self.rank) for number, t in self.part.transfers.items()}
        mine = all(self.rank in (t.src, t.dst) for t in self.part.transfers.values())
        orbit = self.schedule.orbit
        if orbit is None:
            columns = self.schedule.columns
            wanted = set(np.flatnonzero((columns.src == self.rank) | (columns.dst == self.rank)).tolist())
            mine &= wanted == self.part.transfers.keys()
        else:  # of each transfer of rank 0's part, one move begins here, and one ends here
            both = {(number // orbit.num_ranks, sends) for number, sends in ends}
            mine &= len(both) == len(ends) == 2 * len(orbit.columns)
        if not mine:
            raise VerificationError(f"{self.title}: rank {self.rank} was given another part of the schedule")

    def _match_rows(self) -> dict[tuple[int, int], int]:
        """Of each transfer and piece its row, if messages are as the order of all ranks has them."""
        wanted = []
        for number, t in self.part.transfers.items():
            pieces, level = int(self.pieces[t.chunk]), self.part.levels[number]
            wanted += [(piece * self.most // pieces + level, number, piece) for piece in range(pieces)]
        wanted.sort()
        wire = [index for index, row in enumerate(self.rows) if row[0] != Op.COPY]
        if len(wire) != len(wanted):
            raise VerificationError(
                f"{self.title}: rank {self.rank} has {len(wire)} messages, its part of the schedule {len(wanted)}"
            )
        rows_of: dict[tuple[int, int], int] = {}
        for index, (_, number, piece) in zip(wire, wanted, strict=True):
            self._match(index, number, self.part.transfers[number], piece)
            rows_of[number, piece] = index
        return rows_of

    def _match(self, index: int, number: int, t: Transfer, piece: int) -> None:
        op, channel, _, _, count, *_, final = self.rows[index]
        sends = t.src == self.rank
        kind = Op.SEND if sends else Op.RECV_REDUCE if t.reduce else Op.RECV
        first, stop = self._bounds(t.chunk, piece)
        ends = self.program.channels[channel]
        what = f"piece {piece} of transfer {number} (chunk {t.chunk}, {t.src} -> {t.dst})"
        if op != kind or (ends.src, ends.dst, ends.path) != (t.src, t.dst, t.path):
            raise self._wrong(index, f"stands where {what} belongs")
        if count != stop - first:
            raise self._wrong(index, f"has {count} elements of {what}, which has {stop - first}")
        if bool(final) != (not sends and number in self.part.final):
            raise self._wrong(index, "is marked final" if final else "is not marked final, but completes a sum")

    def _bounds(self, chunk: int, piece: int) -> tuple[int, int]:
        """Elements of a piece, counted from its chunk's first."""
        length, pieces = int(self.length[chunk]), int(self.pieces[chunk])
        return length * piece // pieces, length * (piece + 1) // pieces

    # -- order --------------------------------------------------------------------------------------------

    def _check_needs(self, rows_of: dict[tuple[int, int], int]) -> None:
        for index, needs in enumerate(self.needs):
            if needs and max(needs) >= index:
                raise self._wrong(index, f"needs instruction {max(needs)}, which stands behind it")
        written: dict[int, int] = {}  # the last transfer that wrote each chunk
        sent: set[int] = set()
        for number, t in self.part.transfers.items():
            pieces = range(int(self.pieces[t.chunk]))
            if t.src == self.rank:
                awaited = list(t.after)
                sent.add(t.chunk)
            else:
                awaited = [written[t.chunk]] if t.reduce and t.chunk in written else []
                if t.reduce and t.chunk in sent:
                    raise self._alone(number, t)
                written[t.chunk] = number
            for earlier in awaited:
                for piece in pieces:
                    row, other = rows_of[number, piece], rows_of.get((earlier, piece))
                    if other is None or other not in self.needs[row]:
                        raise self._wrong(row, f"does not need what transfer {earlier} does to chunk {t.chunk}")

    # -- memory -------------------------------------------------------------------------------------------

    def _follow_chunks(self, rows_of: dict[tuple[int, int], int]) -> None:
        """Where the rank keeps each chunk, from transfer to transfer, and in the end."""
        collective, at = self.schedule.collective, dict[int, Place | None]()
        in_place = collective.name in ("all_reduce", "broadcast", "reduce")
        used: list[tuple[int, int, int, int]] = []  # buffer, first element, end, chunk
        for number, t in self.part.transfers.items():
            chunk, block = t.chunk, int(self.block[t.chunk])
            if not self.length[chunk]:
                continue
            if chunk not in at:
                holds = collective.holder(block) in (None, self.rank)
                at[chunk] = home = self._home(chunk, Buffer.OUTPUT if in_place else Buffer.INPUT) if holds else None
                if home is not None and in_place:  # nobody writes to INPUT
                    used.append((*home, home[1] + int(self.length[chunk]), chunk))
            target: Place = (-1, -1)
            for piece in range(int(self.pieces[chunk])):
                index = rows_of[number, piece]
                op, _, buffer, offset, _, operand_buffer, operand_offset, _ = self.rows[index]
                first = self._bounds(chunk, piece)[0]
                here, operand = (buffer, offset - first), (operand_buffer, operand_offset - first)
                read = here if op == Op.SEND else operand
                if op != Op.RECV and read != at[chunk]:
                    raise self._wrong(index, f"does not read chunk {chunk} where the rank keeps it")
                if piece and op != Op.SEND and here != target:
                    raise self._wrong(index, f"puts a piece of chunk {chunk} elsewhere than the first")
                target = here
            if t.src != self.rank:
                at[chunk] = target
                used.append((*target, target[1] + int(self.length[chunk]), chunk))
        used += self._check_copies(at, used)
        self._check_apart(used)
        self._check_end(at)

    def _home(self, chunk: int, buffer: Buffer) -> Place | None:
        """Where a chunk stands in INPUT or OUTPUT as the collective has it."""
        starts = self.input if buffer is Buffer.INPUT else self.output
        block = int(self.block[chunk])
        return (int(buffer), starts[block] + int(self.begin[chunk])) if block in starts else None

    def _own_block(self) -> int | None:
        """The block that is in INPUT and belongs in OUTPUT, and that nobody sends here."""
        both = self.input.keys() & self.output.keys()
        mine = [b for b in both if self.schedule.collective.holder(b) == self.rank and self.program.block_sizes[b]]
        return mine[0] if mine else None

    def _check_copies(self, at: dict[int, Place | None], used: list[Any]) -> list[tuple[int, int, int, int]]:
        """That the own block is copied, and nothing else."""
        own = self._own_block()
        found = [index for index, row in enumerate(self.rows) if row[0] == Op.COPY]
        if len(found) != (own is not None):
            raise VerificationError(
                f"{self.title}: rank {self.rank} has {len(found)} copies, not {int(own is not None)}"
            )
        if own is None:
            return []
        size = int(self.program.block_sizes[own])
        _, _, *row = self.rows[found[0]]
        if row[:5] != [Buffer.OUTPUT, self.output[own], size, Buffer.INPUT, self.input[own]]:
            raise self._wrong(found[0], f"does not put block {own} where it belongs")
        return [(int(Buffer.OUTPUT), self.output[own], self.output[own] + size, -1)]

    def _check_apart(self, used: list[tuple[int, int, int, int]]) -> None:
        """That no two chunks are written to the same memory, nor one to where another waits to be read."""
        ordered = sorted(set(used))
        for (buffer, _, stop, chunk), (other_buffer, start, _, other) in pairwise(ordered):
            if buffer == other_buffer and start < stop and chunk != other:
                raise VerificationError(
                    f"{self.title}: rank {self.rank} keeps chunks {chunk} and {other} in the same memory, at "
                    f"{Buffer(buffer).name.lower()}[{start}:{stop}]"
                )

    def _check_end(self, at: dict[int, Place | None]) -> None:
        collective, own = self.schedule.collective, self._own_block()
        wanted = [block for block in self.output if collective.taker(block) in (None, self.rank) and block != own]
        for chunk in np.flatnonzero(np.isin(self.block, wanted) & (self.length > 0)).tolist():
            if at.get(chunk) != self._home(chunk, Buffer.OUTPUT):
                raise VerificationError(
                    f"{self.title}: rank {self.rank} does not end with chunk {chunk} where OUTPUT has it"
                )

    # -- messages -----------------------------------------------------------------------------------------

    def _wrong(self, index: int, problem: str) -> VerificationError:
        return VerificationError(f"{self.title} is wrong: {describe(self.program, index)} {problem}")

    def _alone(self, number: int, t: Transfer) -> VerificationError:
        return VerificationError(
            f"{self.title}: at rank {self.rank}, transfer {number} adds to chunk {t.chunk}, which was sent before; "
            "only all programs together can show that this is right"
        )
