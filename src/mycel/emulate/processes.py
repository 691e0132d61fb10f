"""The processes of the ranks: started in their namespaces, read line by line, ended together.

One supervising thread waits for everything at once: output, exits (process descriptors, so that no signal handler
of the program around us is touched) and deadlines. A rank leads a session of its own; whatever it leaves running
when it ends is killed with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from mycel.emulate.keeper import Keeper
from mycel.errors import UsageError

__all__ = ["TIMEOUT_EXIT_CODE", "LineSink", "RankProcess", "RankProcesses", "start_process"]

logger = logging.getLogger(__name__)

#: Receives ``(rank, stream, line)``; stream is ``"stdout"`` or ``"stderr"``, the line has no line end.
LineSink = Callable[[int, str, str], None]

#: Exit code when the time given is over, as that of the ``timeout`` command.
TIMEOUT_EXIT_CODE = 124

#: Seconds between SIGTERM and SIGKILL.
KILL_DELAY_S = 5.0

#: A line longer than this is passed on in parts (bytes).
_LONGEST_LINE = 1 << 16

#: Becomes the rank's program. Runs in a bare interpreter between fork and exec: running Python code in a forked child
#: of a process with threads could deadlock, an exec cannot. The rank dies with the process that started it
#: (PR_SET_PDEATHSIG). In a mount namespace of its own it sees our names of hosts, so that looking up who a peer is
#: does not wait for a name server that cannot be reached; without the right to do so it does without.
_BECOME = """
import ctypes, os, signal, sys
library = ctypes.CDLL(None)
library.prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
hosts = sys.argv[2]
NEWNS, BIND, SLAVE = 0x20000, 0x1000, 0x84000
if hosts and os.path.exists("/etc/hosts") and library.unshare(NEWNS) == 0:
    if library.mount(None, b"/", None, SLAVE, None) == 0:
        library.mount(hosts.encode(), b"/etc/hosts", None, BIND, None)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
try:
    os.execvp(sys.argv[3], sys.argv[3:])
except OSError as error:
    print(f"{sys.argv[3]}: {error.strerror}", file=sys.stderr)
    sys.exit(126 if isinstance(error, PermissionError) else 127)
