"""Starting one process a rank, over an emulated cluster or on loopback, and reading the records they print.

A record is a line of standard output that holds one JSON object. Everything else that the ranks print is kept for
the error message in case one of them fails.
"""

from __future__ import annotations

import json
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mycel.errors import CommunicationError, UsageError
from mycel.topology.model import Topology

__all__ = ["RecordSink", "run_ranks"]

#: Receives ``(rank, record)`` as soon as the line is there; runs in a reader thread.
RecordSink = Callable[[int, dict[str, Any]], None]

_KEPT_LINES = 12


class _Output:
    """Splits what the ranks print into records and the last few other lines of each rank."""

    def __init__(self, sink: RecordSink) -> None:
        self._sink = sink
        self._tails: dict[int, deque[str]] = {}

    def line(self, rank: int, text: str) -> None:
        """Takes one line of one rank; an error of the sink ends the run, and the launcher raises it."""
        record = _record(text)
        if record is None:
            self._tails.setdefault(rank, deque(maxlen=_KEPT_LINES)).append(text.rstrip())
        else:
            self._sink(rank, record)

    def explain(self, what: str) -> str:
        """One line with what the ranks said last."""
        said = [f"rank {rank}: {lines[-1]}" for rank, lines in sorted(self._tails.items()) if lines]
        return f"{what}; " + ("last output: " + " | ".join(said[:3]) if said else "the ranks printed nothing")


def run_ranks(
    where: Topology | int,
    command: Sequence[str],
    *,
    sink: RecordSink,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    warm: Callable[[], None] | None = None,
) -> None:
    """Run ``command`` once a rank.

    Args:
        where: a topology to emulate, or a number of ranks on 127.0.0.1, without shaped links; those are ended as
            soon as one of them fails.
        command: program and arguments, the same for every rank.
        sink: receives the records.
        timeout_s: for the whole run.
        env: added to the environment of the ranks.
        warm: called once before the ranks start, to compile what they would all compile at once.

    Raises:
        EmulationError: this machine cannot emulate a cluster.
        UsageError: fewer than two ranks.
        CommunicationError: a rank failed, or the time is over; the message says what the ranks printed last.
        KeyboardInterrupt: the run was interrupted; the launcher has passed the signal on to the ranks.
    """
    from mycel.emulate.launch import GRACE_S, launch
    from mycel.emulate.processes import TIMEOUT_EXIT_CODE

    of_what, grace_s = "on loopback", 0.0
    if not isinstance(where, int):
        of_what, grace_s = f"of {where.name}", GRACE_S
    elif where < 2:
        raise UsageError(f"{where} rank(s) on loopback; a collective needs at least 2")
    output = _Output(sink)
    status = launch(
        where,
        list(command),
        env=env,
        output=output.line,
        timeout_s=timeout_s,
        grace_s=grace_s,
        prefix=False,
        warm=warm,
        interrupts=True,
    )
    if status == 128 + signal.SIGINT:  # sent to the ranks, not to us
        raise KeyboardInterrupt
    if status:
        over = status == TIMEOUT_EXIT_CODE
        what = "time is over" if over else f"a rank {of_what} failed with exit code {status}"
        raise CommunicationError(output.explain(what))


def _record(text: str) -> dict[str, Any] | None:
    if not text.startswith("{"):
        return None
    try:
        record = json.loads(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
