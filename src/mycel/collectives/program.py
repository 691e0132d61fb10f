"""Program: what one rank does, instruction by instruction, for one size of one collective.

A rank has three buffers: INPUT (what the caller gave), OUTPUT (what the caller gets) and SCRATCH (the executor's
own). Offsets and counts are in elements. A *channel* is one direction of one connection to a peer over one
physical path; its sends, and its receives, happen in the order of the program, so the k-th send on a channel
meets the k-th receive at the other end.

An instruction starts when it is the first unfinished one of its channel and every instruction it *needs* is
complete. A send is complete when its bytes have been handed over (its source may then be overwritten); a receive
when all its bytes stand in its destination. Apart from that, instructions run in any order.

===============  =========================================================================================
``send``         ``buffer[offset : offset+count]`` goes out on ``channel``
``recv``         what comes in on ``channel`` overwrites ``buffer[offset : offset+count]``
``recv_reduce``  ``buffer[offset : ...] = operand_buffer[operand_offset : ...] (+) what comes in``;
                 ``final``: the last of an element's reductions, after which an average is divided
``copy``         ``buffer[offset : ...] = operand_buffer[operand_offset : ...]``, no channel (-1)
===============  =========================================================================================

all_reduce, broadcast and reduce work in place: the array is in OUTPUT before and after, INPUT is empty.
all_gather's INPUT is the rank's block, reduce_scatter's OUTPUT is. INPUT is never written. In all_gather the
INPUT may be the very memory of the rank's block in OUTPUT. all_to_all's INPUT has a block for each rank, and its
OUTPUT one from each. gather's INPUT and scatter's OUTPUT are the rank's block; the whole array is at the root only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from mycel.collectives.spec import Collective
from mycel.errors import ScheduleError

__all__ = ["PROGRAM_VERSION", "Buffer", "Channel", "Instruction", "Op", "Program"]

PROGRAM_VERSION = 1


class Op(IntEnum):
    """What an instruction does."""

    SEND = 0
    RECV = 1
    RECV_REDUCE = 2
    COPY = 3


class Buffer(IntEnum):
    """Where an instruction reads or writes."""

    INPUT = 0
    OUTPUT = 1
    SCRATCH = 2


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Channel:
    """One direction of a connection, as its owner sees it.

    Attributes:
        src: sending rank.
        dst: receiving rank.
        path: topology vertices from ``src``'s to ``dst``'s.
    """

    src: int
    dst: int
    path: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction; see the module's table.

    Attributes:
        channel: index into the program's channels; -1 for ``copy``.
        offset, operand_offset, count: in elements.
        needs: indices of instructions of this program that must be complete first.
    """

    op: Op
    channel: int
    buffer: Buffer
    offset: int
    count: int
    operand_buffer: Buffer = Buffer.INPUT
    operand_offset: int = 0
    final: bool = False
    needs: tuple[int, ...] = ()


