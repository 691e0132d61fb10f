"""Steps: a program's messages in groups that are posted together, and the additions that follow each group.

A device moves data by grouped operations: all sends and receives of a group run at the same time, and the group is
over when all of them are. Every rank goes through the pipeline steps that all ranks share (``RankTemplate.steps``),
one group a step. That cannot deadlock: of all ranks that wait, look at one in the least step. Whoever it waits for
has that message in the same step, so it is in that step too, and has posted it. In a step, all messages from one rank
to another stand in the same order at both ends, which is how such operations find each other.

What comes to be added lands in a staging buffer. Once the group is over it is added, in the order of the program.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mycel.collectives.program import Buffer, Op, Program
from mycel.errors import ScheduleError

__all__ = ["STAGING", "Addition", "Copy", "Message", "Prepared", "Step", "prepare"]

#: Number of the staging buffer, after those of ``mycel.collectives.program.Buffer``.
STAGING = len(Buffer)
#: A message with its numbers and its share of the rest, measured with ``tracemalloc``.
_MESSAGE_BYTES = 256


@dataclass(frozen=True, slots=True)
class Message:
    """Bytes ``start .. stop-1`` of a buffer, to or from a peer."""

    peer: int
    buffer: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Addition:
    """``buffer[offset : +count] = operand[operand_offset : +count] (+) staging[staging_offset : +count]``.

    In elements. ``final``: the last of these elements' additions, after which an average is divided.
    """

    buffer: int
    offset: int
    operand: int
    operand_offset: int
    staging_offset: int
    count: int
    final: bool


@dataclass(frozen=True, slots=True)
class Copy:
    """``buffer[offset : +count] = source[source_offset : +count]``, in elements; buffers as in ``Buffer``."""

    buffer: int
    offset: int
    source: int
    source_offset: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One group, and what follows it.

    Attributes:
        number: pipeline step; a rank has no group for those in which it does nothing.
    """

    number: int
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    additions: tuple[Addition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """One rank's program in steps.

    Attributes:
        copies: to do before all steps.
        scratch_elements, staging_elements: lengths of the engine's own buffers.
        num_messages: sends and receives in all.
    """

    steps: tuple[Step, ...]
    copies: tuple[Copy, ...]
    scratch_elements: int
    staging_elements: int
    num_messages: int

    @property
    def num_bytes(self) -> int:
        """Memory this preparation holds, about."""
        return 2048 + _MESSAGE_BYTES * (self.num_messages + len(self.copies))


def prepare(program: Program, steps: npt.NDArray[np.int64], item_bytes: int) -> Prepared:
    """Group a program's rows by step.

    Args:
        program: one rank's.
        steps: of each of its rows, as ``RankTemplate.steps`` gives them.
        item_bytes: bytes of an element.

    Raises:
        ScheduleError: a row needs one that is not in an earlier step; only additions can share one, with each other
            and with sends, after which they are done.
    """
    c = program.columns
    if len(steps) != len(c):
        raise ScheduleError(f"rank {program.rank}: {len(steps)} steps given for {len(c)} instructions")
    local = np.flatnonzero((c["op"] == Op.REDUCE) | ((c["op"] == Op.COPY) & (np.diff(program.need_start) > 0)))
    if len(local):
        raise ScheduleError(
            f"rank {program.rank}, instruction {local[0]} is done on this rank between messages, which no device "
            "engine does; run the program on CPU tensors"
        )
    _check_needs(program, steps)
    made: list[Step] = []
    staging_elements = 0
    wire = np.flatnonzero(c["op"] != Op.COPY)
    for rows in _runs(wire[np.argsort(steps[wire], kind="stable")], steps):
        sends: list[Message] = []
        receives: list[Message] = []
        additions: list[Addition] = []
        staged = 0
        for row in rows:
            r = c[row]
            op, buffer, offset, count = int(r["op"]), int(r["buffer"]), int(r["offset"]), int(r["count"])
            channel = program.channels[int(r["channel"])]
            peer = channel.dst if op == Op.SEND else channel.src
            if op == Op.RECV_REDUCE:
                operand, operand_offset = int(r["operand_buffer"]), int(r["operand_offset"])
                additions.append(Addition(buffer, offset, operand, operand_offset, staged, count, bool(r["final"])))
                buffer, offset = STAGING, staged
                staged += count
            message = Message(peer, buffer, offset * item_bytes, (offset + count) * item_bytes)
            (sends if op == Op.SEND else receives).append(message)
        staging_elements = max(staging_elements, staged)
        made.append(
            Step(
                number=int(steps[rows[0]]),
                sends=tuple(sends),
                receives=tuple(receives),
                additions=tuple(additions),
            )
        )
    copies = tuple(
        Copy(*(int(c[name][row]) for name in ("buffer", "offset", "operand_buffer", "operand_offset", "count")))
        for row in np.flatnonzero(c["op"] == Op.COPY)
    )
    return Prepared(
        steps=tuple(made),
        copies=copies,
        scratch_elements=program.scratch_elements,
        staging_elements=staging_elements,
        num_messages=len(wire),
    )


def _check_needs(program: Program, steps: npt.NDArray[np.int64]) -> None:
    needing = np.repeat(np.arange(len(steps)), np.diff(program.need_start))
    needed, op = program.need_index, program.columns["op"]
    is_before = (op[needed] == Op.RECV_REDUCE) | (op[needed] == Op.SEND)
    adds_later = (op[needing] == Op.RECV_REDUCE) & is_before & (needed < needing)
    late = (steps[needed] > steps[needing]) | ((steps[needed] == steps[needing]) & ~adds_later)
    if late.any():
        at = int(np.flatnonzero(late)[0])
        raise ScheduleError(
            f"rank {program.rank}, instruction {needing[at]} of step {steps[needing[at]]} needs instruction "
            f"{needed[at]} of step {steps[needed[at]]}; expected an earlier step"
        )


def _runs(rows: npt.NDArray[np.int64], steps: npt.NDArray[np.int64]) -> Iterator[list[int]]:
    """The rows of each step."""
    if not len(rows):
        return
    for run in np.split(rows, np.flatnonzero(np.diff(steps[rows])) + 1):
        yield run.tolist()
