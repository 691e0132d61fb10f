"""Who is to blame when a collective fails: evidence from the sockets and from what the other ranks say.

A survivor's own evidence misleads: when rank 3 dies, its neighbours fail, close their sockets, and *their*
neighbours see an innocent rank hang up. So nobody blames at once. A rank that runs into trouble talks over the
control connections first; the first rank that knows the cause tells everybody, and all raise the same error.

Rules:

- A closed data channel is blamed on its peer, unless within a grace period somebody announces another cause.
- A closed control connection alone is no failure: a rank that has finished may leave while its last bytes are still
  on the way. If it is missed, the data channels say so.
- On a deadline, or where calls differ, every rank says where it stands, and a moment later on which channels nothing
  arrives (``evidence``). Ranks pass on what they hear, so that a broken link between two does not keep them from
  hearing each other by way of a third. Who has heard all ranks decides (``verdict``); the others decide when the
  time is over.
- The first cause is published; the group is then poisoned, and later calls raise it at once.
- Where failed links may be avoided (``reroutes``), and every rank has been heard, the verdict is raised as
  ``LinksFailed`` and the group lives on in a new epoch. All ranks come to the same verdict, since each rank says only
  one thing an epoch and the verdict is a function of what all of them have said.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mycel.collectives.program import Channel
from mycel.errors import CollectiveTimeoutError, CommunicationError, MismatchError, PeerLostError
from mycel.runtime import engine as e
from mycel.runtime.control import Control
from mycel.runtime.evidence import Evidence, Hop, collect, has_stalled, probe
from mycel.runtime.headers import describe_header
from mycel.runtime.prepared import Job
from mycel.runtime.verdict import State, disagreement, judge_states
from mycel.topology.model import Topology

__all__ = ["Alarm", "Attempt", "Faults", "LinksFailed"]

_ERRORS: dict[str, type[CommunicationError]] = {
    "lost": PeerLostError,
    "timeout": CollectiveTimeoutError,
    "mismatch": MismatchError,
    "failed": CommunicationError,
}
_LONGEST_GRACE_S = 2.0
#: Calls before the present one that a rank remembers.
_RECENT = 128
#: Between a probe and the look at what came of it: the kernel sends again after 0.2 s at the earliest.
_SETTLING_S = 0.6
#: How often a run that may be rerouted is looked at.
_LOOK_S = 0.5
#: What a connection that is given up by the kernel fails with where the way is broken, not the peer.
_NO_WAY = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One run of a collective, as far as blame is concerned.

    Attributes:
        what: the collective in words, for messages.
        timeout_s: its whole time-out; a part of it is kept for asking around.
        deadline: when that part begins (``time.monotonic``).
        header: sequence number, kind and bytes.
        is_committing: this is the round after the collective (see ``State``).
    """

    what: str
    timeout_s: float
    deadline: float
    header: tuple[int, int, int]
    is_committing: bool = False


class Alarm(Exception):  # noqa: N818 (no failure of this rank's own)
    """Another rank has asked where everybody stands."""


class LinksFailed(Exception):  # noqa: N818 (the group lives on)
    """Links have failed, every rank knows, and the group may go on without them.

    Attributes:
        links: which; the message says it in words.
        resume: sequence number of the first collective that not every rank has come through.
    """

    def __init__(self, links: frozenset[Hop], message: str, resume: int) -> None:
        super().__init__(message)
        self.links, self.resume = links, resume


