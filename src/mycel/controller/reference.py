"""What comes of a call, and a handle to what it has left, or will leave, on the ranks of a mesh."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from mycel.controller.messages import Failure, Large
from mycel.errors import CollectiveTimeoutError, CommunicationError, MycelError

__all__ = ["Outcome", "Reference", "Replies"]

#: Seconds between two looks at whether a rank has ended.
_LOOK_S = 0.2


class Replies(Protocol):
    """What a reference needs of the controller."""

    def check(self) -> None:
        """Raises what has ended the cluster, if anything has."""

    def fetch(self, number: int, ranks: tuple[int, ...]) -> Any:
        """Ask ranks for a value; a future of Monarch's."""

    def forget(self, number: int) -> None:
        """Nobody can ask for a value any more."""

    @property
    def timeout_s(self) -> float:
        """Longest wait."""


class Outcome:
    """What comes of a call, as far as it is known here. Any thread may ask.

    Args:
        number: of the call, in the one order.
        name: of its program.
        ranks: of its mesh.
        future: of Monarch's, of what ranks reply.
        replies: the controller.
    """

    def __init__(self, *, number: int, name: str, ranks: tuple[int, ...], future: Any, replies: Replies) -> None:
        self.number, self.name, self.ranks = number, name, ranks
        self.replies = replies
        self._future = future
        self._values: tuple[Any, ...] | None = None
        self._lock = threading.Lock()  # a future of Monarch's is for one thread at a time

    def done(self) -> bool:
        """Whether all ranks are through with the call."""
        return self._wait(0.0)

    def wait(self, timeout_s: float | None = None) -> None:
        """Until all ranks are through with the call; arguments and errors as for ``Reference.result``."""
        limit_s = self._limit_s(timeout_s)
        if not self._wait(limit_s):
            raise CollectiveTimeoutError(
                f"{self.name} (call {self.number}) is not done on ranks {list(self.ranks)} after {limit_s:g} s"
            )
        self._raise_failures(self._values or ())

    def result(self, timeout_s: float | None = None) -> tuple[Any, ...]:
        """The values; see ``Reference.result``."""
        self.wait(timeout_s)
        values = self._values or ()
        if any(isinstance(value, Large) for value in values):
            limit_s = self._limit_s(timeout_s)
            future = self.replies.fetch(self.number, self.ranks)
            fetched = _get(future, limit_s, self.replies.check)
            if fetched is None:
                raise CollectiveTimeoutError(f"the value of call {self.number} did not come within {limit_s:g} s")
            values = self._values = fetched
        return values

    def _limit_s(self, timeout_s: float | None) -> float:
        return self.replies.timeout_s if timeout_s is None else timeout_s

    def _wait(self, limit_s: float) -> bool:
        begun = time.monotonic()
        if self._values is None and self._lock.acquire(timeout=limit_s):
            try:
                if self._values is None:
                    self._values = _get(self._future, limit_s - (time.monotonic() - begun), self.replies.check)
                if self._values is not None:
                    self._future = None
            finally:
                self._lock.release()
        return self._values is not None

    def _raise_failures(self, values: tuple[Any, ...]) -> None:
        failures = [value for value in values if isinstance(value, Failure)]
        if failures:
            cause = min(failures, key=lambda failure: (failure.kind, failure.rank))
            error = CommunicationError(
                f"{self.name} (call {self.number}) failed on rank {cause.rank}, {len(failures)} of "
                f"{len(values)} ranks: {cause.said}"
            )
            if cause.trace:
                error.add_note(f"On rank {cause.rank}:\n{cause.trace}")
            raise error


class Reference:
    """What a call leaves on its mesh's ranks. The call may not have begun yet.

    Give it to later calls on the same mesh as it is: they get what lies on their rank. ``Mesh.put`` moves it to
    another mesh. When nobody holds it any more, the ranks let go of their values.
    """

    __slots__ = ("__weakref__", "outcome")

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome

    @property
    def number(self) -> int:
        """Place of the call in the one order."""
        return self.outcome.number

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of the mesh."""
        return self.outcome.ranks

    def __repr__(self) -> str:
        return f"<{self.outcome.name}, call {self.number} on {len(self.ranks)} ranks>"

    def done(self) -> bool:
        """Whether all ranks are through with the call.

        Raises:
            PeerLostError: a rank has ended.
        """
        return self.outcome.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Until all ranks are through with the call; see ``result``."""
        self.outcome.wait(timeout_s)

    def result(self, timeout_s: float | None = None) -> tuple[Any, ...]:
        """The values, one a rank of the mesh, in their order; tensors come to this process's memory.

        Args:
            timeout_s: longest wait; ``None``: the controller's.

        Raises:
            PeerLostError: a rank has ended; the message names it.
            CollectiveTimeoutError: time is over.
            CommunicationError: the program failed; the message says on which rank and with what.
        """
        return self.outcome.result(timeout_s)

    def __del__(self) -> None:
        self.outcome.replies.forget(self.number)


def _get(future: Any, limit_s: float, check: Callable[[], None]) -> tuple[Any, ...] | None:
    """The values of a future of Monarch's, by rank; ``None`` if time is over."""
    deadline = time.monotonic() + limit_s
    while True:
        left_s = deadline - time.monotonic()
        try:
            return tuple(value for _, value in future.get(timeout=max(0.001, min(_LOOK_S, left_s))).items())
        except TimeoutError:
            check()
            if left_s <= 0:
                return None
        except MycelError:
            raise
        except Exception as error:  # of Monarch's supervision, a class of its Rust part
            check()
            raise CommunicationError(f"ranks do not answer any more: {error}") from error
