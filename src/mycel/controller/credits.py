"""How many calls may be under way between two that follow each other: OneFlow's registers."""

from __future__ import annotations

import threading
import time
from collections import deque

from mycel.controller.reference import Outcome, Reference
from mycel.errors import CollectiveTimeoutError, UsageError

__all__ = ["Credits"]


class Credits:
    """A number of slots. A call that takes one waits for it before it is issued; one that gives frees one when done.

    Args:
        slots: how many.

    Raises:
        UsageError: fewer than 1.

    References:
        Yuan et al., "OneFlow: Redesign the Distributed Deep Learning Framework from Scratch" (2021), section 4.2.

    Examples:
        Two activations between stages, however far the program runs ahead:

        >>> edge = Credits(2)
        >>> edge
        Credits(2), 2 free

        ``left.call(forward, batch, takes=edge)`` and ``right.call(forward, activation, gives=edge)``.
    """

    def __init__(self, slots: int) -> None:
        if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
            raise UsageError(f"credits: {slots!r} slots; expected a whole number from 1")
        self._slots = slots
        self._free = slots
        self._giving: deque[Outcome] = deque()
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        with self._changed:
            return f"Credits({self._slots}), {self._free} free"

    def take(self, timeout_s: float) -> None:
        """Wait for a slot.

        Args:
            timeout_s: longest wait.

        Raises:
            CollectiveTimeoutError: none became free in time; nothing was issued that gives one back, or it hangs.
            PeerLostError: a rank has ended.
            CommunicationError: what was to give one back failed.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with self._changed:
                if self._free:
                    self._free -= 1
                    return
                oldest = self._giving.popleft() if self._giving else None
                if oldest is None:
                    left_s = deadline - time.monotonic()
                    if left_s <= 0 or (not self._changed.wait(min(left_s, 1.0)) and time.monotonic() >= deadline):
                        raise CollectiveTimeoutError(
                            f"all {self._slots} credits are taken, and for {timeout_s:g} s no call was issued that "
                            "gives one back (gives=...)"
                        )
                    continue
            oldest.wait(max(0.001, deadline - time.monotonic()))
            with self._changed:
                self._free = min(self._slots, self._free + 1)
                self._changed.notify_all()

    def give_when_done(self, reference: Reference) -> None:
        """Free a slot when a call is done."""
        with self._changed:
            self._giving.append(reference.outcome)
            self._changed.notify_all()
