"""Whose turn it is to compile: one process of a machine does it, and others that need the same wait for its files."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["PATIENCE_S", "Turn", "take_turn", "turns"]

_log = logging.getLogger("mycel.compiled")

#: How long a process waits for another one that compiles what it needs, before it compiles for itself: the other may
#: be stopped. One that ends lets go at once.
PATIENCE_S = 120.0
_LOOK_S = 0.05


class Turn:
    """Whose turn it is to compile, of all processes that keep machine code in a folder.

    A lock of a file there, the kernel's, which no process leaves behind: not by ending, and not to its children. A
    folder whose files cannot be locked has none, and each compiles for itself. Numba compiles one thing at a time in
    a process, and functions inside of others, so what is counted here needs no lock of its own.

    Args:
        folder: where the code is kept.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "mycel-compiling.lock"
        self._descriptor = -1
        self._depth = 0

    def take(self, what: str) -> None:
        """Return when no other process compiles, or none that gets on."""
        self._depth += 1
        if self._depth > 1:
            return
        try:
            self._descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            _log.debug("%s cannot be opened: %s", self._file, error)
            return
        until = time.monotonic() + PATIENCE_S
        while not self._is_ours():
            if time.monotonic() >= until:
                _log.warning("another process has been compiling for %.0f s; compiling %s here", PATIENCE_S, what)
                return
            time.sleep(_LOOK_S)

    def _is_ours(self) -> bool:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: somebody else has it
            return False
        except OSError as error:
            _log.debug("%s cannot be locked: %s", self._file, error)
        return True

    def give(self, *, wholly: bool = False) -> None:
        """What was taken last is done; or everything."""
        self._depth = 0 if wholly else max(0, self._depth - 1)
        if self._depth == 0 and self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


#: By folder.
turns: dict[Path, Turn] = {}


@contextlib.contextmanager
def take_turn(folder: Path, what: str) -> Iterator[None]:
    """Compile something while no other process compiles what is kept in the folder."""
    turn = turns.setdefault(folder, Turn(folder))
    turn.take(what)
    try:
        yield
    finally:
        turn.give()
