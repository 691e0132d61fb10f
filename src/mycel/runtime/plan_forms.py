"""Programs of plans as the engine reads them: what ``forms`` is for schedules, whose rows are made in compiled code.

A plan's programs are made once for each length, in Python, and kept with everything else that is prepared.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np

from mycel.collectives.plan_programs import PlanPart
from mycel.collectives.program import Op, Program
from mycel.runtime import job_fields as j
from mycel.runtime.forms import Workspace
from mycel.runtime.prepared import LINE, Ints, Line, Origin, Prepared, Traffic

__all__ = ["PlanForm"]

_LINE_BYTES = 64


class PlanForm:
    """One rank's part of a plan on the channels of one group; arguments as for ``forms.Form``."""

    def __init__(
        self, plan: PlanPart, lines: Sequence[Line], extras: Ints, asking: Ints, workspace: Workspace | None = None
    ) -> None:
        self.plan = plan
        self._extras, self._asking = extras, asking
        self._workspace = workspace or Workspace()
        self._lines = list(lines)

    def attach(self, lines: Sequence[Line]) -> None:
        """Take the plan's channels, now that all are open, for what is prepared from now on."""
        self._lines = list(lines)

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
        """What the engine reads for an array of ``num_elements``; arguments and errors as for ``forms.Form``."""
        program = self.plan.expand(num_elements, piece_elements, block_elements=block_elements)
        total_bytes = num_elements * item_bytes
        scratch, scratch_address, shared = self._workspace.scratch.at_least(program.scratch_elements * item_bytes)
        staging_of = _staging(program, item_bytes)
        staging, staging_address, _ = self._workspace.staging.at_least(sum(staging_of))
        moved = _moved(program, item_bytes)
        stated = moved if states_channel_bytes else [total_bytes] * len(program.channels)
        parts = _parts(program, item_bytes)
        parts[j.J_CHANNELS] = self._channel_rows(program, staging_of, staging_address, stated)
        parts[j.J_POLL] = np.zeros(2 * len(program.channels) + len(self._extras) + 1, dtype=np.int64)
        block = np.concatenate([part.ravel() for part in parts.values()])
        address: int = block.__array_interface__["data"][0]
        places: dict[int, int] = {}
        for name, part in parts.items():
            places[name] = address
            address += part.nbytes
        rows = len(program.columns)
        messages = np.bincount(program.columns["channel"] + 1, minlength=len(program.channels) + 1)[1:].tolist()
        traffic = Traffic(origin=origin, channels=program.channels, moved=(*moved, *messages))
        prepared = Prepared(
            plan=self.plan,
            lengths=(num_elements, piece_elements, block_elements),
            item_bytes=item_bytes,
            block=block,
            scratch=scratch,
            staging=staging,
            extras=self._extras,
            traffic=traffic,
            addresses=(rows, len(program.channels), *(places[name] for name in range(j.J_ROWS, j.J_CHANNELS + 1))),
            scratch_address=scratch_address,
            asking=self._asking,
            watched=(places[j.J_POLL], len(self._extras), self._extras.__array_interface__["data"][0]),
            asking_address=self._asking.__array_interface__["data"][0],
            total_bytes=total_bytes,
            num_bytes=1024 + block.nbytes + (0 if shared else len(scratch)),
        )
        traffic.prepared = weakref.ref(prepared)
        return prepared

    def _channel_rows(
        self, program: Program, staging_of: Sequence[int], staging_address: int, stated: Sequence[int]
    ) -> Ints:
        rows = np.zeros((len(program.channels), j.CHANNEL_FIELDS), dtype=np.int64)
        if len(rows):
            rows[:, list(LINE)] = self._lines
            rows[:, j.C_OUTGOING] = [channel.src == program.rank for channel in program.channels]
            rows[:, j.C_STAGING] = staging_address + np.cumsum([0, *staging_of[:-1]])
            rows[:, j.C_STATED] = stated
        return rows


def _staging(program: Program, item_bytes: int) -> list[int]:
    """Bytes in which each channel's sums arrive."""
    columns = program.columns
    needed = []
    for number in range(len(program.channels)):
        mine = (columns["channel"] == number) & (columns["op"] == Op.RECV_REDUCE)
        longest = int(columns["count"][mine].max(initial=0)) * item_bytes
        needed.append(-(-longest // _LINE_BYTES) * _LINE_BYTES)
    return needed


def _moved(program: Program, item_bytes: int) -> list[int]:
    """Bytes of a run on each channel."""
    columns = program.columns
    wire = columns["channel"] >= 0
    found = np.zeros(len(program.channels), dtype=np.int64)
    np.add.at(found, columns["channel"][wire], columns["count"][wire] * item_bytes)
    return [int(number) for number in found]


def _parts(program: Program, item_bytes: int) -> dict[int, Ints]:
    """The arrays of a program by the fields of a job that have their addresses, in the order of these."""
    columns, num_rows = program.columns, len(program.columns)
    rows = np.zeros((num_rows, j.ROW_FIELDS), dtype=np.int64)
    rows[:, j.R_OP], rows[:, j.R_CHANNEL] = columns["op"], columns["channel"]
    rows[:, j.R_ADDRESS_BUFFER], rows[:, j.R_OFFSET] = columns["buffer"], columns["offset"] * item_bytes
    rows[:, j.R_BYTES] = columns["count"] * item_bytes
    rows[:, j.R_OPERAND_BUFFER] = columns["operand_buffer"]
    rows[:, j.R_OPERAND_OFFSET] = columns["operand_offset"] * item_bytes
    rows[:, j.R_FINAL] = columns["final"]
    needs = np.diff(program.need_start)
    needing = np.repeat(np.arange(num_rows), needs)
    by_need = np.argsort(program.need_index, kind="stable")
    starts = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(program.need_index, minlength=num_rows), out=starts[1:])
    wire = columns["channel"] >= 0
    queued = np.flatnonzero(wire)
    queued = queued[np.argsort(columns["channel"][queued], kind="stable")]
    queue_start = np.zeros(len(program.channels) + 1, dtype=np.int64)
    np.cumsum(np.bincount(columns["channel"][queued], minlength=len(program.channels)), out=queue_start[1:])
    late = np.flatnonzero((columns["op"] == Op.REDUCE) | ((columns["op"] == Op.COPY) & (needs > 0)))
    return {
        j.J_ROWS: rows,
        j.J_PENDING0: needs.astype(np.int64),
        j.J_PENDING: np.zeros(num_rows, dtype=np.int64),
        j.J_DEPENDENT_START: starts,
        j.J_DEPENDENTS: np.append(needing[by_need], 0).astype(np.int64),
        j.J_QUEUE_START: queue_start,
        j.J_QUEUE: np.concatenate([queued, late, np.full(num_rows + 1 - len(queued) - len(late), -1)]),
    }
