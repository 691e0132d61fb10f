"""Calls of collectives, in addresses, and the tickets of those under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from mycel.collectives.spec import CollectiveName
from mycel.runtime.faults import Attempt
from mycel.runtime.prepared import Job
from mycel.runtime.reduce_kernels import DType

__all__ = ["Call", "Ticket"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One collective call, in addresses.

    Attributes:
        name: collective; the array is ``num_elements`` long in all (see ``Collective``).
        root: for broadcast, gather and scatter.
        input_address, output_address: of the buffers that ``mycel.collectives.program`` describes.
        dtype: code of the element type; ``item_bytes`` its size.
        reduce_op: code of the reduction.
        average: divide sums by the number of ranks.
        keep: objects that own the buffers.
        title: what messages call it, if not by its name.
        block_elements: length of each block of the array, where they differ.
        knows_all: whether ``block_elements`` are those of all ranks. A rank that knows only its own row and column
            of an all_to_all has zeros for the others, and the exchange is direct.
    """

    name: CollectiveName
    num_elements: int
    item_bytes: int
    output_address: int
    input_address: int = 0
    root: int | None = None
    dtype: int = DType.UINT8
    reduce_op: int = 0
    average: bool = False
    keep: tuple[object, ...] = ()
    title: str | None = None
    block_elements: tuple[int, ...] | None = None
    knows_all: bool = True


@dataclass(slots=True, eq=False)
class Ticket:
    """A collective under way, as the engine for sockets sees it: without tensors, and behind every ``MycelWork``.

    Attributes:
        job: its run; ``None`` where there is nothing to move, or where it may be run more than once.
        attempt: what messages say of it.
        error: why it failed.
        finished: set once it is over and waiters may go on.
        callbacks: called then.
    """

    job: Job | None
    attempt: Attempt
    error: BaseException | None = None
    finished: threading.Event = field(default_factory=threading.Event)
    callbacks: list[Callable[[Ticket], None]] = field(default_factory=list)

    @property
    def what(self) -> str:
        """The collective in words."""
        return self.attempt.what

    @property
    def timeout_s(self) -> float:
        """Its whole time-out."""
        return self.attempt.timeout_s

    @property
    def done(self) -> bool:
        """Whether it is over, right or wrong; needs no other thread's help to be known."""
        return self.finished.is_set() or (self.job is not None and self.job.done)
