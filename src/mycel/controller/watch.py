"""Notices at once when a rank's process ends: the kernel tells, through a descriptor of the process."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Sequence

__all__ = ["Watch"]


class Watch:
    """Watches processes of this machine from a thread, until it is closed.

    Args:
        processes: by rank; those that are gone already count as ended.
        ended: called once, with the first rank whose process has ended.
    """

    def __init__(self, processes: Sequence[int], ended: Callable[[int], None]) -> None:
        self._descriptors: dict[int, int] = {}
        gone: list[int] = []
        for rank, process in enumerate(processes):
            try:
                self._descriptors[os.pidfd_open(process)] = rank
            except ProcessLookupError:
                gone.append(rank)
        self._ended = ended
        self._wake, self._woken = os.pipe()
        self._thread = threading.Thread(target=self._follow, args=(gone,), name="mycel.controller.watch", daemon=True)
        self._thread.start()

    def _follow(self, gone: list[int]) -> None:
        if not gone:
            poll = select.poll()
            for descriptor in (*self._descriptors, self._wake):
                poll.register(descriptor, select.POLLIN)
            gone = [self._descriptors[d] for d, _ in poll.poll() if d in self._descriptors]
        if gone:
            self._ended(min(gone))

    def close(self) -> None:
        """End the thread."""
        os.write(self._woken, b".")
        self._thread.join()
        for descriptor in (*self._descriptors, self._wake, self._woken):
            os.close(descriptor)