class Faults:
    """Judges what a run ran into; one a communicator.

    Args:
        rank, size: in the group.
        control: the group's control connections.
        dtype_names: from a dtype's code to its name, for messages.
        topology: the fabric.
        channels: the open channels with their descriptors.
        reroutes: whether to raise ``LinksFailed`` rather than an error.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        control: Control,
        dtype_names: Callable[[int], str],
        topology: Topology,
        channels: Callable[[], Mapping[Channel, int]],
        reroutes: bool = False,
    ) -> None:
        self.rank, self.size = rank, size
        self.control = control
        self.topology = topology
        self.reroutes = reroutes
        #: How often links have failed and the group has gone on without them.
        self.epoch = 0
        self._dtype_names = dtype_names
        self._channels = channels
        self._cause: CommunicationError | None = None
        #: Headers of the last calls.
        self.recent: deque[tuple[int, int, int]] = deque(maxlen=_RECENT)
        self._states: dict[tuple[int, int], State] = {}
        self._evidence: dict[tuple[int, int], Evidence] = {}
        steps = {1 << i for i in range(max(1, (size - 1).bit_length()))}
        self._near = sorted({(rank + s) % size for s in steps} | {(rank - s) % size for s in steps} - {rank})

    @property
    def cause(self) -> CommunicationError | None:
        """Why the group has failed; ``None`` while it has not."""
        return self._cause

    def poison(self, kind: str, message: str) -> CommunicationError:
        """Set the cause, unless there is one already, and tell the others."""
        if self._cause is None:
            self._cause = _ERRORS[kind](message)
            self._notify({"type": "abort", "kind": kind, "message": message, "by": self.rank})
        return self._cause

    def again(self) -> CommunicationError:
        """The error for a call on a group that has failed before."""
        cause = self._cause or CommunicationError("the process group has failed")
        return type(cause)(f"the process group failed earlier: {cause}")

    def next_epoch(self, topology: Topology) -> None:
        """Go on with a new fabric, and forget what was said about the old one."""
        self.topology = topology
        self.epoch += 1
        self.recent.clear()  # the same calls may now run over other schedules
        for book in (self._states, self._evidence):
            for key in [key for key in book if key[0] < self.epoch]:
                del book[key]

    def judge(self, status: int, job: Job, attempt: Attempt) -> None:
        """Decide what a run's status means: return to let it go on, or raise.

        Args:
            status: what ``engine.execute`` returned.
            job: the run.
            attempt: what it is a run of.

        Raises:
            CommunicationError: the group has failed; the cause is the same on every surviving rank.
            LinksFailed: see there.
        """
        if status == e.CONTROL and self._observe():
            self._conclude(attempt, job.waiting_for())
        elif status == e.CLOSED:
            self._on_closed(job, attempt)
        elif status == e.MISMATCHED:
            self._conclude(attempt, job.waiting_for(), mismatch=self._mismatch(job))
        elif status == e.TIMED_OUT:
            self._on_timeout(job, attempt)
        if self._cause is not None:
            raise self._cause

    def first_look_ns(self, attempt: Attempt) -> int:
        """When the engine is to stop a run for the first time, as CLOCK_MONOTONIC nanoseconds."""
        if not self.reroutes:
            return int(attempt.deadline * 1e9)
        return int(min(attempt.deadline, time.monotonic() + _LOOK_S) * 1e9)

    def grace_s(self, timeout_s: float) -> float:
        """The part of a time-out that is kept for finding out who is to blame."""
        return min(_LONGEST_GRACE_S, 0.2 * timeout_s)

    # -- while channels are being opened ----------------------------------------------------------------------

    def observe_connecting(self) -> None:
        """To be called now and then by whoever waits for a connection.

        Raises:
            CommunicationError: the group has failed.
            Alarm: a rank asks where everybody stands; answer with ``not_connected``.
        """
        alarm = self._observe()
        if self._cause is not None:
            raise self._cause
        if alarm:
            raise Alarm

    def not_connected(
        self, attempt: Attempt, peer: int, unanswered: Channel | None, *, lost: bool
    ) -> CommunicationError:
        """The cause where a channel could not be opened.

        Args:
            attempt: for which collective.
            peer: whose end is missing.
            unanswered: the channel that could not be opened for want of any answer, if that is the case.
            lost: it refused; else it said nothing.

        Raises:
            LinksFailed: see there.
        """
        if lost:
            self._on_lost(peer, attempt, (peer,))
        else:
            self._conclude(attempt, (peer,), unanswered=unanswered)
        return self._cause or self.poison("failed", f"{attempt.what}: no connection to rank {peer}")

    # -- listening --------------------------------------------------------------------------------------------

    def _notify(self, record: dict[str, Any]) -> None:
        self.control.tell(range(self.size), record)

    def _pass_on(self, record: dict[str, Any], peer: int) -> None:
        self.control.tell([near for near in self._near if near not in (peer, record["by"])], record)

    def _observe(self, patience_s: float = 0.0) -> bool:
        """Read control records: adopt an abort, file what ranks say. Whether anybody asks where this rank stands."""
        for event in self.control.listen(patience_s):
            record = event.record
            if record is None or record["type"] == "bye":
                continue
            if record["type"] == "abort":
                if self._cause is None:
                    self._cause = _ERRORS[record["kind"]](record["message"])
                    self._pass_on(record, event.peer)
                continue
            key = (int(record["epoch"]), int(record["by"]))
            if key[0] < self.epoch or key[1] == self.rank:
                continue
            if record["type"] == "state" and key not in self._states:
                self._states[key] = State.from_record(record)
                self._pass_on(record, event.peer)
            elif record["type"] == "evidence" and key not in self._evidence:
                self._evidence[key] = Evidence.from_record(record)
                self._pass_on(record, event.peer)
        return any(epoch == self.epoch for epoch, _ in self._states)

    def _said(self) -> tuple[dict[int, State], dict[int, Evidence]]:
        """What has been said in this epoch, by rank."""
        states = {rank: state for (epoch, rank), state in self._states.items() if epoch == self.epoch}
        evidence = {rank: one for (epoch, rank), one in self._evidence.items() if epoch == self.epoch}
        return states, evidence

    # -- the cases ----------------------------------------------------------------------------------------

    def _on_closed(self, job: Job, attempt: Attempt) -> None:
        channel = job.prepared.program.channels[int(job.fields[e.J_FAILED_CHANNEL])]
        peer = channel.dst if channel.src == self.rank else channel.src
        if int(job.fields[e.J_ERRNO]) in _NO_WAY:
            self._conclude(attempt, job.waiting_for())
        else:
            self._on_lost(peer, attempt, job.waiting_for())

    def _on_lost(self, peer: int, attempt: Attempt, waits_for: Iterable[int]) -> None:
        """A peer's socket ended. It is the cause unless somebody, the peer included, names another in time."""
        until = time.monotonic() + self.grace_s(attempt.timeout_s)
        alarm = False
        while self._cause is None and not alarm and peer not in self.control.gone and time.monotonic() < until:
            alarm = self._observe(patience_s=0.05)
        if self._cause is None and not alarm:
            # What the peer said before it went, and what others say of it, is already in the buffers.
            alarm = self._observe(patience_s=0.05)
        if alarm and self._cause is None and peer not in self.control.gone:
            self._conclude(attempt, waits_for)
        how = "left (it had finished, or destroyed its group)" if peer in self.control.left else "was lost"
        if self._cause is None:
            self.poison(
                "lost",
                f"rank {peer} {how} during {attempt.what}: its connections closed (process died or was killed?)",
            )

    def _mismatch(self, job: Job) -> str:
        """What came on a channel instead of this rank's call, in words."""
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
        return f"rank {peer} called {theirs}, rank {self.rank} called {ours}"

    def _on_timeout(self, job: Job, attempt: Attempt) -> None:
        stalled = self.reroutes and has_stalled(self._channels(), self.rank)
        if stalled or time.monotonic() >= attempt.deadline or self._observe():
            self._conclude(attempt, job.waiting_for())
        else:
            job.fields[e.J_DEADLINE_NS] = self.first_look_ns(attempt)

    def _conclude(
        self,
        attempt: Attempt,
        waits_for: Iterable[int],
        *,
        mismatch: str = "",
        unanswered: Channel | None = None,
    ) -> None:
        """Say where this rank stands, hear the others, and decide."""
        began = time.monotonic()
        own = State(
            what=attempt.what,
            waits_for=tuple(waits_for),
            header=attempt.header,
            is_committing=attempt.is_committing,
            limit_s=attempt.timeout_s if began >= attempt.deadline else 0.0,
            mismatch=mismatch,
            recent=tuple(self.recent),
        )
        self._states[self.epoch, self.rank] = own
        self._notify({"type": "state", "by": self.rank, "epoch": self.epoch, **own.to_record()})
        probe(self._channels(), self.rank)
        grace = self.grace_s(attempt.timeout_s)
        settled = began + min(_SETTLING_S, 0.4 * grace)
        until = began + 0.8 * grace
        if self.reroutes:
            until = max(until, attempt.deadline)
        while self._cause is None:
            self._observe(patience_s=0.02)
            states, evidence = self._said()
            now = time.monotonic()
            if len(states) == self.size and disagreement(states, self._dtype_names):
                break
            if now >= settled and self.rank not in evidence:
                found = collect(self._channels(), self.rank, frozenset(states), now - began, unanswered)
                self._evidence[self.epoch, self.rank] = found
                self._notify({"type": "evidence", "by": self.rank, "epoch": self.epoch, **found.to_record()})
                continue
            if now >= settled and (len(evidence) == self.size or mismatch):
                break
            if now >= until:
                break
        if not self.reroutes:
            self._let_others_decide(began + 0.95 * grace)
        if self._cause is None:
            self._decide()

    def _let_others_decide(self, until: float) -> None:
        """A rank that hears the others and is not heard by them is what they will complain of: wait for that."""
        _, evidence = self._said()
        others = [one for rank, one in evidence.items() if rank != self.rank]
        deaf = sum(self.rank not in one.heard for one in others)
        while self._cause is None and deaf * 2 > len(others) and time.monotonic() < until:
            self._observe(patience_s=0.02)

    def _decide(self) -> None:
        states, evidence = self._said()
        verdict = judge_states(states, evidence, self.topology, self._dtype_names)
        if self.reroutes and verdict.links and len(evidence) == self.size:
            # A rank leaves the round after a collective when every rank has reached it: the ranks are in the same
            # collective, or the last ones are in the round after it.
            resume = min(state.header[0] + state.is_committing for state in states.values())
            raise LinksFailed(verdict.links, verdict.message, resume)
        self.poison(verdict.kind, verdict.message)
