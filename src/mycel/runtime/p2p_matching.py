"""Which receive a message belongs to.

Messages of one sender with one tag are received in the order in which they were sent, by receives in the order in
which these were made. A receive from any rank takes its place among those from single ranks. Knows no sockets.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

__all__ = ["Arrival", "Matching", "Transfer"]


@dataclass(slots=True, eq=False, kw_only=True)
class Transfer:
    """One send or receive under way.

    Attributes:
        verb: ``send`` or ``recv``.
        peer: the other rank; ``None``: to be received from any.
        tag: messages are received by those who ask for their tag.
        view: the bytes to be sent, or to be written.
        dtype: name of the element type.
        timeout_s: after which it fails.
        keep: what owns the memory.
        settle: puts what came to where the caller wants it; run once, before anybody sees the transfer complete.
        deadline: ``time.monotonic`` at which it fails.
        number: place among the sends to a rank, or the receives of this one.
        left: bytes that have not been handed over, or have not come.
        begun: whether the two ends have found each other.
        source: rank that a received message came from.
        error: why it failed.
        is_done: over, right or wrong, and visible to everybody.
    """

    verb: str
    peer: int | None
    tag: int
    view: memoryview
    dtype: bytes
    timeout_s: float
    keep: object = None
    settle: Callable[[], None] | None = None
    deadline: float = 0.0
    number: int = 0
    left: int = 0
    begun: bool = False
    source: int = -1
    error: BaseException | None = None
    is_done: bool = False
    event: threading.Event | None = None
    callbacks: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.left = len(self.view)
        self.deadline = time.monotonic() + self.timeout_s

    @property
    def what(self) -> str:
        """The transfer in words."""
        way = "to" if self.verb == "send" else "from"
        other = "any rank" if self.peer is None else f"rank {self.peer}"
        return f"{self.verb} {way} {other} (tag {self.tag}, {self.size})"

    @property
    def size(self) -> str:
        """Bytes and element type in words."""
        return f"{len(self.view)} bytes of {self.dtype.decode()}"


@dataclass(slots=True, eq=False, kw_only=True)
class Arrival:
    """A message that came, or was offered, before anybody asked for it.

    Attributes:
        src, tag, number, dtype: see ``Frame``.
        num_bytes: of the message.
        data: its bytes; ``None``: it was offered only.
        left: bytes of it that have not come yet.
        taker: the receive that waits for the rest.
        is_early: it is a long message, which its sender goes on holding until it is told of a receive.
    """

    src: int
    tag: int
    number: int
    dtype: bytes
    num_bytes: int
    data: bytearray | None = None
    left: int = 0
    taker: Transfer | None = None
    is_early: bool = False
    order: int = 0


class Matching:
    """Receives without a message, and messages without a receive."""

    def __init__(self) -> None:
        self._receives: dict[tuple[int | None, int], deque[Transfer]] = {}
        self._arrivals: dict[tuple[int, int], deque[Arrival]] = {}
        self._count = count()

    def receive(self, transfer: Transfer) -> Arrival | None:
        """The message that a new receive gets; ``None``: it waits for one."""
        transfer.number = next(self._count)
        if transfer.peer is not None:
            first: Arrival | None = self._take((transfer.peer, transfer.tag))
        else:
            first = self._take_any(transfer.tag)
        if first is None:
            self._receives.setdefault((transfer.peer, transfer.tag), deque()).append(transfer)
        return first

    def _take_any(self, tag: int) -> Arrival | None:
        waiting = [queue[0] for (_, other), queue in self._arrivals.items() if other == tag]
        if not waiting:
            return None
        first = min(waiting, key=lambda arrival: arrival.order)
        return self._take((first.src, tag))

    def _take(self, key: tuple[int, int]) -> Arrival | None:
        queue = self._arrivals.get(key)
        if queue is None:
            return None
        arrival = queue.popleft()
        if not queue:
            del self._arrivals[key]
        return arrival

    def arrive(self, src: int, tag: int) -> Transfer | None:
        """The receive that a new message belongs to; ``None``: ``hold`` it."""
        keys = [key for key in ((src, tag), (None, tag)) if key in self._receives]
        if not keys:
            return None
        key = min(keys, key=lambda key: self._receives[key][0].number)
        queue = self._receives[key]
        transfer = queue.popleft()
        if not queue:
            del self._receives[key]
        return transfer

    def hold(self, arrival: Arrival) -> None:
        """Keep a message until it is asked for."""
        arrival.order = next(self._count)
        self._arrivals.setdefault((arrival.src, arrival.tag), deque()).append(arrival)

    def withdraw(self, transfer: Transfer) -> None:
        """Forget a receive that waits, if it does."""
        key = (transfer.peer, transfer.tag)
        queue = self._receives.get(key)
        if queue is not None and transfer in queue:
            queue.remove(transfer)
            if not queue:
                del self._receives[key]
