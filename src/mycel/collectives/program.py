"""Program: what one rank does, instruction by instruction, for one size of one collective.

A rank has three buffers: INPUT (what the caller gave), OUTPUT (what the caller gets) and SCRATCH (the executor's
own). Offsets and counts are in elements. A *channel* is one direction of one connection to a peer over one
physical path; its sends, and its receives, happen in the order of the program, so the k-th send on a channel
meets the k-th receive at the other end.

An instruction starts when it is the first unfinished one of its channel and every instruction it *needs* is
complete. A send is complete when its bytes have been handed over (its source may then be overwritten); a receive
when all its bytes stand in its destination. Apart from that, instructions run in any order; local ones (``copy``,
``reduce``) that need others are done one after the other, in the order of the program.

===============  =========================================================================================
``send``         ``buffer[offset : offset+count]`` goes out on ``channel``
``recv``         what comes in on ``channel`` overwrites ``buffer[offset : offset+count]``
``recv_reduce``  ``buffer[offset : ...] = operand_buffer[operand_offset : ...] (+) what comes in``;
                 ``final``: the last of an element's reductions, after which an average is divided
``copy``         ``buffer[offset : ...] = operand_buffer[operand_offset : ...]``, no channel (-1)
``reduce``       ``buffer[offset : ...] = operand_buffer[operand_offset : ...] (+) buffer[offset : ...]``, no channel;
                 ``final`` as above
===============  =========================================================================================

all_reduce, broadcast and reduce work in place: the array is in OUTPUT before and after, INPUT is empty.
all_gather's INPUT is the rank's block, reduce_scatter's OUTPUT is. INPUT is never written. In all_gather the
INPUT may be the very memory of the rank's block in OUTPUT. all_to_all's INPUT has a block for each rank, and its
OUTPUT one from each. gather's INPUT and scatter's OUTPUT are the rank's block; the whole array is at the root only.

Switches that copy and add have programs too, with numbers from ``num_ranks`` on: INPUT and OUTPUT are empty, and all
that passes through is in SCRATCH.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from mycel.brief import brief
from mycel.collectives.spec import Collective
from mycel.errors import ScheduleError

__all__ = ["PROGRAM_VERSION", "Buffer", "Channel", "Instruction", "Op", "Program", "block_sizes"]

PROGRAM_VERSION = 1


class Op(IntEnum):
    """What an instruction does."""

    SEND = 0
    RECV = 1
    RECV_REDUCE = 2
    COPY = 3
    REDUCE = 4

    @property
    def is_local(self) -> bool:
        """Whether nothing is sent or received."""
        return self >= Op.COPY


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

    __repr__ = brief


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction; see the module's table.

    Attributes:
        channel: index into the program's channels; -1 for ``copy`` and ``reduce``.
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

    __repr__ = brief


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


def block_sizes(
    collective: Collective, num_elements: int, block_elements: Sequence[int] | None = None
) -> npt.NDArray[np.int64]:
    """Elements of each block of an array of ``num_elements``.

    Args:
        collective: whose blocks.
        num_elements: length of the whole array.
        block_elements: length of each block; in proportion to the collective's weights if not given.

    Raises:
        ScheduleError: the elements do not divide in proportion to the weights; too few or too many blocks, a
            negative one, or blocks that do not add up to the array.
    """
    blocks, weight = collective.num_blocks, collective.total_weight
    if block_elements is not None:
        sizes = np.array(block_elements, dtype=np.int64)
        if sizes.shape != (blocks,):
            raise ScheduleError(f"{collective.name}: {len(block_elements)} block lengths given for {blocks} blocks")
        if (sizes < 0).any():
            block = int(np.flatnonzero(sizes < 0)[0])
            raise ScheduleError(
                f"{collective.name}: block {block} has {sizes[block]} elements; at least 0 are needed"
            )
        if int(sizes.sum()) != num_elements:
            raise ScheduleError(
                f"{collective.name}: blocks of {sizes.sum()} elements in all, for an array of {num_elements}"
            )
        return sizes
    if num_elements % weight:
        what = "blocks" if collective.weights is None else "parts, as the weights of the blocks need"
        raise ScheduleError(f"{collective.name}: {num_elements} elements do not divide into {weight} {what}")
    if collective.weights is None:
        return np.full(blocks, num_elements // weight, dtype=np.int64)
    return np.array(collective.weights, dtype=np.int64) * (num_elements // weight)


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """One rank's instructions, kept as read-only columns: a 64 MB all_reduce has thousands of them.

    Attributes:
        collective: that all ranks' programs carry out together.
        rank: whose program; from the number of ranks on, a switch in which transfers end.
        num_elements: length of the collective's whole array.
        scratch_elements: length of SCRATCH.
        channels: this rank's, outgoing (``src == rank``) and incoming.
        columns: structured array, a row an instruction, dtype ``COLUMNS``.
        need_start: row ``i`` needs ``need_index[need_start[i] : need_start[i+1]]``; shape ``[rows + 1]``.
        need_index: instruction indices.
        block_elements: length of each block; ``None`` where they are in proportion to the collective's weights.
        weights: of each channel, against those of all ranks that share a link with it; ``None``: all have the same.
            They say how fast, never what or in which order.
        version: of this form.

    Raises:
        ScheduleError: malformed; the message names the instruction.

    Examples:
        >>> from mycel.collectives.lower import lower
        >>> from mycel.collectives.synth import synthesize
        >>> from mycel.topology import load_topology
        >>> hop = synthesize(load_topology("ring:ranks=3,bandwidth=1 GB/s"), "all_gather", "ring")
        >>> program = lower(hop, 12, piece_elements=4)[0]
        >>> [instruction.op.name for instruction in program.instructions]
        ['SEND', 'RECV', 'SEND', 'RECV', 'COPY']
        >>> third = program.instructions[2]  # sends on the block that the second has received
        >>> third.buffer.name, third.offset, third.count, third.needs
        ('OUTPUT', 8, 4, (1,))
    """

    collective: Collective
    rank: int
    num_elements: int
    scratch_elements: int
    channels: tuple[Channel, ...]
    columns: npt.NDArray[Any]
    need_start: npt.NDArray[np.int64]
    need_index: npt.NDArray[np.int64]
    block_elements: tuple[int, ...] | None = None
    weights: tuple[int, ...] | None = None
    version: int = PROGRAM_VERSION

    __repr__ = brief

    def __post_init__(self) -> None:
        for array in (self.columns, self.need_start, self.need_index):
            array.setflags(write=False)
        self.block_sizes.setflags(write=False)
        for channel in self.channels:
            if self.rank not in (channel.src, channel.dst) or channel.src == channel.dst:
                raise ScheduleError(f"rank {self.rank}: channel {channel} is not one of its own")
        if self.weights is not None and (len(self.weights) != len(self.channels) or min(self.weights, default=1) < 1):
            raise ScheduleError(
                f"rank {self.rank}: {len(self.weights)} weights from {min(self.weights, default=1)} for "
                f"{len(self.channels)} channels; each needs one of at least 1"
            )
        rows = len(self.columns)
        starts = self.need_start
        if len(starts) != rows + 1 or starts[0] or starts[-1] != len(self.need_index) or (np.diff(starts) < 0).any():
            raise ScheduleError(f"rank {self.rank}: 'needs' do not match {rows} instructions")
        self._check_rows()

    def _check_rows(self) -> None:
        c = self.columns
        lengths = np.array([self.length(b) for b in Buffer], dtype=np.int64)
        wire = c["op"] < Op.COPY
        bad = (c["op"] < 0) | (c["op"] > Op.REDUCE) | (c["count"] <= 0) | (c["offset"] < 0)
        bad |= (c["buffer"] < 0) | (c["buffer"] > 2) | (c["operand_buffer"] < 0) | (c["operand_buffer"] > 2)
        bad |= np.where(wire, (c["channel"] < 0) | (c["channel"] >= len(self.channels)), c["channel"] != -1)
        if not bad.any():
            bad |= c["offset"] + c["count"] > lengths[c["buffer"]]
            reads_operand = c["op"] >= Op.RECV_REDUCE
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

    @cached_property
    def block_sizes(self) -> npt.NDArray[np.int64]:
        """Elements of each block of the array."""
        return block_sizes(self.collective, self.num_elements, self.block_elements)

    def length(self, buffer: Buffer) -> int:
        """Elements in a buffer."""
        c, sizes, n = self.collective, self.block_sizes, self.collective.num_ranks
        at_root = self.num_elements if self.rank == c.root else 0
        if buffer is Buffer.SCRATCH:
            return self.scratch_elements
        if self.rank >= n:
            return 0
        if c.name == "all_to_all":
            given = sizes[self.rank * n : (self.rank + 1) * n]
            return int((given if buffer is Buffer.INPUT else sizes[self.rank :: n]).sum())
        block = int(sizes[self.rank]) if c.num_blocks == n else 0
        if buffer is Buffer.INPUT:
            sources = {"all_gather": block, "reduce_scatter": self.num_elements, "gather": block, "scatter": at_root}
            return sources.get(c.name, 0)
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
        block_elements: tuple[int, ...] | None = None,
        weights: tuple[int, ...] | None = None,
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
            block_elements=block_elements,
            weights=weights,
        )

    def to_text(self) -> str:
        """A line an instruction, for people."""
        lines = [
            f"mycel.program {self.version}",
            f"collective {self.collective.to_text()}",
            f"rank {self.rank} elements {self.num_elements} scratch {self.scratch_elements}",
        ]
        if self.block_elements is not None:
            lines.append(f"blocks {','.join(map(str, self.block_elements))}")
        for number, ch in enumerate(self.channels):
            weight = "" if self.weights is None else f" weight {self.weights[number]}"
            lines.append(f"channel {number} {ch.src} -> {ch.dst} via {'>'.join(map(str, ch.path))}{weight}")
        for number, i in enumerate(self.instructions):
            text = f"{number}: {i.op.name.lower()} {i.buffer.name.lower()}[{i.offset}:+{i.count}]"
            if i.op >= Op.RECV_REDUCE:
                text += f" with {i.operand_buffer.name.lower()}[{i.operand_offset}]"
            if i.channel >= 0:
                text += f" on {i.channel}"
            if i.final:
                text += " final"
            if i.needs:
                text += f" needs {','.join(map(str, i.needs))}"
            lines.append(text)
        return "\n".join(lines) + "\n"
