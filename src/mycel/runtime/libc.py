"""The few libc calls the engine makes from compiled code, by name, without the interpreter lock.

Pointers travel as plain 64-bit integers. ``types.ExternalFunction`` binds a C symbol by name, which, unlike a ctypes
pointer, lets numba cache the compiled caller on disk.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from mycel.compiled import compiled_without_lock

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

recv = types.ExternalFunction("recv", types.int64(types.int32, types.int64, types.uint64, types.int32))
send = types.ExternalFunction("send", types.int64(types.int32, types.int64, types.uint64, types.int32))
sendmsg = types.ExternalFunction("sendmsg", types.int64(types.int32, types.int64, types.int32))
poll = types.ExternalFunction("poll", types.int32(types.int64, types.uint64, types.int32))
read_fd = types.ExternalFunction("read", types.int64(types.int32, types.int64, types.uint64))
write_fd = types.ExternalFunction("write", types.int64(types.int32, types.int64, types.uint64))
_errno_location = types.ExternalFunction("__errno_location", types.int64())
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))

_INT64_POINTER = ir.IntType(64).as_pointer()
_INT32_POINTER = ir.IntType(32).as_pointer()


def _pointer_codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.inttoptr(args[0], _INT64_POINTER)


def _load_codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.load(builder.inttoptr(args[0], _INT32_POINTER))


@intrinsic  # type: ignore[untyped-decorator]
def _int64_pointer(typingctx: Any, address: Any) -> Any:
    """A 64-bit address as ``int64*``."""
    return types.CPointer(types.int64)(types.int64), _pointer_codegen


@intrinsic  # type: ignore[untyped-decorator]
def _load_int32(typingctx: Any, address: Any) -> Any:
    """The 32-bit integer at an address."""
    return types.int32(types.int64), _load_codegen


@compiled_without_lock
def int64_at(address: int, length: int) -> npt.NDArray[np.int64]:
    """The ``length`` 64-bit integers at ``address``, as an array that shares the memory."""
    return carray(_int64_pointer(address), (length,))  # type: ignore[no-any-return]


@compiled_without_lock
def int64_table_at(address: int, rows: int, fields: int) -> npt.NDArray[np.int64]:
    """The same as a table. (``reshape`` would need a function of numba's, which engines are to run without.)"""
    return carray(_int64_pointer(address), (rows, fields))  # type: ignore[no-any-return]


@compiled_without_lock
def last_errno() -> int:
    """errno of the calling thread."""
    return _load_int32(_errno_location())  # type: ignore[no-any-return]


@compiled_without_lock
def monotonic_ns(scratch: int) -> int:
    """CLOCK_MONOTONIC in nanoseconds; ``scratch`` is the address of 16 bytes to work in."""
    _clock_gettime(_CLOCK_MONOTONIC, scratch)
    parts = int64_at(scratch, 2)
    return parts[0] * 1_000_000_000 + parts[1]  # type: ignore[no-any-return]
