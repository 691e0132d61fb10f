"""Copies of large arrays past the processor's caches, in compiled code.

An ordinary store first reads what it is about to overwrite, and leaves it in the caches, where it takes the place of
something that is needed sooner: the rings, above all. Of an array that is larger than the caches both are a waste.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from mycel.machine.kinds import INT64, NOTHING, Value, llvm_type
from mycel.machine.words import word
from mycel.runtime.reduce_kernels import copy
from mycel.standalone import inlined
from mycel.units import parse_size

__all__ = ["cache_bytes", "copy_past_caches"]

_LINE = 64
#: Of the largest cache, where the machine does not say.
_USUAL_BYTES = 32 << 20
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@word
def _move_line(builder: Any, destination: Value, source: Value) -> Value:
    """Copy 64 bytes to an address that is a multiple of 64, without reading or keeping what is there."""
    from llvmlite import ir

    line = ir.VectorType(llvm_type(INT64), _LINE // 8)
    read = builder.load(builder.inttoptr(source.number, line.as_pointer()), align=1)
    written = builder.store(read, builder.inttoptr(destination.number, line.as_pointer()), align=_LINE)
    written.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
    return NOTHING


@word
def _settle(builder: Any) -> Value:
    """Have all stores so far seen before any that follow: those past the caches keep no order by themselves."""
    builder.fence("seq_cst")
    return NOTHING


@inlined
def copy_past_caches(dst: int, src: int, num_bytes: int) -> None:
    """Copy bytes between ranges that do not overlap, and leave none of the destination in the caches.

    Args:
        dst: address that is written.
        src: address that is read.
        num_bytes: length of both.
    """
    first = min(num_bytes, -dst & (_LINE - 1))
    lines = (num_bytes - first) // _LINE
    copy(dst, src, first)
    to, by = dst + first, src + first
    for i in range(lines):
        _move_line(to + i * _LINE, by + i * _LINE)
    copy(to + lines * _LINE, by + lines * _LINE, num_bytes - first - lines * _LINE)
    _settle()


@cache
def cache_bytes() -> int:
    """Of the machine's largest cache."""
    largest = 0
    for size in _CACHES.glob("index*/size"):
        with suppress(OSError, ValueError):
            largest = max(largest, parse_size(size.read_text().strip() + "B"))
    return largest or _USUAL_BYTES