#: One row an instruction; ``needs`` live in a separate pair of arrays (compressed sparse rows).
COLUMNS = np.dtype(
    [
        ("op", np.int64),
        ("channel", np.int64),
        ("buffer", np.int64),
        ("offset", np.int64),
        ("count", np.int64),
        ("operand_buffer", np.int64),
        ("operand_offset", np.int64),
        ("final", np.int64),
    ]
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """One rank's instructions, kept as read-only columns: a 64 MB all_reduce has thousands of them.

    Attributes:
        num_elements: length of the collective's whole array.
        scratch_elements: length of SCRATCH.
        channels: this rank's, outgoing (``src == rank``) and incoming.
        columns: structured array, a row an instruction, dtype ``COLUMNS``.
        need_start: row ``i`` needs ``need_index[need_start[i] : need_start[i+1]]``; shape ``[rows + 1]``.
        need_index: instruction indices.

    Raises:
        ScheduleError: malformed; the message names the instruction.
    """

    collective: Collective
    rank: int
    num_elements: int
    scratch_elements: int
    channels: tuple[Channel, ...]
    columns: npt.NDArray[Any]
    need_start: npt.NDArray[np.int64]
    need_index: npt.NDArray[np.int64]
    version: int = PROGRAM_VERSION

    def __post_init__(self) -> None:
        for array in (self.columns, self.need_start, self.need_index):
            array.setflags(write=False)
        if self.num_elements % self.collective.num_blocks:
            raise ScheduleError(
                f"{self.num_elements} elements do not divide into {self.collective.num_blocks} blocks"
            )
        for channel in self.channels:
            if self.rank not in (channel.src, channel.dst) or channel.src == channel.dst:
                raise ScheduleError(f"rank {self.rank}: channel {channel} is not one of its own")
        rows = len(self.columns)
        starts = self.need_start
        if len(starts) != rows + 1 or starts[0] or starts[-1] != len(self.need_index) or (np.diff(starts) < 0).any():
            raise ScheduleError(f"rank {self.rank}: 'needs' do not match {rows} instructions")
        self._check_rows()

    def _check_rows(self) -> None:
        c = self.columns
        lengths = np.array([self.length(b) for b in Buffer], dtype=np.int64)
        wire = c["op"] != Op.COPY
        bad = (c["op"] < 0) | (c["op"] > Op.COPY) | (c["count"] <= 0) | (c["offset"] < 0)
        bad |= (c["buffer"] < 0) | (c["buffer"] > 2) | (c["operand_buffer"] < 0) | (c["operand_buffer"] > 2)
        bad |= np.where(wire, (c["channel"] < 0) | (c["channel"] >= len(self.channels)), c["channel"] != -1)
        if not bad.any():
            bad |= c["offset"] + c["count"] > lengths[c["buffer"]]
            reads_operand = (c["op"] == Op.RECV_REDUCE) | (c["op"] == Op.COPY)
            end = c["operand_offset"] + c["count"]
            bad |= reads_operand & ((c["operand_offset"] < 0) | (end > lengths[c["operand_buffer"]]))
            bad |= (c["op"] != Op.SEND) & (c["buffer"] == Buffer.INPUT)
            outgoing = np.array([ch.src == self.rank for ch in self.channels] or [False])
            side = np.where(wire, outgoing[np.where(wire, c["channel"], 0)], False)
            bad |= wire & (side != (c["op"] == Op.SEND))
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise ScheduleError(
                f"rank {self.rank}, instruction {row}: {self.instruction(row)} is out of range "
                f"(buffers hold {lengths.tolist()} elements, {len(self.channels)} channels)"
            )
        if len(self.need_index) and not (
            (self.need_index >= 0).all() and (self.need_index < len(self.columns)).all()
        ):
            raise ScheduleError(f"rank {self.rank}: 'needs' name instructions that do not exist")

    def length(self, buffer: Buffer) -> int:
        """Elements in a buffer."""
        c = self.collective
        block, at_root = self.num_elements // c.num_blocks, self.num_elements if self.rank == c.root else 0
        if buffer is Buffer.SCRATCH:
            return self.scratch_elements
        if c.name == "all_to_all":
            return c.num_ranks * block
        if buffer is Buffer.INPUT:
            given = {"all_gather": block, "reduce_scatter": self.num_elements, "gather": block, "scatter": at_root}
            return given.get(c.name, 0)
        return {"reduce_scatter": block, "gather": at_root, "scatter": block}.get(c.name, self.num_elements)

    def instruction(self, row: int) -> Instruction:
        """One row as an object."""
        c = self.columns[row]
        needs = self.need_index[self.need_start[row] : self.need_start[row + 1]]
        return Instruction(
            op=Op(int(c["op"])),
            channel=int(c["channel"]),
            buffer=Buffer(int(c["buffer"])),
            offset=int(c["offset"]),
            count=int(c["count"]),
            operand_buffer=Buffer(int(c["operand_buffer"])),
            operand_offset=int(c["operand_offset"]),
            final=bool(c["final"]),
            needs=tuple(int(i) for i in needs),
        )

    @cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        """All rows as objects (slow for large programs; meant for people and checkers)."""
        return tuple(self.instruction(row) for row in range(len(self.columns)))

    @classmethod
    def from_instructions(
        cls,
        instructions: Iterable[Instruction],
        *,
        collective: Collective,
        rank: int,
        num_elements: int,
        scratch_elements: int,
        channels: tuple[Channel, ...],
    ) -> Program:
        """Build the columns from instruction objects."""
        items = tuple(instructions)
        columns = np.zeros(len(items), dtype=COLUMNS)
        for row, i in enumerate(items):
            columns[row] = (
                i.op, i.channel, i.buffer, i.offset, i.count, i.operand_buffer, i.operand_offset, i.final
            )  # fmt: skip
        starts = np.zeros(len(items) + 1, dtype=np.int64)
        np.cumsum([len(i.needs) for i in items], out=starts[1:])
        index = np.array([n for i in items for n in i.needs], dtype=np.int64)
        return cls(
            collective=collective,
            rank=rank,
            num_elements=num_elements,
            scratch_elements=scratch_elements,
            channels=channels,
            columns=columns,
            need_start=starts,
            need_index=index,
        )

    def to_text(self) -> str:
        """A line an instruction, for people."""
        c = self.collective
        root = "" if c.root is None else f" root {c.root}"
        lines = [
            f"mycel.program {self.version}",
            f"collective {c.name} {c.num_ranks}{root}",
            f"rank {self.rank} elements {self.num_elements} scratch {self.scratch_elements}",
        ]
        for number, ch in enumerate(self.channels):
            lines.append(f"channel {number} {ch.src} -> {ch.dst} via {'>'.join(map(str, ch.path))}")
        for number, i in enumerate(self.instructions):
            text = f"{number}: {i.op.name.lower()} {i.buffer.name.lower()}[{i.offset}:+{i.count}]"
            if i.op in (Op.RECV_REDUCE, Op.COPY):
                text += f" with {i.operand_buffer.name.lower()}[{i.operand_offset}]"
            if i.channel >= 0:
                text += f" on {i.channel}"
            if i.final:
                text += " final"
            if i.needs:
                text += f" needs {','.join(map(str, i.needs))}"
            lines.append(text)
        return "\n".join(lines) + "\n"
