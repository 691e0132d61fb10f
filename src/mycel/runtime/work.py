"""Work: what a collective call returns to torch, and the future that DDP and FSDP2 wait on."""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.autograd.profiler import record_function

from mycel.runtime.calls import Latch, Ticket
from mycel.runtime.communicator import Communicator
from mycel.runtime.ending import at_work
from mycel.runtime.held import HeldWork
from mycel.runtime.timeouts import given_s
from mycel.untraced import untraced

__all__ = ["DoneWork", "MycelWork", "know_over", "span_of"]

_log = logging.getLogger(__name__)

#: How long a callback of a future may hold up who waits for a later one.
_PATIENCE_S = 60.0
_LOOK_S = 0.1
_MOMENT_S = 2e-5
_orders = itertools.count()
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
        with at_work:
            try:
                callback()
            except BaseException:  # the next ones are other people's
                _log.exception("a callback of a future failed")
            del callback


def await_futures(communicator: Communicator, patience_s: float = _PATIENCE_S) -> None:
    """Return when the futures of all works that are over are done.

    A callback of a future does not wait for its own future, nor for those of works that were started outside of it:
    they may come after it.
    """
    depth = getattr(_depth, "value", 0)
    until = time.monotonic() + patience_s
    for work in tuple(communicator.telling):
        if work.depth >= depth and not work.await_future(until):
            _log.warning(
                "a callback of a future has held up those after it for %g s: nobody waits any longer", patience_s
            )
            return


def span_of(name: str, num_bytes: int) -> record_function | None:
    """The range that profiles show for a call; ``None`` where nobody profiles."""
    if not torch._C._autograd._profiler_enabled():
        return None
    return record_function(f"mycel:{name}", f"{num_bytes} bytes")


@untraced
class MycelWork(HeldWork):
    """One collective under way, as torch wants to see it: a ``Ticket`` and the tensors that it fills.

    When ``wait`` has returned, or ``is_completed`` is true, or a later collective of the group is over, the results
    are in the caller's tensors and the future is done; callbacks that are added to it then run at once. Wings see it
    as a ``mycel.comm.Pending``, which knows nothing of torch's interface.

    Args:
        communicator: the group's, if it is one of ours that runs it.
        ticket: the collective; ``None``: it was a blocking call, which is over.
        result: tensors that hold the result afterwards.
    """

    def __init__(self, communicator: Communicator | None, ticket: Ticket | None, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._communicator = communicator
        self._ticket = ticket
        self._result = result
        self._future: torch.futures.Future[Any] | None = None
        #: Opened when the future is about to be done.
        self._told: Latch | None = None
        #: Place among all works of the process, and among callbacks of futures, from which this was started.
        self.order = next(_orders)
        self.depth: int = getattr(_depth, "value", 0)
        if communicator is not None and ticket is None:
            self._be_over(communicator)

    def _be_over(self, communicator: Communicator) -> None:
        """The caller is about to know that this is over, and with it all before it."""
        if communicator.telling:
            await_futures(communicator)
        communicator.known_over = max(communicator.known_over, self.order)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the collective; raises what went wrong."""
        self.let_go()
        if self._communicator is not None and self._ticket is not None:
            limit_s = given_s(timeout)
            try:
                if not self._communicator.wait(self._ticket, limit_s):
                    raise RuntimeError(f"{self._ticket.what}: still under way after {limit_s:g} s of waiting")
            finally:
                if self._ticket.is_finished:
                    self._be_over(self._communicator)
        return True

    def is_completed(self) -> bool:
        """Whether the collective is over, right or wrong."""
        self.let_go()
        if self._communicator is None or self._ticket is None:
            return True
        if not self._communicator.is_finished(self._ticket):
            return False
        depth = getattr(_depth, "value", 0)
        if any(
            work.depth >= depth and work.order <= self.order and not work.is_told
            for work in tuple(self._communicator.telling)
        ):
            return False
        self._communicator.known_over = max(self._communicator.known_over, self.order)
        return True

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

        It is done if the caller knows the collective to be over. If not, it becomes so in the thread for it even if
        the collective is over: else a callback that starts collectives would do so now in one thread, now in another,
        as it happens, and differently on each rank.

        A failure is raised from a callback behind the future: an exception set from outside crashes DDP's reducer,
        which reads the value without asking.
        """
        self.let_go()
        if self._future is None:
            raw: torch.futures.Future[Any] = torch.futures.Future()
            self._told = Latch()
            self._future = raw.then(self._value)
            communicator, ticket = self._communicator, self._ticket
            if (
                communicator is None
                or ticket is None
                or (ticket.is_finished and self.order <= communicator.known_over)
            ):
                raw.set_result(None)
            else:
                communicator.when_done(ticket, partial(self._tell, communicator, raw))
        return self._future

    def _tell(self, communicator: Communicator, raw: torch.futures.Future[Any], _: Ticket) -> None:
        """Have the future done by the thread for it: the callbacks of those before may still be running there."""

        def tell() -> None:
            try:
                raw.set_result(None)
            finally:
                with contextlib.suppress(ValueError):  # a forked child has forgotten all
                    communicator.telling.remove(self)

        communicator.telling.append(self)
        _runner(communicator, self.depth).put(tell)

    def _value(self, _: object) -> list[torch.Tensor]:
        if self._told is not None:
            self._told.open()
        if self._ticket is not None and self._ticket.error is not None:
            raise self._ticket.error
        return self._result

    @property
    def is_told(self) -> bool:
        """Whether nobody has asked for the future, or it is done."""
        return self._future is None or self._future.done()

    def await_future(self, until: float) -> bool:
        """Wait until the future is done, which its callbacks do not delay; ``False``: it is not at a given time.

        Args:
            until: the time, as ``time.monotonic`` has it.
        """
        while not self.is_told:
            left = until - time.monotonic()
            if left <= 0:
                return False
            if self._told is None or self._told.is_open:  # torch is about to
                time.sleep(_MOMENT_S)
            else:
                self._told.wait(min(left, _LOOK_S))
        return True


def know_over(communicator: Communicator | None) -> int:
    """Write down that the caller knows all of a group's calls to be over; the place of one that is over now."""
    order = next(_orders)
    if communicator is not None:
        communicator.known_over = order
    return order


@untraced
class DoneWork(MycelWork):
    """A blocking collective that is over, and was right, with no other under way: made in half the time.

    Args:
        communicator: the group's.
        result: tensors that hold the result.
    """

    _ticket = _future = _told = None
    depth = 0

    def __init__(self, communicator: Communicator | None, result: list[torch.Tensor]) -> None:
        HeldWork.__init__(self)
        self._communicator, self._result = communicator, result
        self.order = know_over(communicator)
