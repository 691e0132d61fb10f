"""Who is to blame when a collective fails: evidence from the sockets and from what the other ranks say.

A survivor's own evidence misleads: when rank 3 dies, its neighbours fail, close their sockets, and *their*
neighbours see an innocent rank hang up. So nobody blames at once. A rank that runs into trouble listens to the
control connections first; the first rank that knows the cause tells everybody, and all raise the same error.

Rules:

- A closed data channel is blamed on its peer, unless within a grace period somebody announces another cause.
- A closed control connection alone is no failure: a rank that has finished may leave while its last bytes are still
  on the way. If it is missed, the data channels say so.
- On a deadline every rank says whom it waits for. The silent rank is one that is waited for and says nothing.
- The first cause is published; the group is then poisoned, and later calls raise it at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from mycel.errors import CollectiveTimeoutError, CommunicationError, MismatchError, PeerLostError
from mycel.runtime import engine as e
from mycel.runtime.control import Control
from mycel.runtime.prepared import Job
from mycel.runtime.reduce_kernels import ReduceOp

__all__ = ["ALL_TO_ALL_V", "Faults", "describe_header", "pack_kind"]

_ERRORS: dict[str, type[CommunicationError]] = {
    "lost": PeerLostError,
    "timeout": CollectiveTimeoutError,
    "mismatch": MismatchError,
    "failed": CommunicationError,
}
#: What messages call an all_to_all with split sizes, whose headers state what goes between two ranks.
ALL_TO_ALL_V = "all_to_all with split sizes"
_LONGEST_GRACE_S = 2.0
_NAMES = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "broadcast",
    "reduce",
    "barrier",
    "all_to_all",
    "gather",
    "scatter",
    ALL_TO_ALL_V,
)


#: Code of an average in headers, where other codes are those of ``reduce_kernels.ReduceOp``.
_AVERAGE = 15


def pack_kind(name: str, dtype: int, reduce_op: int | None, root: int | None, plan: int) -> int:
    """A collective's kind as one integer, for the header that precedes its messages; ``reduce_op`` ``None``: AVG."""
    reduce_op = _AVERAGE if reduce_op is None else reduce_op
    return _NAMES.index(name) | dtype << 8 | reduce_op << 16 | (0 if root is None else root + 1) << 24 | plan << 48


def describe_header(sequence: int, kind: int, num_bytes: int, dtype_names: Callable[[int], str]) -> str:
    """A header in words, such as ``all_reduce #5 of 4096 bytes of float32, op SUM``."""
    name = _NAMES[kind & 0xFF] if kind & 0xFF < len(_NAMES) else f"operation {kind & 0xFF}"
    code = (kind >> 16) & 0xFF
    op = "AVG" if code == _AVERAGE else ReduceOp(code).name if code < len(ReduceOp) else "?"
    root = (kind >> 24) & 0xFFFFFF
    between = " between the two" if name == ALL_TO_ALL_V else ""
    text = f"{name} #{sequence} of {num_bytes} bytes{between} of {dtype_names((kind >> 8) & 0xFF)}"
    if name in ("all_reduce", "reduce_scatter", "reduce"):
        text += f", op {op}"
    return text + (f", root {root - 1}" if root else "")


