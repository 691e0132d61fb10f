"""A small process that outlives ours by a moment, to leave nothing behind when we are killed without warning.

It is told which process groups and which directories are ours. When we end in good order the list is empty; when we
vanish (``kill -9``) it kills the groups, grandchildren included, and removes the directories.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType

__all__ = ["Keeper"]

#: Runs in a bare interpreter: starts in some ten milliseconds and depends on nothing. It watches our process by
#: descriptor and its own standard input, so that neither a recycled process number nor an inherited pipe misleads it.
_PROGRAM = """
import os, select, shutil, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
groups, directories = set(), set()
def obey(line):
    verb, what = line[:1], line[1:]
    if verb == "+":
        groups.add(int(what))
    elif verb == "-":
        groups.discard(int(what))
    elif verb == "/":
        directories.add(line)
    elif verb == "~":
        directories.discard(what)
parent = os.getppid()
watched = [0]
if parent == int(sys.argv[1]):
    try:
        watched.append(os.pidfd_open(parent))
    except OSError:
        pass
    rest = ""
    while True:
        ready = select.select(watched, [], [])[0]
        data = os.read(0, 65536).decode() if 0 in ready else ""
        *lines, rest = (rest + data).split("\\n")
        for line in lines:
            obey(line)
        if not data:
            break
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
for directory in directories:
    shutil.rmtree(directory, ignore_errors=True)
"""


class Keeper:
    """Handle of the process; a context manager. Every method is safe once the process is gone."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> Keeper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def watch_group(self, group: int) -> None:
        """This process group is ours."""
        self._tell(f"+{group}")

    def forget_group(self, group: int) -> None:
        """That process group has ended; its number may be given to others from now on."""
        self._tell(f"-{group}")

    def watch_directory(self, directory: Path) -> None:
        """This directory (an absolute path) is ours."""
        self._tell(str(directory))

    def forget_directory(self, directory: Path) -> None:
        """That directory is removed."""
        self._tell(f"~{directory}")

    def close(self) -> None:
        """End the process; it kills whatever it still watches."""
        stdin = self._process.stdin
        if stdin is not None and not stdin.closed:
            with contextlib.suppress(OSError):
                stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        stdin = self._process.stdin
        if stdin is not None and not stdin.closed:
            with contextlib.suppress(OSError):
                stdin.write(f"{line}\n".encode())
                stdin.flush()
