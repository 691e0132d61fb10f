"""Case: one question of a bench, as plain data that travels to the worker processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from mycel.brief import brief
from mycel.errors import UsageError
from mycel.names import spelled

__all__ = [
    "ALWAYS_IN_PLACE",
    "BENCH_COLLECTIVES",
    "DTYPES",
    "EITHER_WAY",
    "FROM_OR_TO_ROOT",
    "IN_BLOCKS",
    "MODES",
    "OPERATIONS",
    "REDUCING",
    "WHOLE_NUMBERS",
    "Case",
    "cases_from_text",
    "cases_to_text",
]

#: Collectives a worker knows how to call and to check.
BENCH_COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "reduce",
    "gather",
    "scatter",
    "sendrecv",
)

#: Collectives that torch offers in place only, and those it offers both ways. Of the others, in and out are apart.
ALWAYS_IN_PLACE, EITHER_WAY = ("all_reduce", "broadcast", "reduce"), ("all_gather", "reduce_scatter")

#: Collectives with a root, those whose array is one block a rank, and those that add.
FROM_OR_TO_ROOT = ("broadcast", "reduce", "gather", "scatter")
IN_BLOCKS = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
REDUCING = ("all_reduce", "reduce_scatter", "reduce")

#: Element types under torch's names: bytes of an element.
DTYPES = {
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
}
WHOLE_NUMBERS = ("int8", "uint8", "int32", "int64")

#: Reductions, as nccl-tests calls them.
OPERATIONS = ("sum", "prod", "min", "max", "avg")

#: ``blocking``: plain calls. ``waiting``: asynchronous calls, waited for at once. ``busy``: asynchronous calls while
#: the main thread runs Python until they are done; beside ``waiting`` it shows what the interpreter lock costs.
MODES = ("blocking", "waiting", "busy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One collective of one size.

    Attributes:
        collective: one of ``BENCH_COLLECTIVES``.
        num_bytes: of the whole array; for all_to_all and sendrecv of what one rank gives, and gets.
        repeats: timed rounds of each backend; rounds of the backends alternate.
        calls: calls in a round, back to back, each timed by itself. Only the first follows a barrier, so that
            with many calls the figure is a steady latency and not the spread of a barrier.
        mode: one of ``MODES``.
        in_place: a rank's part of the larger array is its part of the smaller one; for ``EITHER_WAY`` only.
        dtype: one of ``DTYPES``.
        op: one of ``OPERATIONS``; it means something for ``REDUCING`` only.
        root: rank, for ``FROM_OR_TO_ROOT``.
        check: compare every result with what it must be.
        warm_up: calls of full size before the timed ones, over each backend; ``None``: two of at most 1 MB, and one
            of full size unless that would take long.

    Raises:
        UsageError: unknown collective, mode, type or operation, counts below one, or an operation that the type or
            the collective does not have.

    Examples:
        >>> Case(collective="all_gather", num_bytes=1000).num_elements(world_size=3)  # float32, in three equal blocks
        252
        >>> Case(collective="all_reduce", num_bytes=1000, dtype="bfloat16", op="max").num_elements(world_size=3)
        500
        >>> Case(collective="all_reduce", num_bytes=1000).is_in_place
        True
    """

    collective: str
    num_bytes: int
    repeats: int = 5
    calls: int = 1
    mode: str = "blocking"
    in_place: bool = False
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0
    check: bool = True
    warm_up: int | None = None

    __repr__ = brief

    def __post_init__(self) -> None:
        object.__setattr__(self, "collective", spelled(self.collective, BENCH_COLLECTIVES, "collective to bench"))
        object.__setattr__(self, "mode", spelled(self.mode, MODES, "mode"))
        if self.in_place and self.collective not in EITHER_WAY:
            raise UsageError(f"{self.collective} has no choice of in place or not; {', '.join(EITHER_WAY)} have")
        object.__setattr__(self, "dtype", spelled(self.dtype, DTYPES, "element type"))
        object.__setattr__(self, "op", spelled(self.op, OPERATIONS, "operation"))
        if self.op != "sum" and self.collective not in REDUCING:
            raise UsageError(f"{self.collective} adds nothing up: operation {self.op} is for {', '.join(REDUCING)}")
        if self.op == "avg" and self.dtype in WHOLE_NUMBERS:
            raise UsageError(f"operation avg has no exact answer in {self.dtype}; take a floating-point type")
        if self.root and self.collective not in FROM_OR_TO_ROOT:
            raise UsageError(f"{self.collective} has no root; {', '.join(FROM_OR_TO_ROOT)} have")
        if self.root < 0 or (self.warm_up is not None and self.warm_up < 0):
            raise UsageError(f"{self.collective}: root and warm-up calls are counted from 0")
        for name in ("num_bytes", "repeats", "calls"):
            if getattr(self, name) < 1:
                raise UsageError(f"{self.collective}: {name} is {getattr(self, name)}; at least 1 is needed")

    @property
    def is_in_place(self) -> bool:
        """Whether output and input share memory."""
        return self.in_place or self.collective in ALWAYS_IN_PLACE

    @property
    def element_bytes(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype]

    def num_elements(self, world_size: int) -> int:
        """Elements of the whole array (all_to_all, sendrecv: of what one rank gives), rounded up to equal blocks."""
        quantum = world_size if self.collective in IN_BLOCKS else 1
        elements = -(-self.num_bytes // self.element_bytes)
        return -(-elements // quantum) * quantum


def cases_to_text(cases: Sequence[Case]) -> str:
    """One line of JSON."""
    return json.dumps([asdict(case) for case in cases])


def cases_from_text(text: str) -> tuple[Case, ...]:
    """What ``cases_to_text`` wrote.

    Examples:
        >>> cases_from_text(cases_to_text([Case(collective="broadcast", num_bytes=64)]))[0].num_bytes
        64
    """
    return tuple(Case(**item) for item in json.loads(text))
