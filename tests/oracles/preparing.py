"""A program as the engine reads it, by operations on whole columns: what ``mycel.runtime.forms`` must fill in."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mycel.collectives.program import Op, Program
from mycel.runtime import job_fields as j

__all__ = ["Arrays", "arrays_of"]

Ints = npt.NDArray[np.int64]


class Arrays(NamedTuple):
    """The parts of a preparation that a size decides; ``moved`` and ``longest`` are bytes of each channel."""

    rows: Ints
    pending0: Ints
    dependent_start: Ints
    dependents: Ints
    queue_start: Ints
    queue: Ints
    moved: Ints
    longest: Ints


def arrays_of(program: Program, item_bytes: int) -> Arrays:
    """What a program comes to, with elements of so many bytes."""
    c, num_channels = program.columns, len(program.channels)
    rows = np.zeros((len(c), j.ROW_FIELDS), dtype=np.int64)
    rows[:, j.R_OP] = c["op"]
    rows[:, j.R_CHANNEL] = c["channel"]
    rows[:, j.R_ADDRESS_BUFFER] = c["buffer"]
    rows[:, j.R_OFFSET] = c["offset"] * item_bytes
    rows[:, j.R_BYTES] = c["count"] * item_bytes
    rows[:, j.R_OPERAND_BUFFER] = c["operand_buffer"]
    rows[:, j.R_OPERAND_OFFSET] = c["operand_offset"] * item_bytes
    rows[:, j.R_FINAL] = c["final"]
    pending0 = np.diff(program.need_start).astype(np.int64)
    needing = np.repeat(np.arange(len(c), dtype=np.int64), pending0)
    dependent_start = np.concatenate([[0], np.cumsum(np.bincount(program.need_index, minlength=len(c)))])
    wire = np.flatnonzero(c["channel"] >= 0)
    queue = wire[np.argsort(c["channel"][wire], kind="stable")]
    queue_start = np.concatenate([[0], np.cumsum(np.bincount(c["channel"][wire], minlength=num_channels))])
    moved, longest = np.zeros(num_channels, dtype=np.int64), np.zeros(num_channels, dtype=np.int64)
    np.add.at(moved, c["channel"][wire], rows[wire, j.R_BYTES])
    sums = np.flatnonzero(c["op"] == Op.RECV_REDUCE)
    np.maximum.at(longest, c["channel"][sums], rows[sums, j.R_BYTES])
    return Arrays(
        rows=rows,
        pending0=pending0,
        dependent_start=dependent_start,
        dependents=needing[np.argsort(program.need_index, kind="stable")],
        queue_start=queue_start,
        queue=queue,
        moved=moved,
        longest=longest,
    )
