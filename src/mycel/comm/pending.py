"""What is under way, for all wings; and exchanges that are kept, so that checkpointing sends nothing again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Generic, TypeVar

from torch import Tensor

__all__ = ["Pending", "communicate", "keep_exchanges"]

T = TypeVar("T")


class Pending(Generic[T]):
    """Something that has begun and goes on by itself: a collective, a job in the background, a copy.

    Order: what begins on one group begins in the same order on all of its ranks, and ends in it; one may wait in any
    order. Deadline: that of whoever carries it, as a group's time-out, so that ``wait`` either returns or raises.
    On a GPU, what the first waiter's current stream is given afterwards comes after it; the processor goes on.

    Torch's own interface to a collective is ``dist.Work``, and the process group hands out its ``MycelWork`` or
    ``DeviceWork`` there; ``Pending`` is what wings see of it, with the result of the right type.

    Args:
        finish: waits, raises what went wrong, and gives what came of it; called once, by the first ``wait``.

    Examples:
        >>> Pending.done(3).wait()
        3
    """

    __slots__ = ("_finish", "_result")

    _result: T

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish

    @staticmethod
    def done(result: T) -> Pending[T]:
        """What is there already."""
        return Pending(lambda: result)

    def wait(self) -> T:
        """The result, when it is there; the same one every time.

        Raises:
            Exception: what went wrong, or that the time is over.
        """
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result


class _Tape(threading.local):
    """What this thread's exchanges are written to, or read from: for each a place for what it brought."""

    writes: list[list[Tensor]] | None = None
    reads: Iterator[list[Tensor]] | None = None


_TAPE = _Tape()


def communicate(launch: Callable[[], Pending[Tensor]]) -> Pending[Tensor]:
    """Every exchange of a forward pass goes through here: launched, or taken from what was kept of it."""
    if _TAPE.reads is not None:
        return Pending.done(next(_TAPE.reads)[0].detach())
    pending = launch()
    if _TAPE.writes is None:
        return pending
    place: list[Tensor] = []
    _TAPE.writes.append(place)

    def finish() -> Tensor:
        result = pending.wait()
        place.append(result.detach())  # for graphs another tensor: what is kept keeps no graph
        return result

    return Pending(finish)


def keep_exchanges() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For ``torch.utils.checkpoint``: what exchanges brought is kept, everything else is computed again.

    Costs the memory of the rows that arrived, spares two of the six exchanges of a layer's training step (with
    checkpointing, without it there are four)::

        checkpoint(layer, x, use_reentrant=False, context_fn=keep_exchanges)

    Returns:
        What surrounds the forward pass, and what surrounds its recomputation, as ``context_fn`` has to give.

    References:
        Singh et al., "A Hybrid Tensor-Expert-Data Parallelism Approach to Optimize Mixture-of-Experts Training",
        ICS 2023 (communication-aware activation checkpointing).
    """
    tape: list[list[Tensor]] = []

    @contextmanager
    def writing() -> Iterator[None]:
        before, _TAPE.writes = _TAPE.writes, tape
        try:
            yield
        finally:
            _TAPE.writes = before

    @contextmanager
    def reading() -> Iterator[None]:
        before, _TAPE.reads = _TAPE.reads, iter(tape)
        try:
            yield
        finally:
            _TAPE.reads = before

    return writing(), reading()