class Faults:
    """Judges what a run ran into; one a communicator.

    Args:
        rank, size: in the group.
        control: the group's control connections.
        dtype_names: from a dtype's code to its name, for messages.
    """

    def __init__(self, *, rank: int, size: int, control: Control, dtype_names: Callable[[int], str]) -> None:
        self.rank, self.size = rank, size
        self.control = control
        self._dtype_names = dtype_names
        self._cause: CommunicationError | None = None

    @property
    def cause(self) -> CommunicationError | None:
        """Why the group has failed; ``None`` while it has not."""
        return self._cause

    def poison(self, kind: str, message: str, *, tell: bool = True) -> CommunicationError:
        """Set the cause, unless there is one already, and tell the others."""
        if self._cause is None:
            self._cause = _ERRORS[kind](message)
            if tell:
                self.control.tell_all({"type": "abort", "kind": kind, "message": message, "by": self.rank})
        return self._cause

    def again(self) -> CommunicationError:
        """The error for a call on a group that has failed before."""
        cause = self._cause or CommunicationError("the process group has failed")
        return type(cause)(f"the process group failed earlier: {cause}")

    def judge(self, status: int, job: Job, what: str, timeout_s: float) -> None:
        """Decide what a run's status means: return to let it go on, or raise.

        Args:
            status: what ``engine.execute`` returned.
            job: the run.
            what: the collective in words, for messages.
            timeout_s: the collective's whole time-out; a part of it is kept for asking around.

        Raises:
            CommunicationError: the group has failed; the cause is the same on every surviving rank.
        """
        if status == e.INTERRUPTED:
            return
        if status == e.CONTROL:
            self._on_control(job, what, timeout_s)
        elif status == e.CLOSED:
            self._on_closed(job, what, timeout_s)
        elif status == e.MISMATCHED:
            self._on_mismatch(job)
        elif status == e.TIMED_OUT:
            self._on_timeout(job, what, timeout_s)
        if self._cause is not None:
            raise self._cause

    def grace_s(self, timeout_s: float) -> float:
        """The part of a time-out that is kept for finding out who is to blame."""
        return min(_LONGEST_GRACE_S, 0.2 * timeout_s)

    # -- the cases ----------------------------------------------------------------------------------------

    def _heed(self, reports: dict[int, dict[str, Any]] | None, patience_s: float = 0.0) -> bool:
        """Read control records: adopt an abort, file a time-out report. Whether somebody's deadline passed."""
        alarm = False
        for event in self.control.listen(patience_s):
            record = event.record
            if record is None:
                continue
            if record["type"] == "abort" and self._cause is None:
                self._cause = _ERRORS[record["kind"]](record["message"])
            elif record["type"] == "waiting":
                alarm = True
                if reports is not None:
                    reports[event.peer] = record
        return alarm

    def _on_control(self, job: Job, what: str, timeout_s: float) -> None:
        reports: dict[int, dict[str, Any]] = {}
        if self._heed(reports):
            self._conclude(job, what, timeout_s, reports)

    def _on_closed(self, job: Job, what: str, timeout_s: float) -> None:
        channel = job.prepared.program.channels[int(job.fields[e.J_FAILED_CHANNEL])]
        self._on_lost(channel.dst if channel.src == self.rank else channel.src, what, timeout_s)

    def _on_lost(self, peer: int, what: str, timeout_s: float) -> None:
        """A peer's socket ended. It is the cause unless somebody, the peer included, names another in time."""
        until = time.monotonic() + self.grace_s(timeout_s)
        while self._cause is None and peer not in self.control.gone and time.monotonic() < until:
            self._heed(None, patience_s=0.05)
        if self._cause is None:
            # What the peer said before it went, and what others say of it, is already in the buffers.
            self._heed(None, patience_s=0.05)
        how = "left (it had finished, or destroyed its group)" if peer in self.control.left else "was lost"
        if self._cause is None:
            self.poison(
                "lost", f"rank {peer} {how} during {what}: its connections closed (process died or was killed?)"
            )

    def _on_mismatch(self, job: Job) -> None:
        number = int(job.fields[e.J_FAILED_CHANNEL])
        got = job.prepared.channel_rows[number, e.C_HEADER : e.C_HEADER + 4]
        own = [*job.fields[e.J_HEADER : e.J_HEADER + 3], job.prepared.channel_rows[number, e.C_STATED]]
        peer = job.prepared.program.channels[number].src
        theirs = describe_header(int(got[1]), int(got[2]), int(got[3]), self._dtype_names)
        ours = describe_header(int(own[1]), int(own[2]), int(own[3]), self._dtype_names)
        if int(got[0]) != e.HEADER_MAGIC:
            theirs = "something that is no collective (corrupted stream?)"
        elif theirs == ours:
            theirs += " (with another schedule: do all ranks see the same topology and MYCEL_* settings?)"
        self.poison("mismatch", f"ranks do not agree: rank {peer} called {theirs}, rank {self.rank} called {ours}")

    def _on_timeout(self, job: Job, what: str, timeout_s: float) -> None:
        self._conclude(job, what, timeout_s, {})

    def _conclude(self, job: Job, what: str, timeout_s: float, reports: dict[int, dict[str, Any]]) -> None:
        """Somebody's deadline passed: say whom this rank waits for, hear the others, and name the silent rank."""
        own = {"type": "waiting", "for": list(job.waiting_for()), "what": what, "by": self.rank}
        self.control.tell_all(own)
        until = time.monotonic() + self.grace_s(timeout_s) * 0.75
        while self._cause is None and len(reports) < self.size - 1 and time.monotonic() < until:
            self._heed(reports, patience_s=0.05)
        if self._cause is not None:
            return
        reports[self.rank] = own
        awaited = {peer for report in reports.values() for peer in report["for"]}
        silent = sorted(awaited - set(reports))
        if silent:
            who = ", ".join(f"rank {peer}" for peer in silent)
            self.poison(
                "timeout",
                f"{what} reached its timeout of {timeout_s:g} s: {who} is silent (stopped, stuck, or never called it)"
                f"; waited for by {_waiters(reports, silent)}",
            )
            return
        states = "; ".join(
            f"rank {peer} in {report['what']} waits for {report['for'] or 'nobody'}"
            for peer, report in sorted(reports.items())
        )
        self.poison("timeout", f"{what} reached its timeout of {timeout_s:g} s with no rank silent: {states}")


def _waiters(reports: dict[int, dict[str, Any]], silent: list[int]) -> str:
    waiting = sorted(peer for peer, report in reports.items() if set(report["for"]) & set(silent))
    return ", ".join(f"rank {peer}" for peer in waiting)
