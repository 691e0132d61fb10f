"""Near memory: how much of a budget is taken by storages that live, and by what is about to be made."""

from __future__ import annotations

import threading
import weakref
from collections import deque

import torch
from torch import Tensor

__all__ = ["Claim", "NearMemory", "flat", "key_of"]


def key_of(tensor: Tensor) -> int:
    """The identity of a tensor's storage, for as long as that lives."""
    return int(tensor.untyped_storage()._cdata)


def flat(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage, uint8 of one dimension; the same memory."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


class Claim:
    """Room that is kept for what is about to be made.

    Attributes:
        num_bytes: that have not been made yet.
    """

    __slots__ = ("num_bytes",)

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


class NearMemory:
    """A budget, and what lives in it: each storage once, from when it is counted to when its last user lets it go.

    Args:
        capacity: bytes.

    Attributes:
        held: bytes of storages that live.
        claimed: bytes that are kept for what is about to be made.
        peak: the largest ``held``.
        changed: is notified when something ends; its lock is for whoever decides by these figures.

    Examples:
        >>> near = NearMemory(100)
        >>> tensor = torch.zeros(20)
        >>> near.count(tensor), near.count(tensor.view(4, 5)), near.held
        (80, 0, 80)
        >>> near.claim(40) is None
        True
        >>> del tensor
        >>> near.claim(40).num_bytes, near.held, near.claimed, near.peak
        (40, 0, 40, 80)
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.changed = threading.Condition(threading.RLock())
        self.claimed = self.peak = 0
        self._held = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._ended: deque[tuple[int, int]] = deque()

    @property
    def held(self) -> int:
        """Bytes of storages that live."""
        with self.changed:
            self._settle()
            return self._held

    def knows(self, key: int) -> bool:
        """Whether a storage is counted.

        Args:
            key: of a storage that lives, by ``key_of``.
        """
        with self.changed:
            self._settle()
            return key in self._alive

    def count(self, tensor: Tensor, claim: Claim | None = None) -> int:
        """Count the storage of a tensor from now until it is freed.

        Args:
            tensor: of any shape.
            claim: the room that was kept for it.

        Returns:
            Its bytes; 0 where it was counted before.
        """
        storage = tensor.untyped_storage()
        key, num_bytes = int(storage._cdata), storage.nbytes()
        with self.changed:
            self._settle()
            if key in self._alive:
                return 0
            ended, here = self._ended, weakref.ref(self)

            def gone(_: object) -> None:
                # Runs wherever the last reference went, also in the middle of something that holds a lock: so it
                # notes, and never waits.
                ended.append((key, num_bytes))
                one = here()
                if one is not None and one.changed.acquire(blocking=False):
                    try:
                        one.changed.notify_all()
                    finally:
                        one.changed.release()

            self._alive[key] = weakref.ref(storage, gone)
            self._held += num_bytes
            if claim is not None:
                used = min(claim.num_bytes, num_bytes)
                claim.num_bytes -= used
                self.claimed -= used
            self.peak = max(self.peak, self._held)
            return num_bytes

    def claim(self, num_bytes: int) -> Claim | None:
        """Keep room; ``None`` where there is not so much.

        Args:
            num_bytes: at least 0.
        """
        with self.changed:
            self._settle()
            if self._held + self.claimed + num_bytes > self.capacity:
                return None
            self.claimed += num_bytes
            return Claim(num_bytes)

    def release(self, claim: Claim) -> None:
        """Give back what is left of a claim.

        Args:
            claim: once or more often.
        """
        with self.changed:
            self.claimed -= claim.num_bytes
            claim.num_bytes = 0
            self.changed.notify_all()

    def _settle(self) -> None:
        while self._ended:
            key, num_bytes = self._ended.popleft()
            self._alive.pop(key, None)
            self._held -= num_bytes
