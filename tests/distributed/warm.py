"""Ranks that ``mycel.emulate`` starts, forked from the launcher, which has imported torch, where all is the same.

A rank that is started spends three seconds of a processor on imports before its first line. What a command starts
is left alone, and so is what runs with options of Python's, or with variables that imports read and that are others
than the launcher's.
"""

from __future__ import annotations

import ctypes
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from tests.distributed.forked_programs import Program

from mycel.emulate.keeper import Keeper
from mycel.emulate.processes import RankProcess, start_process

__all__ = ["started_warm"]

_SET_SUBREAPER = 36
#: How variables begin that are read when something is imported; BLAS libraries go by OMP_NUM_THREADS where no other
#: variable says anything, which here none does.
_READ_EARLY = ("PYTHON", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "NUMBA_", "OMP_", "KMP_", "LD_")
_adopting = threading.Lock()


class Forked:
    """As much of ``subprocess.Popen`` as ``RankProcess`` uses, of a child that somebody else has forked."""

    def __init__(self, pid: int, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.pid, self.stdout, self.stderr = pid, stdout, stderr
        self.returncode: int | None = None

    def wait(self) -> int:
        """Its exit code, when it has ended; signals as negative numbers."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def communicate(self) -> tuple[bytes, bytes]:
        """Close what it writes to, and wait for it: it has been killed."""
        self.stdout.close()
        self.stderr.close()
        self.wait()
        return b"", b""


def started_warm(ask: Callable[[dict[str, Any]], dict[str, Any]], environment: Mapping[str, str]) -> Any:
    """What takes the place of ``mycel.emulate.processes.start_process``.

    Args:
        ask: the launcher.
        environment: the launcher's, as it was started.
    """

    def start(
        rank: int, command: Sequence[str], env: dict[str, str], *, hosts_file: Path | None, keeper: Keeper
    ) -> RankProcess:
        program = _program(command)
        if program is None or _early(env) != _early(environment):
            return start_process(rank, command, env, hosts_file=hosts_file, keeper=keeper)
        quiet, (file, *arguments) = program
        own = os.getpid()
        with _pipe() as (out_read, out_write), _pipe() as (error_read, error_write):
            asked = Program(
                program=file,
                arguments=arguments,
                environment=env,
                folder=str(Path.cwd()),
                output=f"/proc/{own}/fd/{out_write}",
                errors=f"/proc/{own}/fd/{error_write}",
                network=f"/proc/{own}/task/{threading.get_native_id()}/ns/net",
                hosts=str(hosts_file or ""),
                quiet=quiet,
                parent=own,
            )
            with _adopting, _taking_orphans():
                answer = ask(asdict(asked))
            if not answer["adopted"]:
                raise RuntimeError("the kernel has given a rank to somebody else")
            outputs: Any = io.FileIO(os.dup(out_read)), io.FileIO(os.dup(error_read))
            process: Any = Forked(answer["pid"], *outputs)
        keeper.watch_group(process.pid)
        return RankProcess(rank=rank, process=process, descriptor=os.pidfd_open(process.pid))

    return start


def _program(command: Sequence[str]) -> tuple[bool, list[str]] | None:
    """Whether a program is to be quiet, and it with its arguments: a file or a module; ``None``: it is neither."""
    rest, quiet = list(command), False
    if rest[:1] != [sys.executable]:
        return None
    del rest[0]
    if rest[:2] == ["-W", "ignore"]:
        quiet = True
        del rest[:2]
    if len(rest) > 1 and rest[0] == "-m":
        return quiet, rest[1:]
    return (quiet, rest) if rest and rest[0].endswith(".py") else None


def _early(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(_READ_EARLY)}


@contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)


@contextmanager
def _taking_orphans() -> Iterator[None]:
    """Children that lose their parent are this process's meanwhile."""
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_SET_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        library.prctl(_SET_SUBREAPER, 0, 0, 0, 0)
