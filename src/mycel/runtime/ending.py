"""The end of the interpreter, and threads that are at work then.

Programs end without ``destroy_process_group``: Lightning leaves its groups to the end of the process, and so do many
scripts. Python ends daemon threads where they next ask for its lock; one that is just giving a tensor back inside
torch ends there in C++ that must not be left, and the process is aborted. So threads that touch tensors do so
``at_work``. When the interpreter begins to end, it waits for those who are in, and lets nobody in any more.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from types import TracebackType

__all__ = ["at_work"]

#: How long the end of the process waits for threads at work: a callback may wait for a collective.
_PATIENCE_S = 5.0
_LOOK_S = 1e-3


class _AtWork:
    """A context for threads; the same thread may be in it several times. Nobody comes in after the end has begun."""

    def __init__(self) -> None:
        self._inside: list[int] = []
        self._is_hooked = False
        #: Whether the end has begun: whoever may leave does.
        self.is_over = False

    def __enter__(self) -> None:
        if not self._is_hooked:
            self._is_hooked = True
            atexit.register(self._end)
            os.register_at_fork(after_in_child=self._forget)
        # First in, then a look: whoever ends the process does the same the other way round, so one sees the other.
        self._inside.append(threading.get_ident())
        if self.is_over and threading.current_thread() is not threading.main_thread():
            self._inside.remove(threading.get_ident())
            threading.Event().wait()  # as long as there is a process

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside.remove(threading.get_ident())

    def _end(self) -> None:
        self.is_over = True
        until = time.monotonic() + _PATIENCE_S
        while set(self._inside) - {threading.get_ident()} and time.monotonic() < until:
            time.sleep(_LOOK_S)

    def _forget(self) -> None:
        """A forked child has none of these threads."""
        self._inside.clear()


at_work = _AtWork()
