"""What is done with a row of a program, whichever way its message goes: see ``engine`` and ``ring_channels``."""

from __future__ import annotations

from mycel.runtime import job_fields as j
from mycel.runtime.libc import int64_at
from mycel.runtime.reduce_kernels import combine, scale
from mycel.standalone import inlined

__all__ = ["finish", "has_same_header", "reduce_into"]


@inlined
def finish(job, row) -> None:  # type: ignore[no-untyped-def]
    """Count a row as complete and release what waited for it."""
    starts = int64_at(job[j.J_DEPENDENT_START], job[j.J_NUM_ROWS] + 1)
    begin, end = starts[row], starts[row + 1]
    pending = int64_at(job[j.J_PENDING], job[j.J_NUM_ROWS])
    dependents = int64_at(job[j.J_DEPENDENTS], end + 1)
    for i in range(begin, end):
        pending[dependents[i]] -= 1
    job[j.J_REMAINING] -= 1


@inlined
def reduce_into(job, row, destination, operand, incoming, num_bytes) -> None:  # type: ignore[no-untyped-def]
    count = num_bytes // job[j.J_ELEMENT_BYTES]
    combine(job[j.J_DTYPE], job[j.J_REDUCE_OP], destination, operand, incoming, count)
    if row[j.R_FINAL] != 0 and job[j.J_DIVISOR] != 0:
        scale(job[j.J_DTYPE], destination, count, job[j.J_DIVISOR])


@inlined
def has_same_header(job, channel) -> bool:  # type: ignore[no-untyped-def]
    same = channel[j.C_HEADER + 3] == channel[j.C_STATED]
    for i in range(3):
        same &= job[j.J_HEADER + i] == channel[j.C_HEADER + i]
    return same  # type: ignore[no-any-return]
