"""What precedes the messages of a collective: its kind as one integer, and the same in words."""

from __future__ import annotations

from collections.abc import Callable

from mycel.collectives.spec import CollectiveName
from mycel.runtime.reduce_kernels import DType, ReduceOp

__all__ = [
    "ALL_TO_ALL_V",
    "COMMIT",
    "ELEMENTS",
    "PARTS",
    "REGISTRATION",
    "UNKNOWN_ELEMENT",
    "describe_header",
    "pack_kind",
    "states_own_bytes",
    "unpack_kind",
]

#: Element types as torch names them; the place of a type is its code. Those that are reduced come first.
ELEMENTS = (
    *(dtype.name.lower() for dtype in DType),
    "uint16",
    "uint32",
    "uint64",
    "complex32",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "quint8",
    "qint8",
    "qint32",
    "quint4x2",
    "quint2x4",
    "bits1x8",
    "bits2x4",
    "bits4x2",
    "bits8",
    "bits16",
    *(f"{kind}{bits}" for kind in ("uint", "int") for bits in range(1, 8)),
)
#: Code of a type that is not among them.
UNKNOWN_ELEMENT = 255

#: What messages call an all_to_all with split sizes, whose headers state what goes between two ranks.
ALL_TO_ALL_V = "all_to_all with split sizes"
#: What messages call a gather or scatter of parts of any length, each of which only its two ends know.
PARTS: dict[CollectiveName, str] = {"gather": "gather of parts", "scatter": "scatter of parts"}
#: What messages call the round in which ranks tell each other which schedule they register.
REGISTRATION = "registration of a schedule"
#: What messages call the round after a collective in which ranks tell each other that they have come through.
COMMIT = "commit"
_NAMES = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "broadcast",
    "reduce",
    "barrier",
    "all_to_all",
    "gather",
    "scatter",
    ALL_TO_ALL_V,
    COMMIT,
    *PARTS.values(),
    REGISTRATION,
)
_OF_PARTS = (ALL_TO_ALL_V, *PARTS.values())
#: Code of an average in headers, where other codes are those of ``reduce_kernels.ReduceOp``.
_AVERAGE = 15


def pack_kind(name: str, dtype: int, reduce_op: int | None, root: int | None, plan: int) -> int:
    """A collective's kind as one integer, for the header that precedes its messages.

    Args:
        name: of the collective, or its title.
        dtype: code of the element type, its place in ``ELEMENTS``.
        reduce_op: code of the reduction; ``None``: an average.
        root: where there is one.
        plan: number of the schedule and piece size.
    """
    reduce_op = _AVERAGE if reduce_op is None else reduce_op
    return _NAMES.index(name) | dtype << 8 | reduce_op << 16 | (0 if root is None else root + 1) << 24 | plan << 48


def unpack_kind(kind: int) -> tuple[str, int, str]:
    """Name, code of the element type and name of the reduction of a kind; ``?`` for a reduction that is none.

    Examples:
        >>> unpack_kind(pack_kind("reduce", 3, None, 2, 7))
        ('reduce', 3, 'AVG')
    """
    name = _NAMES[kind & 0xFF] if kind & 0xFF < len(_NAMES) else f"operation {kind & 0xFF}"
    code = (kind >> 16) & 0xFF
    op = "AVG" if code == _AVERAGE else ReduceOp(code).name if code < len(ReduceOp) else "?"
    return name, (kind >> 8) & 0xFF, op


def states_own_bytes(kind: int) -> bool:
    """Whether ranks state different numbers of bytes for the same collective of this kind."""
    return unpack_kind(kind)[0] in _OF_PARTS


def describe_header(sequence: int, kind: int, num_bytes: int, dtype_names: Callable[[int], str]) -> str:
    """A header in words, such as ``all_reduce #5 of 4096 bytes of float32, op SUM``."""
    name, dtype, op = unpack_kind(kind)
    root = (kind >> 24) & 0xFFFFFF
    size = f" of {num_bytes} bytes"
    if name in _OF_PARTS:
        size = f"{size} between the two" if num_bytes else ""
    text = f"{name} #{sequence}{size} of {dtype_names(dtype)}"
    if name in ("all_reduce", "reduce_scatter", "reduce"):
        text += f", op {op}"
    return text + (f", root {root - 1}" if root else "")
