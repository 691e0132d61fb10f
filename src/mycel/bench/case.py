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
    "EITHER_WAY",
    "ELEMENT_BYTES",
    "FROM_OR_TO_ROOT",
    "IN_BLOCKS",
    "MODES",
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
)

#: Collectives that torch offers in place only, and those it offers both ways. Of the others, in and out are apart.
ALWAYS_IN_PLACE, EITHER_WAY = ("all_reduce", "broadcast", "reduce"), ("all_gather", "reduce_scatter")

#: Collectives that are benched with rank 0 as their root, and those whose array is one block a rank.
FROM_OR_TO_ROOT = ("broadcast", "reduce", "gather", "scatter")
IN_BLOCKS = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")

#: ``blocking``: plain calls. ``waiting``: asynchronous calls, waited for at once. ``busy``: asynchronous calls while
#: the main thread runs Python until they are done; beside ``waiting`` it shows what the interpreter lock costs.
MODES = ("blocking", "waiting", "busy")

#: Arrays are float32.
ELEMENT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One collective of one size.

    Attributes:
        collective: one of ``BENCH_COLLECTIVES``.
        num_bytes: of the whole array; for all_to_all of what one rank gives, and gets.
        repeats: timed rounds of each backend; rounds of the backends alternate.
        calls: calls in a round, back to back, each timed by itself. Only the first follows a barrier, so that
            with many calls the figure is a steady latency and not the spread of a barrier.
        mode: one of ``MODES``.
        in_place: a rank's part of the larger array is its part of the smaller one; for ``EITHER_WAY`` only.

    Raises:
        UsageError: unknown collective or mode, or counts below one.

    Examples:
        >>> Case(collective="all_gather", num_bytes=1000).num_elements(world_size=3)  # float32, in three equal blocks
        252
        >>> Case(collective="all_reduce", num_bytes=1000).is_in_place
        True
    """

    collective: str
    num_bytes: int
    repeats: int = 5
    calls: int = 1
    mode: str = "blocking"
    in_place: bool = False

    __repr__ = brief

    def __post_init__(self) -> None:
        object.__setattr__(self, "collective", spelled(self.collective, BENCH_COLLECTIVES, "collective to bench"))
        object.__setattr__(self, "mode", spelled(self.mode, MODES, "mode"))
        if self.in_place and self.collective not in EITHER_WAY:
            raise UsageError(f"{self.collective} has no choice of in place or not; {', '.join(EITHER_WAY)} have")
        for name in ("num_bytes", "repeats", "calls"):
            if getattr(self, name) < 1:
                raise UsageError(f"{self.collective}: {name} is {getattr(self, name)}; at least 1 is needed")

    @property
    def is_in_place(self) -> bool:
        """Whether output and input share memory."""
        return self.in_place or self.collective in ALWAYS_IN_PLACE

    def num_elements(self, world_size: int) -> int:
        """Elements of the whole array (all_to_all: of one rank's part), float32, rounded up to equal blocks."""
        quantum = world_size if self.collective in IN_BLOCKS else 1
        elements = -(-self.num_bytes // ELEMENT_BYTES)
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
