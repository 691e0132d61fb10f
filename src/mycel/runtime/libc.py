"""The few libc calls the engine makes from compiled code, by name, without the interpreter lock.

Pointers travel as plain 64-bit integers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mycel.machine.words import array_at, external, table_at
from mycel.standalone import inlined

__all__ = [
    "EAGAIN",
    "EINTR",
    "MSG_DONTWAIT",
    "MSG_NOSIGNAL",
    "POLLERR",
    "POLLHUP",
    "POLLIN",
    "POLLNVAL",
    "POLLOUT",
    "int64_at",
    "int64_table_at",
    "last_errno",
    "memmove",
    "monotonic_ns",
    "poll",
    "read_fd",
    "recv",
    "send",
    "sendmsg",
    "write_fd",
]

MSG_DONTWAIT = 0x40
MSG_NOSIGNAL = 0x4000
EINTR, EAGAIN = 4, 11
POLLIN, POLLOUT, POLLERR, POLLHUP, POLLNVAL = 0x1, 0x4, 0x8, 0x10, 0x20
_CLOCK_MONOTONIC = 1

# Bits of the result and of each argument.
recv = external("recv", 64, 32, 64, 64, 32)
send = external("send", 64, 32, 64, 64, 32)
sendmsg = external("sendmsg", 64, 32, 64, 32)
poll = external("poll", 32, 64, 64, 32)
read_fd = external("read", 64, 32, 64, 64)
write_fd = external("write", 64, 32, 64, 64)
memmove = external("memmove", 64, 64, 64, 64)
_errno_location = external("__errno_location", 64)
_clock_gettime = external("clock_gettime", 32, 32, 64)


@inlined
def int64_at(address: int, length: int) -> npt.NDArray[np.int64]:
    """The ``length`` 64-bit integers at ``address``, as an array that shares the memory."""
    return array_at(address, np.int64, length)  # type: ignore[no-any-return]


@inlined
def int64_table_at(address: int, rows: int, fields: int) -> npt.NDArray[np.int64]:
    """The same as a table."""
    return table_at(address, rows, fields)  # type: ignore[no-any-return]


@inlined
def last_errno() -> int:
    """errno of the calling thread."""
    return np.int64(array_at(_errno_location(), np.int32, 1)[0])  # type: ignore[return-value]


@inlined
def monotonic_ns(scratch: int) -> int:
    """CLOCK_MONOTONIC in nanoseconds; ``scratch`` is the address of 16 bytes to work in."""
    _clock_gettime(_CLOCK_MONOTONIC, scratch)
    parts = int64_at(scratch, 2)
    return parts[0] * 1_000_000_000 + parts[1]  # type: ignore[no-any-return]
