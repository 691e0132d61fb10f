"""Reductions on raw memory: elementwise combination, division and copying, compiled and without the interpreter lock.

The engine calls these from its own compiled loop, so everything travels as plain integers: a code for the type of the
elements, a code for the operation, and addresses. float16 and bfloat16 are 16-bit patterns that are widened to
float32, combined, and rounded back to nearest, ties to even: as torch does on CPUs, bit for bit. Both conversions are
free of branches, so that the loops turn into vector instructions on any processor, with or without half-precision
hardware. No fast-math anywhere: NaN, infinities, signed zeros and subnormals come out as IEEE 754 has them.

From Python pass ``int(DType.FLOAT32)``: compiled code knows plain integers.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np

from mycel.machine.words import array_at, bits_as, select, truncating_divide
from mycel.runtime.libc import memmove
from mycel.standalone import inlined, standalone

__all__ = ["ITEM_SIZE", "DType", "ReduceOp", "combine", "copy", "item_size", "scale"]

#: The least float16 that is not subnormal.
_LEAST_NORMAL = 2.0**-14
#: Bytes that ``combine`` works on at a time where source and destination differ: they stay in the first-level cache.
_BLOCK_BYTES = 8192


class DType(IntEnum):
    """Element types, named as torch names them."""

    FLOAT32 = 0
    FLOAT64 = 1
    FLOAT16 = 2
    BFLOAT16 = 3
    INT32 = 4
    INT64 = 5
    INT8 = 6
    UINT8 = 7
    BOOL = 8
    INT16 = 9


class ReduceOp(IntEnum):
    """Operations; an average is a sum that ``scale`` divides at the end. The last three are for integers and bool."""

    SUM = 0
    MAX = 1
    MIN = 2
    PRODUCT = 3
    BAND = 4
    BOR = 5
    BXOR = 6


#: Bytes of one element, by ``DType``.
ITEM_SIZE: tuple[int, ...] = (4, 8, 2, 2, 4, 8, 1, 1, 1, 2)

# Compiled code sees plain integers.
_F32, _F64, _F16, _BF16, _I32, _I64, _I8, _U8, _BOOL, _I16 = (int(d) for d in DType)
_SUM, _MAX, _MIN, _PRODUCT, _BAND, _BOR, _BXOR = (int(op) for op in ReduceOp)


# -- 16-bit floats ----------------------------------------------------------------------------------------------


@inlined
def _widen_bfloat16(pattern: Any) -> Any:
    """float32 of a bfloat16: its upper half."""
    return bits_as(np.uint32(np.uint32(pattern) << np.uint32(16)), np.float32)


@inlined
def _narrow_bfloat16(value: Any) -> Any:
    """Nearest bfloat16, ties to even; NaN becomes the quiet NaN 0x7fc0, since rounding could carry it to infinity."""
    u = bits_as(value, np.uint32)
    odd = (u >> np.uint32(16)) & np.uint32(1)
    rounded = np.uint32(u + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    return np.uint16(select(value != value, np.uint32(0x7FC0), rounded))


@inlined
def _widen_float16(pattern: Any) -> Any:
    """float32 of a float16, exactly.

    Moving the 15 magnitude bits 13 places up leaves an exponent that is too small by 112. A subnormal has no leading
    one: it gets one at 2**-14, which a subtraction takes away again (exact, and without subnormal float32s, which a
    processor may be set to flush to zero).
    """
    magnitude = np.uint32(pattern & np.uint16(0x7FFF))
    sign = np.uint32(np.uint32(pattern & np.uint16(0x8000)) << np.uint32(16))
    shifted = np.uint32(magnitude << np.uint32(13))
    bias = select(magnitude >= np.uint32(0x7C00), np.uint32(0x70000000), np.uint32(0x38000000))
    small = bits_as(np.uint32(shifted + np.uint32(0x38800000)), np.float32) - np.float32(_LEAST_NORMAL)
    wide = select(magnitude < np.uint32(0x0400), bits_as(small, np.uint32), np.uint32(shifted + bias))
    return bits_as(np.uint32(wide | sign), np.float32)


@inlined
def _narrow_float16(value: Any) -> Any:
    """Nearest float16, ties to even; overflow to infinity, NaN to a quiet NaN.

    From 2**-14 up, rounding is an integer addition on the pattern. Below, adding 0.5 makes the processor itself round
    at 2**-24, the spacing of float16's subnormals, and leaves the result in the low bits.
    """
    u = bits_as(value, np.uint32)
    sign = np.uint32(np.uint32(u >> np.uint32(16)) & np.uint32(0x8000))
    magnitude = np.uint32(u & np.uint32(0x7FFFFFFF))
    odd = np.uint32(np.uint32(magnitude >> np.uint32(13)) & np.uint32(1))
    normal = np.uint32(np.uint32(magnitude + np.uint32(0xC8000FFF) + odd) >> np.uint32(13))
    half = bits_as(magnitude, np.float32) + np.float32(0.5)
    small = np.uint32(bits_as(half, np.uint32) - np.uint32(0x3F000000))
    special = select(magnitude > np.uint32(0x7F800000), np.uint32(0x7E00), np.uint32(0x7C00))
    finite = select(magnitude < np.uint32(0x38800000), small, normal)
    result = select(magnitude >= np.uint32(0x47800000), special, finite)
    return np.uint16(result | sign)


# -- loops ------------------------------------------------------------------------------------------------------


@inlined
def _same(value: Any) -> Any:
    """Widening and narrowing of the types that the processor computes in."""
    return value


def _loops(element: Any, widen: Any, narrow: Any) -> Any:
    """A compiled ``dst[i] = dst[i] (op) incoming[i]`` with one loop an operation.

    MAX and MIN give NaN where either side is NaN, and ``incoming`` where both are equal, as the vector instructions
    do. They select among the elements as they are stored, so nothing is rounded.
    """

    @inlined
    def loops(op_code: int, dst: int, incoming: int, count: int) -> None:
        a = array_at(dst, element, count)
        b = array_at(incoming, element, count)
        if op_code == _SUM:
            for i in range(count):
                a[i] = narrow(widen(a[i]) + widen(b[i]))
        elif op_code == _PRODUCT:
            for i in range(count):
                a[i] = narrow(widen(a[i]) * widen(b[i]))
        elif op_code == _MAX:
            for i in range(count):
                x, y = widen(a[i]), widen(b[i])
                a[i] = select((x > y) | (x != x), a[i], b[i])
        else:
            for i in range(count):
                x, y = widen(a[i]), widen(b[i])
                a[i] = select((x < y) | (x != x), a[i], b[i])

    return loops


_float32_loops = _loops(np.float32, _same, _same)
_float64_loops = _loops(np.float64, _same, _same)
_float16_loops = _loops(np.uint16, _widen_float16, _narrow_float16)
_bfloat16_loops = _loops(np.uint16, _widen_bfloat16, _narrow_bfloat16)
_int32_loops = _loops(np.int32, _same, _same)
_int64_loops = _loops(np.int64, _same, _same)
_int8_loops = _loops(np.int8, _same, _same)
_uint8_loops = _loops(np.uint8, _same, _same)
_int16_loops = _loops(np.int16, _same, _same)


@inlined
def _bitwise(op_code: int, dst: int, incoming: int, num_bytes: int) -> None:
    """The bitwise operations, which do not see where one element ends and the next begins."""
    a = array_at(dst, np.uint8, num_bytes)
    b = array_at(incoming, np.uint8, num_bytes)
    if op_code == _BAND:
        for i in range(num_bytes):
            a[i] = a[i] & b[i]
    elif op_code == _BOR:
        for i in range(num_bytes):
            a[i] = a[i] | b[i]
    else:
        for i in range(num_bytes):
            a[i] = a[i] ^ b[i]


# -- what the engine calls --------------------------------------------------------------------------------------


@inlined
def item_size(dtype_code: int) -> int:
    """Bytes of one element; for compiled callers (Python ones have ``ITEM_SIZE``)."""
    if dtype_code in (_F64, _I64):
        return 8
    if dtype_code in (_F32, _I32):
        return 4
    if dtype_code in (_F16, _BF16, _I16):
        return 2
    return 1


@inlined
def copy(dst: int, src: int, num_bytes: int) -> None:
    """Move bytes; the two ranges may overlap.

    Args:
        dst: address that is written.
        src: address that is read.
        num_bytes: length of both.
    """
    if num_bytes > 0 and dst != src:
        memmove(dst, src, num_bytes)


@standalone
def combine(dtype_code: int, op_code: int, dst: int, operand: int, incoming: int, count: int) -> None:
    """``dst[i] = operand[i] (op) incoming[i]`` for ``count`` elements.

    Works at the speed of memory on large arrays. Integers wrap round. bool counts as torch counts it: SUM and MAX
    are "or", MIN and PRODUCT are "and"; bytes must be 0 or 1. The bitwise operations are for integers and bool only.

    Where ``dst`` is neither of the others, ``operand`` is first copied there, one cache-sized block at a time: one
    set of loops then serves both forms, which halves the time to compile, and costs next to nothing.

    Args:
        dtype_code: an ``int(DType)``; the caller has checked it.
        op_code: an ``int(ReduceOp)``; the caller has checked it.
        dst: address of the results, aligned to the element. May be ``operand`` or ``incoming``, but must not
            overlap either in part.
        operand: address of what is there already.
        incoming: address of what arrived.
        count: elements.
    """
    apart = dst != operand and dst != incoming
    other = operand if dst == incoming else incoming
    size = item_size(dtype_code)
    block = _BLOCK_BYTES // size if apart else count
    done = 0
    while done < count:
        now = min(block, count - done)
        to, by = dst + done * size, other + done * size
        if apart:
            memmove(to, operand + done * size, now * size)
        if op_code >= _BAND:
            _bitwise(op_code, to, by, now * size)
        elif dtype_code == _F32:
            _float32_loops(op_code, to, by, now)
        elif dtype_code == _F64:
            _float64_loops(op_code, to, by, now)
        elif dtype_code == _F16:
            _float16_loops(op_code, to, by, now)
        elif dtype_code == _BF16:
            _bfloat16_loops(op_code, to, by, now)
        elif dtype_code == _I32:
            _int32_loops(op_code, to, by, now)
        elif dtype_code == _I64:
            _int64_loops(op_code, to, by, now)
        elif dtype_code == _I8:
            _int8_loops(op_code, to, by, now)
        elif dtype_code == _U8:
            _uint8_loops(op_code, to, by, now)
        elif dtype_code == _I16:
            _int16_loops(op_code, to, by, now)
        else:
            _uint8_loops(_MAX if op_code in (_SUM, _MAX) else _MIN, to, by, now)
        done += now


@inlined
def _scale_floats(element: Any, dst: int, count: int, divisor: int) -> None:
    a = array_at(dst, element, count)
    d = element(divisor)
    for i in range(count):
        a[i] = a[i] / d


@inlined
def _scale_integers(element: Any, dst: int, count: int, divisor: int) -> None:
    a = array_at(dst, element, count)
    for i in range(count):
        a[i] = truncating_divide(np.int64(a[i]), divisor)


@standalone
def scale(dtype_code: int, dst: int, count: int, divisor: int) -> None:
    """``dst[i] = dst[i] / divisor``: what turns a sum into an average.

    Floats are truly divided (no multiplication by a reciprocal) and rounded once, the 16-bit ones from the float32
    quotient, as torch's division does. Integers are divided towards zero, as C does: -7 / 2 is -3. bool stays as it
    is: the average of a set of truths is their "or".

    Args:
        dtype_code: an ``int(DType)``; the caller has checked it.
        dst: address of the elements.
        count: elements.
        divisor: the world size, at least 1.
    """
    if dtype_code == _F32:
        _scale_floats(np.float32, dst, count, divisor)
    elif dtype_code == _F64:
        _scale_floats(np.float64, dst, count, divisor)
    elif dtype_code == _F16:
        a = array_at(dst, np.uint16, count)
        d = np.float32(divisor)
        for i in range(count):
            a[i] = _narrow_float16(_widen_float16(a[i]) / d)
    elif dtype_code == _BF16:
        a = array_at(dst, np.uint16, count)
        d = np.float32(divisor)
        for i in range(count):
            a[i] = _narrow_bfloat16(_widen_bfloat16(a[i]) / d)
    elif dtype_code == _I32:
        _scale_integers(np.int32, dst, count, divisor)
    elif dtype_code == _I64:
        _scale_integers(np.int64, dst, count, divisor)
    elif dtype_code == _I16:
        _scale_integers(np.int16, dst, count, divisor)
    elif dtype_code == _I8:
        _scale_integers(np.int8, dst, count, divisor)
    elif dtype_code == _U8:
        _scale_integers(np.uint8, dst, count, divisor)
