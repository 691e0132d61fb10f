"""The ring of jobs between a group's callers and the thread of its engine, in compiled code."""

from __future__ import annotations

from mycel.runtime.engine import execute, take_number
from mycel.runtime.job_fields import DONE, J_HEADER, J_POSITION, JOB_FIELDS
from mycel.runtime.libc import int64_at, read_fd, write_fd
from mycel.standalone import standalone

__all__ = [
    "RING_CAPACITY",
    "RING_COMPLETED",
    "RING_NUMBERS",
    "RING_SLOTS",
    "RING_STOP",
    "RING_SUBMITTED",
    "serve",
    "submit",
]

# Its fields.
RING_SUBMITTED = 0
RING_COMPLETED = 1
RING_STOP = 2
RING_SCRATCH = 4
RING_NUMBERS = 5  # the last sequence number that was given
RING_SLOTS = 8
RING_CAPACITY = 4096


@standalone
def submit(ring_address: int, address: int) -> int:
    """Put a job at the end of a ring, numbered; once, however often this is called.

    Args:
        ring_address: see ``serve``; the caller has seen that there is room.
        address: of the job.

    Returns:
        Its sequence number.
    """
    job = int64_at(address, JOB_FIELDS)
    if job[J_POSITION] < 0:
        ring = int64_at(ring_address, RING_SLOTS + RING_CAPACITY)
        take_number(job)
        job[J_POSITION] = ring[RING_SUBMITTED]
        ring[RING_SLOTS + ring[RING_SUBMITTED] % RING_CAPACITY] = address
        ring[RING_SUBMITTED] += 1
    return job[J_HEADER + 1]  # type: ignore[no-any-return]


@standalone
def serve(ring_address: int, wake_fd: int, done_fd: int) -> int:
    """Run the jobs of a ring until one needs Python, or the ring is stopped.

    Args:
        ring_address: of ``RING_SLOTS + RING_CAPACITY`` integers; slots hold job addresses.
        wake_fd: eventfd that is written after a job was submitted or the ring was stopped.
        done_fd: eventfd to write after a job is done.

    Returns:
        ``DONE`` when stopped; else the status of the job at position ``RING_COMPLETED``.
    """
    ring = int64_at(ring_address, RING_SLOTS + RING_CAPACITY)
    scratch = ring_address + RING_SCRATCH * 8
    while True:
        while ring[RING_COMPLETED] < ring[RING_SUBMITTED]:
            status = execute(ring[RING_SLOTS + ring[RING_COMPLETED] % RING_CAPACITY])
            if status != DONE:
                return status
            ring[RING_COMPLETED] += 1
            ring[RING_SCRATCH] = 1
            write_fd(done_fd, scratch, 8)
        if ring[RING_STOP] != 0:
            return DONE
        read_fd(wake_fd, scratch, 8)
