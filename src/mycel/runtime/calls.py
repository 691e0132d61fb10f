"""Calls of collectives, in addresses, and the tickets of those under way."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass

from mycel.collectives.spec import CollectiveName
from mycel.runtime.faults import Attempt
from mycel.runtime.prepared import Job
from mycel.runtime.reduce_kernels import DType

__all__ = ["Call", "Latch", "Ticket"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One collective call, in addresses.

    Attributes:
        name: collective; the array is ``num_elements`` long in all (see ``Collective``).
        root: for broadcast, gather and scatter.
        input_address, output_address: of the buffers that ``mycel.collectives.program`` describes.
        dtype: code of the element type that is reduced; ``item_bytes`` its size.
        element: code of the element type that headers state (``headers.ELEMENTS``); ``None``: ``dtype``.
        reduce_op: code of the reduction.
        average: divide sums by the number of ranks.
        keep: objects that own the buffers, whatever the caller does to the tensors meanwhile.
        title: what messages call it, if not by its name.
        block_elements: length of each block of the array, where they differ.
        knows_all: whether ``block_elements`` are those of all ranks. A rank that knows only its own row and column
            of an all_to_all has zeros for the others, and the exchange is direct.
        weights: for which blocks schedules are to be made, as for ``Collective``, the same on all ranks; a block of
            weight 0 is empty. ``None``: for equal ones, along whose ways blocks of any length go.
    """

    name: CollectiveName
    num_elements: int
    item_bytes: int
    output_address: int
    input_address: int = 0
    root: int | None = None
    dtype: int = DType.UINT8
    element: int | None = None
    reduce_op: int = 0
    average: bool = False
    keep: tuple[object, ...] = ()
    title: str | None = None
    block_elements: tuple[int, ...] | None = None
    knows_all: bool = True
    weights: tuple[int, ...] | None = None


class Latch:
    """Opens once; those who wait go on.

    ``threading.Event`` holds a lock of Python's while it sets out to wait. A signal handler that runs there, and
    waits for what whoever sets the event does next, waits for ever. Here, to wait is one step, in which nothing is
    held.
    """

    __slots__ = ("_lock", "is_open")

    def __init__(self) -> None:
        self.is_open = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        """Let all go on, those too who come later."""
        if self.is_open:
            return
        self.is_open = True
        with contextlib.suppress(RuntimeError):  # opened by a signal handler in between
            self._lock.release()

    def wait(self, seconds: float) -> bool:
        """Wait until it is open, or so many seconds; whether it is."""
        if not self.is_open and self._lock.acquire(timeout=max(0.0, seconds)):
            self._lock.release()  # for the next one
        return self.is_open


@dataclass(slots=True, eq=False)
class Ticket:
    """A collective under way, as the engine for sockets sees it: without tensors, and behind every ``MycelWork``.

    Attributes:
        job: its run; ``None`` where there is nothing to move, or where it may be run more than once.
        attempt: what messages say of it.
        settle: puts results to where the caller wants them; ``None``: they are there, or it has done so.
        is_through: it has been run, where there is no job to say so.
        error: why it failed.
        is_finished: it is over and settled, and so are those before it.
        latch: opened then; ``None`` where nobody can wait for it.
        callbacks: called then, in the order of the collectives; they return at once.
    """

    job: Job | None
    attempt: Attempt
    settle: Callable[[], None] | None = None
    is_through: bool = False
    error: BaseException | None = None
    is_finished: bool = False
    latch: Latch | None = None
    callbacks: tuple[Callable[[Ticket], None], ...] = ()

    @property
    def what(self) -> str:
        """The collective in words."""
        return self.attempt.what

    @property
    def timeout_s(self) -> float:
        """Its whole time-out."""
        return self.attempt.timeout_s

    @property
    def is_over(self) -> bool:
        """Whether it has been run, right or wrong; its results may have to be put to where they belong yet."""
        return self.is_through or self.error is not None or (self.job is not None and self.job.done)

    def finish(self) -> None:
        """Settle, and tell those who wait. What fails here is the collective's error.

        A signal handler may come here while this very thread is here: what is done twice then is the same copy.
        """
        settle = self.settle
        if settle is not None and self.error is None:
            try:
                settle()
            except Exception as error:  # the tensors have changed, say: the caller's error, not the group's
                self.error = error
        self.settle = None
        self.is_finished = True
        if self.latch is not None:
            self.latch.open()
        callbacks, self.callbacks = self.callbacks, ()
        for callback in callbacks:
            callback(self)
