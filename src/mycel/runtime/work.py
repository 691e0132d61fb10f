"""Work: what a collective call returns to torch, and the future that DDP and FSDP2 wait on."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mycel.runtime.communicator import Communicator, Ticket
from mycel.untraced import untraced

__all__ = ["MycelWork"]

_log = logging.getLogger(__name__)

#: How deep the running thread is in callbacks of futures; see ``_runner``.
_depth = threading.local()
_Callback = Callable[[], None] | None
_runners: weakref.WeakKeyDictionary[Communicator, dict[int, queue.SimpleQueue[_Callback]]] = (
    weakref.WeakKeyDictionary()
)


def _runner(communicator: Communicator, depth: int) -> queue.SimpleQueue[_Callback]:
    """Where callbacks of futures are put, to be run one after the other by a thread of their own.

    A callback may start another collective of the group and wait for its future, as DDP's PowerSGD hook does. So it
    may not hold up whoever completes collectives, nor the callbacks of what it has started itself: these belong to
    the next depth. Callbacks of one depth keep the order of their collectives, in which they, too, start others; that
    order is the same on every rank.
    """
    depths = _runners.setdefault(communicator, {})
    if depth not in depths:
        depths[depth] = queue.SimpleQueue()
        arguments = (depths[depth], depth + 1)
        threading.Thread(target=_run, args=arguments, name=f"mycel-futures-{depth}", daemon=True).start()
        weakref.finalize(communicator, depths[depth].put, None)
    return depths[depth]


def _run(callbacks: queue.SimpleQueue[_Callback], depth: int) -> None:
    _depth.value = depth
    while (callback := callbacks.get()) is not None:
        try:
            callback()
        except Exception:  # the next ones are other people's
            _log.exception("a callback of a future failed")
        del callback


@untraced
class MycelWork(dist.Work):
    """One collective under way, as torch wants to see it: a ``Ticket`` and the tensors that it fills.

    Wings see it as a ``mycel.comm.Pending``, which knows nothing of torch's interface.

    Args:
        communicator: the group's.
        ticket: the collective; ``None`` where it is over already.
        result: tensors that hold the result afterwards.
        settle: copies the result to where the caller wants it; run once, before anybody sees the work complete.
    """

    def __init__(
        self,
        communicator: Communicator | None,
        ticket: Ticket | None,
        result: list[torch.Tensor],
        settle: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._communicator = communicator
        self._ticket = ticket
        self._result = result
        self._settle = settle
        self._settling = threading.Lock()
        self._future: torch.futures.Future[Any] | None = None
        self._depth: int = getattr(_depth, "value", 0)

    def _settled(self) -> None:
        if self._settle is not None:
            with self._settling:
                if self._settle is not None:
                    self._settle()
                    self._settle = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the collective; raises what went wrong."""
        if self._communicator is not None and self._ticket is not None:
            limit = timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None
            if not self._communicator.wait(self._ticket, limit):
                raise RuntimeError(f"{self._ticket.what}: still under way after {limit:g} s of waiting")
        self._settled()
        return True

    def is_completed(self) -> bool:
        """Whether the collective is over, right or wrong."""
        return self._ticket is None or self._ticket.done

    def is_success(self) -> bool:
        """Whether the collective is over and right."""
        return self.is_completed() and (self._ticket is None or self._ticket.error is None)

    def exception(self) -> BaseException | None:
        """What went wrong, if anything has."""
        return None if self._ticket is None else self._ticket.error

    def synchronize(self) -> None:
        """Wait, as torch asks it of device work."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """The tensors with the result."""
        self.wait()
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the result's tensors.

        A failure is raised from a callback behind the future: an exception set from outside crashes DDP's reducer,
        which reads the value without asking.
        """
        if self._future is None:
            raw: torch.futures.Future[Any] = torch.futures.Future()
            self._future = raw.then(self._value)
            if self._communicator is None or self._ticket is None:
                raw.set_result(None)
            else:
                runner = _runner(self._communicator, self._depth)
                self._communicator.when_done(self._ticket, lambda _: runner.put(lambda: raw.set_result(None)))
        return self._future

    def _value(self, _: object) -> list[torch.Tensor]:
        self.wait()
        return self._result
