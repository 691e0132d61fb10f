"""Starting one process a rank, over an emulated cluster or on loopback, and reading the records they print.

A record is a line of standard output that holds one JSON object. Everything else that the ranks print is kept for
the error message in case one of them fails.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from mycel.errors import CommunicationError, UsageError
from mycel.topology.model import Topology

__all__ = ["RecordSink", "run_on_cluster", "run_on_loopback"]

#: Receives ``(rank, record)`` as soon as the line is there; runs in a reader thread.
RecordSink = Callable[[int, dict[str, Any]], None]

_KEPT_LINES = 12


class _Output:
    """Splits what the ranks print into records and the last few other lines of each rank."""

    def __init__(self, sink: RecordSink) -> None:
        self._sink = sink
        self._lock = threading.Lock()
        self._tails: dict[int, deque[str]] = {}
        self.failure: BaseException | None = None

    def line(self, rank: int, text: str) -> None:
        """Takes one line of one rank."""
        record = _record(text)
        with self._lock:
            if record is None:
                self._tails.setdefault(rank, deque(maxlen=_KEPT_LINES)).append(text.rstrip())
                return
            try:
                self._sink(rank, record)
            except Exception as error:  # a broken sink must not silence the reader; it is raised at the end
                self.failure = self.failure or error

    def explain(self, what: str) -> str:
        """One line with what the ranks said last."""
        said = [f"rank {rank}: {lines[-1]}" for rank, lines in sorted(self._tails.items()) if lines]
        return f"{what}; " + ("last output: " + " | ".join(said[:3]) if said else "the ranks printed nothing")


def run_on_cluster(
    topology: Topology,
    command: Sequence[str],
    *,
    sink: RecordSink,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    warm: Callable[[], None] | None = None,
) -> None:
    """Run ``command`` once a rank over an emulated cluster.

    Args:
        topology: one process is started for each of its ranks.
        command: program and arguments, the same for every rank.
        sink: receives the records.
        timeout_s: for the whole run.
        env: added to the environment of the ranks.
        warm: called once before the ranks start, to compile what they would all compile at once.

    Raises:
        EmulationError: this machine cannot emulate a cluster.
        CommunicationError: a rank failed; the message says what the ranks printed last.
        KeyboardInterrupt: the run was interrupted; the launcher has passed the signal on to the ranks.
    """
    from mycel.emulate.launch import launch

    output = _Output(sink)
    status = launch(
        topology, list(command), env=dict(env or {}), output=output.line, timeout_s=timeout_s, prefix=False, warm=warm
    )
    if status == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    _conclude(output, status, f"a rank of {topology.name} failed with exit code {status}")


def run_on_loopback(
    num_ranks: int,
    command: Sequence[str],
    *,
    sink: RecordSink,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    warm: Callable[[], None] | None = None,
) -> None:
    """Run ``command`` once a rank on 127.0.0.1, without shaped links. Arguments as for ``run_on_cluster``.

    Raises:
        UsageError: fewer than two ranks.
        CommunicationError: a rank failed, or the time is over.
    """
    if num_ranks < 2:
        raise UsageError(f"{num_ranks} rank(s) on loopback; a collective needs at least 2")
    if warm is not None:
        warm()
    output = _Output(sink)
    port = _free_port()
    processes: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    try:
        for rank in range(num_ranks):
            process = subprocess.Popen(
                list(command),
                env=_environment(rank, num_ranks, port, env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            processes.append(process)
            assert process.stdout is not None
            reader = threading.Thread(target=_read, args=(rank, process.stdout, output), daemon=True)
            reader.start()
            readers.append(reader)
        status = _wait(processes, timeout_s)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for reader in readers:
            reader.join(timeout=10)
    what = "time is over" if status is None else f"a rank on loopback failed with exit code {status}"
    _conclude(output, 1 if status is None else status, what)


def _conclude(output: _Output, status: int, what: str) -> None:
    if output.failure is not None:
        raise output.failure
    if status:
        raise CommunicationError(output.explain(what))


def _record(text: str) -> dict[str, Any] | None:
    if not text.startswith("{"):
        return None
    try:
        record = json.loads(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _read(rank: int, stream: IO[str], output: _Output) -> None:
    with stream:
        for line in stream:
            output.line(rank, line)


def _environment(rank: int, num_ranks: int, port: int, env: Mapping[str, str] | None) -> dict[str, str]:
    """What torchrun would set, for ranks of one machine."""
    return {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        **(env or {}),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    }


def _wait(processes: list[subprocess.Popen[str]], timeout_s: float) -> int | None:
    """First failing exit code (signals as 128 + number), 0 when all ended well, ``None`` when time is over."""
    deadline = time.monotonic() + timeout_s
    running = set(range(len(processes)))
    while running:
        for rank in sorted(running):
            try:
                code = processes[rank].wait(timeout=0.05)
            except subprocess.TimeoutExpired:
                continue
            running.discard(rank)
            if code:
                return 128 - code if code < 0 else code
        if time.monotonic() > deadline:
            return None
    return 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
