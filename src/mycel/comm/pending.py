"""Exchanges that are kept, so that activation checkpointing computes again but sends nothing again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch.distributed as dist
from torch import Tensor

__all__ = ["Finish", "Pending", "communicate", "keep_exchanges"]

#: Waits until what was begun is there; raises what went wrong.
Finish = Callable[[], None]


class Pending:
    """What a collective will have brought.

    Args:
        result: filled once the work is done.
        work: ``None``: done.
    """

    __slots__ = ("_result", "_work")

    def __init__(self, result: Tensor, work: dist.Work | None = None) -> None:
        self._result = result
        self._work = work

    def kept(self) -> Pending:
        """The same result for someone who waits later; for graphs it is another tensor."""
        return Pending(self._result.detach())

    def wait(self) -> Tensor:
        """The result, when it is there."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._result


class _Tape(threading.local):
    """What this thread's exchanges are written to, or read from."""

    writes: list[Pending] | None = None
    reads: Iterator[Pending] | None = None


_TAPE = _Tape()


def communicate(launch: Callable[[], Pending]) -> Pending:
    """Every exchange of a forward pass goes through here: launched, or taken from what was kept of it."""
    if _TAPE.reads is not None:
        return next(_TAPE.reads).kept()
    pending = launch()
    if _TAPE.writes is not None:
        _TAPE.writes.append(pending.kept())
    return pending


def keep_exchanges() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For ``torch.utils.checkpoint``: what exchanges brought is kept, everything else is computed again.

    Costs the memory of the rows that arrived, spares two of the six exchanges of a layer's training step (with
    checkpointing, without it there are four)::

        checkpoint(layer, x, use_reentrant=False, context_fn=keep_exchanges)

    References:
        Singh et al., "A Hybrid Tensor-Expert-Data Parallelism Approach to Optimize Mixture-of-Experts Training",
        ICS 2023 (communication-aware activation checkpointing).
    """
    tape: list[Pending] = []

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
