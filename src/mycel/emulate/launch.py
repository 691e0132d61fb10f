"""Starting a program once a rank, over an emulated cluster or on loopback, as torchrun does on a real cluster."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType

from mycel.emulate.cluster import EmulatedCluster, LinkCounters
from mycel.emulate.environment import hosts_text, loopback_environment, rank_environment
from mycel.emulate.keeper import Keeper
from mycel.emulate.processes import KILL_DELAY_S, LineSink, RankProcess, RankProcesses, start_process
from mycel.errors import UsageError
from mycel.topology.json_format import to_json
from mycel.topology.model import Topology
from mycel.topology.wiring import write_wiring

__all__ = ["Run", "launch", "start"]

#: Seconds the other ranks get to end by themselves after the first failure.
GRACE_S = 30.0

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Run:
    """One program running on every rank; a context manager that leaves nothing behind. Made by ``start``.

    Args:
        cluster: what the ranks run on; ``None``: 127.0.0.1.
        processes: the ranks.
        stack: what is taken down at the end.

    Examples:
        >>> with start(2, ["sleep", "60"]) as run:
        ...     len(run.pids), run.exit_codes
        (2, (None, None))
        >>> run.exit_codes  # nothing is left behind
        (137, 137)
    """

    def __init__(self, cluster: EmulatedCluster | None, processes: RankProcesses, stack: ExitStack) -> None:
        self._cluster = cluster
        self._processes = processes
        self._stack = stack

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def cluster(self) -> EmulatedCluster:
        """The emulated cluster.

        Raises:
            UsageError: there is none, the ranks run on loopback.
        """
        if self._cluster is None:
            raise UsageError("the ranks run on loopback: there is no emulated cluster, and no link to break")
        return self._cluster

    @property
    def pids(self) -> tuple[int, ...]:
        """Process number of each rank."""
        return self._processes.pids

    @property
    def exit_codes(self) -> tuple[int | None, ...]:
        """Exit code of each rank, ``None`` while it runs; signals as 128 + number."""
        return self._processes.exit_codes

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to one rank and whatever it has started."""
        self._processes.kill(rank, number)

    def signal_all(self, number: int) -> None:
        """Send a signal to every rank that still runs."""
        self._processes.signal_all(number)

    def end_by(self, terminate_s: float | None, kill_s: float) -> None:
        """Have whatever still runs terminated, then killed, so many seconds from now."""
        self._processes.end_by(terminate_s, kill_s)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for all ranks: the first failing exit code, 0 if all ended well, 124 if the run's time was over.

        Returns ``None`` if ``timeout_s`` passed and ranks still run.
        """
        return self._processes.wait(timeout_s)

    def counters(self) -> Mapping[tuple[int, int], LinkCounters]:
        """What each link has carried since the cluster was built, by ``(src, dst)`` vertices."""
        return self.cluster.counters()

    def set_link(self, src: int, dst: int, *, up: bool) -> None:
        """Break one direction of a cable, or mend it. A broken one drops packets in silence."""
        self.cluster.set_link(src, dst, up=up)

    def close(self) -> None:
        """Kill whatever still runs and take down what ``start`` built. May be called twice."""
        self._stack.close()


def start(
    cluster: Topology | EmulatedCluster | int,
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    output: Callable[[int, str], None] | None = None,
    timeout_s: float | None = None,
    grace_s: float | None = GRACE_S,
    prefix: bool = True,
    warm: Callable[[], None] | None = None,
) -> Run:
    """Start a program once a rank and return at once.

    Args:
        cluster: a topology to emulate for this run, or a cluster at hand, which stays up after it, or a number of
            ranks on 127.0.0.1, without shaped links. In the last case the calling thread must outlive the ranks.
        command: program and arguments, the same for every rank.
        env: added to the environment of the ranks.
        output: receives ``(rank, line)`` for each line of standard output and standard error, in another thread;
            without it, lines go to our own standard output and standard error.
        timeout_s: for the whole run; then ranks are terminated and the exit code is 124.
        grace_s: after the first rank has failed, the others may go on for so long; ``None`` for no limit.
        prefix: begin the lines with ``[rank0]:``; an ``output`` never sees a prefix.
        warm: called once before the ranks start, to do what they would otherwise all do at once.

    Returns:
        The run: signals, exit codes, counters of links; it ends with its ``with`` block.

    Raises:
        EmulationError: this machine cannot emulate a cluster.
        UsageError: no command, an unknown program, or a topology without a unit.

    Examples:
        >>> with start(2, ["sleep", "60"], grace_s=0) as run:
        ...     run.kill(1)  # as a rank that crashes
        ...     run.wait()
        137
    """
    _check_command(command, env)
    with ExitStack() as stack:
        keeper = stack.enter_context(Keeper())
        if isinstance(cluster, Topology):
            cluster = stack.enter_context(EmulatedCluster(cluster))
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mycel-emulate-"))).absolute()
        keeper.watch_directory(directory)
        stack.callback(keeper.forget_directory, directory)
        if warm is not None:
            warm()
        started: list[RankProcess] = []
        stack.callback(_end_unsupervised, keeper, started)
        if isinstance(cluster, int):
            _start_on_loopback(cluster, command, env, keeper, started)
        else:
            stack.callback(cluster.thread.call, lambda: None)  # a start interrupted on our side may still be going on
            _start_on_cluster(cluster, command, env, directory, keeper, started)
        sink = _to_streams(prefix=prefix) if output is None else lambda rank, _, line: output(rank, line)
        processes = RankProcesses(started, keeper=keeper, sink=sink, timeout_s=timeout_s, grace_s=grace_s)
        stack.callback(processes.close)
        return Run(None if isinstance(cluster, int) else cluster, processes, stack.pop_all())


def launch(
    cluster: Topology | EmulatedCluster | int,
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    output: Callable[[int, str], None] | None = None,
    timeout_s: float | None = None,
    grace_s: float | None = GRACE_S,
    prefix: bool = True,
    warm: Callable[[], None] | None = None,
    interrupts: bool = False,
) -> int:
    """Run a program once a rank and wait for it; arguments as for ``start``.

    In the main thread, SIGINT, SIGTERM and SIGHUP go on to the ranks, which then have ``grace_s`` to end; a second
    signal kills them.

    Args:
        cluster: a topology to emulate, a cluster at hand, or a number of ranks on 127.0.0.1.
        command: program and arguments, the same for every rank.
        env: added to the environment of the ranks.
        output: receives ``(rank, line)`` for each line; without it, lines go to our own standard output and error.
        timeout_s: for the whole run.
        grace_s: after the first rank has failed, or a signal has come, the others may go on for so long.
        prefix: begin the lines with ``[rank0]:``; an ``output`` never sees a prefix.
        warm: called once before the ranks start.
        interrupts: where SIGINT has come, raise what it means to Python, whatever the ranks then ended with.

    Returns:
        0, or the exit code of the rank that failed first (128 + number for a signal), or 124 when the time is over.

    Raises:
        EmulationError: this machine cannot emulate a cluster.
        UsageError: no command, an unknown program, or a topology without a unit.
        KeyboardInterrupt: asked for by ``interrupts``; all ranks have ended.

    Examples:
        >>> lines = []
        >>> launch(2, ["sh", "-c", "echo I am $RANK of $WORLD_SIZE"], output=lambda rank, line: lines.append(line))
        0
        >>> sorted(lines)
        ['I am 0 of 2', 'I am 1 of 2']
    """
    received: list[int] = []
    running: list[Run] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if not running:
            raise KeyboardInterrupt
        threading.Thread(target=_pass_signal, args=(running[0], number, len(received), grace_s)).start()

    with _handling(forward):
        try:
            with start(
                cluster,
                command,
                env=env,
                output=output,
                timeout_s=timeout_s,
                grace_s=grace_s,
                prefix=prefix,
                warm=warm,
            ) as run:
                running.append(run)
                code = run.wait()
        except KeyboardInterrupt:
            if not received:
                raise
            code = 128 + received[0]
    assert code is not None
    if interrupts and code and signal.SIGINT in received:
        raise KeyboardInterrupt
    return code


def _pass_signal(run: Run, number: int, count: int, grace_s: float | None) -> None:
    """Not in the handler itself: it may have interrupted the holder of a lock that we need."""
    if count > 1:
        run.end_by(None, 0.0)
        return
    run.signal_all(number)
    if grace_s is not None:
        run.end_by(grace_s, grace_s + KILL_DELAY_S)


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Our signal handler, in the main thread only and for as long as it is needed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {}
    try:
        for number in _FORWARDED:
            # Ignored (nohup) stays ignored; None is a handler of foreign code, which could not be put back.
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _start_on_loopback(
    num_ranks: int,
    command: Sequence[str],
    env: Mapping[str, str] | None,
    keeper: Keeper,
    started: list[RankProcess],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for rank in range(num_ranks):
        environment = loopback_environment(rank, num_ranks, port=port, extra=env)
        started.append(start_process(rank, command, environment, hosts_file=None, keeper=keeper))


def _start_on_cluster(
    cluster: EmulatedCluster,
    command: Sequence[str],
    env: Mapping[str, str] | None,
    directory: Path,
    keeper: Keeper,
    started: list[RankProcess],
) -> None:
    topology_file, wiring_file, hosts_file = (directory / name for name in ("topology.json", "wiring.json", "hosts"))
    hosts_file.write_text(hosts_text(cluster.topology.num_ranks), encoding="utf-8")
    topology_file.write_text(json.dumps(to_json(cluster.topology)), encoding="utf-8")
    write_wiring(cluster.wiring, wiring_file)

    def start_one(rank: int) -> None:
        environment = rank_environment(
            cluster.topology, rank, topology_file=topology_file, wiring_file=wiring_file, extra=env
        )
        started.append(start_process(rank, command, environment, hosts_file=hosts_file, keeper=keeper))

    for rank in range(cluster.topology.num_ranks):
        cluster.thread.run(cluster.namespace(rank), partial(start_one, rank))


def _end_unsupervised(keeper: Keeper, started: Sequence[RankProcess]) -> None:
    """Ends ranks when starting another one failed or was interrupted; supervised ones have ended by then."""
    for rank in started:
        if rank.exit_code is None:
            with suppress(ProcessLookupError):
                os.killpg(rank.process.pid, signal.SIGKILL)
            rank.process.communicate()
            keeper.forget_group(rank.process.pid)
            os.close(rank.descriptor)


def _check_command(command: Sequence[str], env: Mapping[str, str] | None) -> None:
    if isinstance(command, str) or not command:
        raise UsageError(f"the command must be a list of a program and its arguments, got {command!r}")
    path = (env or {}).get("PATH")
    if shutil.which(command[0], path=path) is None:
        remedy = "options go before the topology" if command[0].startswith("-") else "give a path or a name on PATH"
        raise UsageError(f"no program {command[0]!r} that can be run; {remedy}")


def _to_streams(*, prefix: bool) -> LineSink:
    def show(rank: int, stream: str, line: str) -> None:
        file = sys.stderr if stream == "stderr" else sys.stdout
        file.write(f"[rank{rank}]: {line}\n" if prefix else f"{line}\n")
        file.flush()

    return show
