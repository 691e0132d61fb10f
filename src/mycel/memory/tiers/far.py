"""Far memory: buffers of bytes in the host, pinned or not, or in files; lent again, never more than was needed."""

from __future__ import annotations

import mmap
import threading
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from mycel.errors import UsageError
from mycel.memory.tiers.files import on_disk

__all__ = ["FarMemory", "in_folder", "in_host", "pinned"]

#: Makes a buffer of so many bytes, uint8 of one dimension.
Maker = Callable[[int], Tensor]


def in_host(num_bytes: int) -> Tensor:
    """Memory of the host that is mapped as shared, so that a limit on a process's own data does not count it.

    Args:
        num_bytes: at least 1.

    Raises:
        UsageError: the host has not so much.
    """
    try:
        mapped = mmap.mmap(-1, num_bytes)  # anonymous and shared: no descriptor stays open
    except OSError as error:
        raise UsageError(f"far memory: the host has no {num_bytes} bytes more: {error}") from error
    return torch.frombuffer(mapped, dtype=torch.uint8)


def pinned(num_bytes: int) -> Tensor:
    """Memory of the host that a GPU copies from and to while it computes.

    Args:
        num_bytes: at least 1.
    """
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def in_folder(folder: str | Path) -> Maker:
    """What makes buffers that are files without names.

    Args:
        folder: of a file system on a disk; ``/tmp`` often is memory.

    Returns:
        A function of a number of bytes, which raises ``UsageError`` where the disk is full.
    """
    make = on_disk(folder)
    return lambda num_bytes: make(torch.empty(num_bytes, dtype=torch.uint8, device="meta"), torch.uint8)


class FarMemory:
    """Buffers that are lent, come back, and are lent again.

    Buffers of a size that nobody asks for any more go before others are made, so that no more is held than was lent
    at once.

    Args:
        make: ``in_host``, ``pinned`` or ``in_folder(folder)``.

    Attributes:
        used_bytes: that are lent now.
        peak_bytes: most that were lent at once.
        held_bytes: lent, or waiting to be.

    Examples:
        >>> far = FarMemory()
        >>> buffer = far.take(4096)
        >>> far.give(buffer)
        >>> far.used_bytes, far.peak_bytes, far.held_bytes
        (0, 4096, 4096)
        >>> far.take(4096) is buffer
        True
    """

    def __init__(self, make: Maker = in_host) -> None:
        self._make = make
        self._free: dict[int, list[Tensor]] = {}
        #: Came back. Finalizers bring buffers, also of threads that hold locks: they put them here and never wait.
        self._back: deque[Tensor] = deque()
        self._lock = threading.RLock()
        self._used = self.peak_bytes = self.held_bytes = 0
        #: By size: buffers that are lent, and most that were at once since ``trim``.
        self._lent: Counter[int] = Counter()
        self._latest: Counter[int] = Counter()

    @property
    def used_bytes(self) -> int:
        """Lent now."""
        with self._lock:
            self._settle()
            return self._used

    def take(self, num_bytes: int) -> Tensor:
        """A buffer, uint8 of shape (num_bytes,).

        Args:
            num_bytes: at least 1.

        Raises:
            UsageError: there is no room.
        """
        with self._lock:
            self._settle()
            waiting = self._free.get(num_bytes)
            buffer = waiting.pop() if waiting else None
            if buffer is None:
                self._trim(max(self.peak_bytes, self._used + num_bytes) - num_bytes)
                buffer = self._make(num_bytes)
                self.held_bytes += num_bytes
            self._used += num_bytes
            self.peak_bytes = max(self.peak_bytes, self._used)
            self._lent[num_bytes] += 1
            self._latest[num_bytes] = max(self._latest[num_bytes], self._lent[num_bytes])
            return buffer

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back.

        Args:
            buffer: that ``take`` gave.
        """
        self._back.append(buffer)

    def forget(self, buffer: Tensor) -> None:
        """Lend a buffer for good: somebody may still write there.

        Args:
            buffer: that ``take`` gave.
        """
        with self._lock:
            self._used -= buffer.nbytes
            self._lent[buffer.nbytes] -= 1
            self.held_bytes -= buffer.nbytes

    def trim(self) -> None:
        """Give back to the system what was not lent at once since the last call, size by size.

        Called between iterations, so that each finds the buffers of the one before.

        Examples:
            >>> far = FarMemory()
            >>> both = [far.take(4096), far.take(4096)]
            >>> while both:
            ...     far.give(both.pop())
            >>> far.trim()
            >>> far.give(far.take(4096))
            >>> far.held_bytes
            8192
            >>> far.trim()
            >>> far.held_bytes
            4096
        """
        with self._lock:
            self._settle()
            for size, waiting in list(self._free.items()):
                while waiting and self._lent[size] + len(waiting) > self._latest[size]:
                    waiting.pop()
                    self.held_bytes -= size
                if not waiting:
                    del self._free[size]
            self._lent = +self._lent
            self._latest = self._lent.copy()

    def clear(self) -> None:
        """Give everything that waits back to the system."""
        with self._lock:
            self._settle()
            self._trim(0)

    def _settle(self) -> None:
        while self._back:
            buffer = self._back.popleft()
            self._used -= buffer.nbytes
            self._lent[buffer.nbytes] -= 1
            self._free.setdefault(buffer.nbytes, []).append(buffer)

    def _trim(self, most: int) -> None:
        for size in sorted(self._free, reverse=True):
            while self.held_bytes > most and self._free[size]:
                self._free[size].pop()
                self.held_bytes -= size
            if not self._free[size]:
                del self._free[size]