"""


@dataclass(slots=True, kw_only=True)
class RankProcess:
    """One rank: its process and what is known of it.

    Attributes:
        rank: rank number.
        process: the process.
        descriptor: process descriptor, readable once the process has ended.
        exit_code: 0 to 255, signals as 128 + number; ``None`` while it runs.
    """

    rank: int
    process: subprocess.Popen[bytes]
    descriptor: int
    exit_code: int | None = None


def start_process(
    rank: int, command: Sequence[str], env: dict[str, str], *, hosts_file: Path | None, keeper: Keeper
) -> RankProcess:
    """Start a rank in the network namespace of the calling thread, which must live as long as the rank.

    Args:
        rank: rank number.
        command: program and arguments.
        env: the whole environment.
        hosts_file: what the rank finds as ``/etc/hosts``; ``None``: what we have there.
        keeper: told about the process group.
    """
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), str(hosts_file or ""), *command],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    keeper.watch_group(process.pid)
    return RankProcess(rank=rank, process=process, descriptor=os.pidfd_open(process.pid))


@dataclass(slots=True, kw_only=True)
class _Pipe:
    """One stream of one rank with the beginning of its next line."""

    rank: int
    stream: str
    file: IO[bytes]
    rest: bytes = b""


@dataclass(slots=True, kw_only=True)
class _Verdict:
    """How it went: the first failing exit code and what the supervisor is doing about it."""

    exit_code: int = 0
    failed_rank: int | None = None
    terminate_at: float | None = None
    kill_at: float | None = None
    error: BaseException | None = field(default=None)


class RankProcesses:
    """All ranks of one run.

    Args:
        ranks: the started processes, by rank.
        keeper: told when a process group has ended.
        sink: receives the output, in the supervising thread.
        timeout_s: for the whole run; ``None`` for no limit.
        grace_s: seconds the other ranks get to end by themselves after the first failure; ``None`` for no limit.
    """

    def __init__(
        self,
        ranks: Sequence[RankProcess],
        *,
        keeper: Keeper,
        sink: LineSink,
        timeout_s: float | None,
        grace_s: float | None,
    ) -> None:
        self._ranks = list(ranks)
        self._keeper = keeper
        self._sink = sink
        self._grace_s = grace_s
        self._timeout_s = timeout_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._lock = threading.Lock()
        self._verdict = _Verdict()
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        for rank in self._ranks:
            self._selector.register(rank.descriptor, selectors.EVENT_READ, rank)
            for stream, file in (("stdout", rank.process.stdout), ("stderr", rank.process.stderr)):
                assert file is not None
                os.set_blocking(file.fileno(), False)
                pipe = _Pipe(rank=rank.rank, stream=stream, file=file)
                self._selector.register(file, selectors.EVENT_READ, pipe)
        self._running = len(self._ranks)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name="mycel-ranks", daemon=True)
        self._thread.start()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process number of each rank."""
        return tuple(rank.process.pid for rank in self._ranks)

    @property
    def exit_codes(self) -> tuple[int | None, ...]:
        """Exit code of each rank, ``None`` while it runs; signals as 128 + number."""
        return tuple(rank.exit_code for rank in self._ranks)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to the process group of one rank; nothing happens if it has ended.

        Raises:
            UsageError: no such rank.
        """
        if not 0 <= rank < len(self._ranks):
            raise UsageError(f"no rank {rank} among {len(self._ranks)}")
        with self._lock:
            self._signal(self._ranks[rank], number)

    def signal_all(self, number: int) -> None:
        """Send a signal to every rank that still runs."""
        with self._lock:
            for rank in self._ranks:
                self._signal(rank, number)

    def end_by(self, terminate_s: float | None, kill_s: float) -> None:
        """Have whatever still runs terminated, then killed, so many seconds from now; earlier orders stand."""
        now = time.monotonic()
        with self._lock:
            verdict = self._verdict
            if terminate_s is not None:
                verdict.terminate_at = min(now + terminate_s, verdict.terminate_at or float("inf"))
            verdict.kill_at = min(now + kill_s, verdict.kill_at or float("inf"))
        self._wake()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for all ranks and their output.

        Returns:
            The first failing exit code in order of time, 0 if all ended well, 124 if the time of the run was
            over; ``None`` if ``timeout_s`` passed and ranks still run.

        Raises:
            Exception: whatever the receiver of the output raised.
        """
        if not self._done.wait(timeout_s):
            return None
        if self._verdict.error is not None:
            raise self._verdict.error
        return self._verdict.exit_code

    def close(self) -> None:
        """Kill whatever still runs and wait for the end. May be called twice."""
        self.end_by(None, 0.0)
        self._thread.join()

    # -- the supervising thread ---------------------------------------------------------------------------

    def _supervise(self) -> None:
        try:
            while self._running:
                for key, _ in self._selector.select(self._patience_s()):
                    self._handle(key)
                self._enforce()
            self._drain()
        finally:
            for key in list(self._selector.get_map().values()):
                if isinstance(key.data, _Pipe):
                    key.data.file.close()
            self._selector.close()
            with self._lock:
                os.close(self._wake_read)
                os.close(self._wake_write)
                self._wake_write = -1
            self._done.set()

    def _handle(self, key: selectors.SelectorKey) -> None:
        if isinstance(key.data, _Pipe):
            self._read(key.data)
        elif isinstance(key.data, RankProcess):
            self._reap(key.data)
        else:
            os.read(self._wake_read, 4096)

    def _patience_s(self) -> float | None:
        with self._lock:
            moments = [self._deadline, self._verdict.terminate_at, self._verdict.kill_at]
        known = [moment for moment in moments if moment is not None]
        return max(0.0, min(known) - time.monotonic()) if known else None

    def _enforce(self) -> None:
        now = time.monotonic()
        with self._lock:
            verdict = self._verdict
            if self._deadline is not None and now >= self._deadline:
                self._deadline = None
                verdict.exit_code = verdict.exit_code or TIMEOUT_EXIT_CODE
                verdict.terminate_at = now
                logger.error("the ranks are terminated: the %g s they were given are over", self._timeout_s)
            if verdict.terminate_at is not None and now >= verdict.terminate_at:
                verdict.terminate_at = None
                verdict.kill_at = min(now + KILL_DELAY_S, verdict.kill_at or float("inf"))
                for rank in self._ranks:
                    self._signal(rank, signal.SIGTERM)
                    # A stopped process receives SIGTERM only when it goes on.
                    self._signal(rank, signal.SIGCONT)
            if verdict.kill_at is not None and now >= verdict.kill_at:
                verdict.kill_at = None
                for rank in self._ranks:
                    self._signal(rank, signal.SIGKILL)

    def _reap(self, rank: RankProcess) -> None:
        with self._lock:
            # Until it is waited for, its number cannot be given to another process group.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.process.pid, signal.SIGKILL)
            code = rank.process.wait()
            rank.exit_code = 128 - code if code < 0 else code
            self._keeper.forget_group(rank.process.pid)
            self._selector.unregister(rank.descriptor)
            os.close(rank.descriptor)
            self._running -= 1
            verdict = self._verdict
            if rank.exit_code and verdict.failed_rank is None:
                verdict.failed_rank = rank.rank
                verdict.exit_code = verdict.exit_code or rank.exit_code
                if self._running and self._grace_s is not None:
                    terminate_at = time.monotonic() + self._grace_s
                    verdict.terminate_at = min(terminate_at, verdict.terminate_at or float("inf"))

    def _read(self, pipe: _Pipe) -> bool:
        """Pass on what there is; whether there may be more."""
        data = pipe.file.read(_LONGEST_LINE)
        if data is None:
            return False
        if not data:
            self._selector.unregister(pipe.file)
            pipe.file.close()
            if pipe.rest:
                self._pass_on(pipe, pipe.rest)
            return False
        *lines, rest = (pipe.rest + data).split(b"\n")
        if len(rest) >= _LONGEST_LINE:
            lines.append(rest)
            rest = b""
        pipe.rest = rest
        for line in lines:
            self._pass_on(pipe, line)
        return True

    def _drain(self) -> None:
        """Read what the ended ranks left in their pipes, without waiting for a holder that escaped its group."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Pipe):
                while self._read(key.data):
                    pass
                if not key.data.file.closed and key.data.rest:
                    self._pass_on(key.data, key.data.rest)

    def _pass_on(self, pipe: _Pipe, line: bytes) -> None:
        try:
            self._sink(pipe.rank, pipe.stream, line.decode(errors="replace").rstrip("\r"))
        except BaseException as error:  # raised to whoever waits; the ranks are ended, not left unread
            with self._lock:
                if self._verdict.error is None:
                    self._verdict.error = error
                    self._verdict.terminate_at = time.monotonic()

    def _signal(self, rank: RankProcess, number: int) -> None:
        """Only under the lock: no process is waited for meanwhile."""
        if rank.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.process.pid, number)

    def _wake(self) -> None:
        with self._lock:
            if self._wake_write >= 0:
                os.write(self._wake_write, b".")
