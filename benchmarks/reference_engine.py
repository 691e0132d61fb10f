"""The engine in plain Python: the oracle of the compiled one, and the measure of what compiling it brings.

It runs the same jobs (``mycel.runtime.prepared.Job``) over the same sockets with the same bytes on the wire, so that
a rank may run one and its peer the other. It is written from the execution model in ``mycel.collectives.program``:
numpy instead of addresses, a set of what is done instead of counters, ``select.poll`` instead of system calls.
"""

from __future__ import annotations

import ctypes
import select
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mycel.collectives.program import Buffer, Op
from mycel.runtime import job_fields as j
from mycel.runtime.prepared import Job
from mycel.runtime.reduce_kernels import DType, ReduceOp

__all__ = ["execute_in_python"]

_HEADER = struct.Struct("<4q")
_BLOCKED = -1  # the socket takes, or has, no more for now
_BURST = 16  # steps on one channel before the others get their turn
_NUMPY: dict[int, Any] = {
    DType.FLOAT32: np.float32,
    DType.FLOAT64: np.float64,
    DType.FLOAT16: np.float16,
    DType.INT32: np.int32,
    DType.INT64: np.int64,
}
_COMBINE: dict[int, Any] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MAX: np.maximum,
    ReduceOp.MIN: np.minimum,
    ReduceOp.PRODUCT: np.multiply,
}


@dataclass(slots=True)
class _Channel:
    """One direction of a connection during a run."""

    sock: socket.socket
    outgoing: bool
    rows: list[int]
    position: int = 0
    header: bytearray = field(default_factory=bytearray)
    header_left: int = j.HEADER_BYTES
    moved: int = 0


def _memory(address: int, num_bytes: int) -> memoryview:
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B") if num_bytes else memoryview(b"")


class _Run:
    """The state of one run; a row is named by its index in the program."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.program = job.prepared.program
        self.columns = self.program.columns
        self.item = job.prepared.item_bytes
        lengths = [self.program.length(b) * self.item for b in Buffer]
        bases = [int(job.fields[j.J_BASES + b]) for b in Buffer]
        self.buffers = [_memory(base, n if base else 0) for base, n in zip(bases, lengths, strict=True)]
        self.header = _HEADER.pack(*(int(v) for v in job.fields[j.J_HEADER : j.J_HEADER + 4]))
        start, index = self.program.need_start, self.program.need_index
        self.needs = [set(index[start[i] : start[i + 1]].tolist()) for i in range(len(self.columns))]
        self.done: set[int] = set()
        self.channels = []
        for number, channel in enumerate(self.program.channels):
            descriptor = int(job.prepared.channel_rows[number, j.C_FD])
            self.channels.append(
                _Channel(
                    sock=socket.socket(fileno=descriptor),
                    outgoing=channel.src == self.program.rank,
                    rows=np.flatnonzero(self.columns["channel"] == number).tolist(),
                )
            )

    def place(self, row: int, buffer: str = "buffer", offset: str = "offset") -> memoryview:
        c = self.columns[row]
        first = int(c[offset]) * self.item
        return self.buffers[int(c[buffer])][first : first + int(c["count"]) * self.item]

    def elements(self, view: memoryview) -> npt.NDArray[Any]:
        return np.frombuffer(view, dtype=_NUMPY[int(self.job.fields[j.J_DTYPE])])

    def copy_local(self) -> None:
        for row in np.flatnonzero(self.columns["op"] == Op.COPY).tolist():
            source = self.place(row, "operand_buffer", "operand_offset")
            np.frombuffer(self.place(row), dtype=np.uint8)[:] = np.frombuffer(source, dtype=np.uint8)
            self.done.add(row)

    def ready(self, channel: _Channel) -> bool:
        return channel.position < len(channel.rows) and self.needs[channel.rows[channel.position]] <= self.done

    def move(self, channel: _Channel, staging: dict[int, bytearray]) -> int:
        """Move bytes of the message at the head: ``PENDING``, ``DONE`` if it is complete, or why there is no more."""
        row = channel.rows[channel.position]
        reduces = self.columns["op"][row] == Op.RECV_REDUCE
        target = self.place(row)
        if reduces:
            target = memoryview(staging.setdefault(row, bytearray(len(target))))
        try:
            if channel.header_left and channel.outgoing:
                channel.header_left -= channel.sock.send(self.header[-channel.header_left :])
                return j.PENDING
            if channel.header_left:
                came = channel.sock.recv(channel.header_left)
                channel.header += came
                channel.header_left -= len(came)
                if not came:
                    return j.CLOSED
                return j.MISMATCHED if not channel.header_left and channel.header != self.header else j.PENDING
            if channel.outgoing:
                count = channel.sock.send(target[channel.moved :])
            else:
                count = channel.sock.recv_into(target[channel.moved :])
        except BlockingIOError:
            return _BLOCKED
        except OSError:
            return j.CLOSED
        if count == 0:
            return j.CLOSED
        channel.moved += count
        if channel.moved < len(target):
            return j.PENDING
        if reduces:
            self.absorb(row, staging.pop(row))
        channel.moved = 0
        channel.position += 1
        self.done.add(row)
        return j.DONE

    def absorb(self, row: int, came: bytearray) -> None:
        combine = _COMBINE[int(self.job.fields[j.J_REDUCE_OP])]
        operand = self.elements(self.place(row, "operand_buffer", "operand_offset"))
        result = self.elements(self.place(row))
        combine(operand, self.elements(memoryview(came)), out=result)
        divisor = int(self.job.fields[j.J_DIVISOR])
        if self.columns["final"][row] and divisor:
            result[:] = result / divisor if result.dtype.kind == "f" else np.trunc(result / divisor)


def execute_in_python(job: Job) -> int:
    """Run a fresh job to its end; what ``mycel.runtime.engine.execute`` does, without control connections.

    Args:
        job: of floats (not bfloat16) or integers; its time-out holds.

    Returns:
        ``DONE``, ``CLOSED``, ``MISMATCHED`` or ``TIMED_OUT``.
    """
    run = _Run(job)
    try:
        return _drive(run)
    finally:
        for channel in run.channels:
            channel.sock.detach()


def _drive(run: _Run) -> int:
    deadline = time.monotonic_ns() + int(run.job.fields[j.J_LIMIT_NS])
    staging: dict[int, bytearray] = {}
    run.copy_local()
    by_descriptor = {channel.sock.fileno(): channel for channel in run.channels}
    poller = select.poll()
    watched: set[int] = set()
    while len(run.done) < len(run.columns):
        for descriptor, channel in by_descriptor.items():
            if run.ready(channel) and descriptor not in watched:
                poller.register(descriptor, select.POLLOUT if channel.outgoing else select.POLLIN)
                watched.add(descriptor)
        left = deadline - time.monotonic_ns()
        if left <= 0:
            return j.TIMED_OUT
        for descriptor, _ in poller.poll(left // 1_000_000 + 1):
            channel = by_descriptor[descriptor]
            for _ in range(_BURST):
                if not run.ready(channel):
                    poller.unregister(descriptor)
                    watched.remove(descriptor)
                    break
                status = run.move(channel, staging)
                if status == _BLOCKED:
                    break
                if status not in (j.PENDING, j.DONE):
                    return status
    run.job.fields[j.J_STATUS] = j.DONE
    return j.DONE
