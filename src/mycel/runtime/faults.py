"""Who is to blame when a collective fails: evidence from the sockets and from what the other ranks say.

A survivor's own evidence misleads: when rank 3 dies, its neighbours fail, close their sockets, and *their*
neighbours see an innocent rank hang up. So nobody blames at once. A rank that runs into trouble talks over the
control connections first; the first rank that knows the cause tells everybody, and all raise the same error.

Rules:

- A closed data channel is blamed on its peer, unless within a grace period somebody announces another cause.
- A closed control connection alone is no failure: a rank that has finished may leave while its last bytes are still
  on the way. If it is missed, the data channels say so. The same holds for a process that has ended while a child of
  its keeps its connections open: it is missed when what it has sent is used up and nothing more comes.
- On a deadline, or where calls differ, every rank says where it stands, and a moment later on which channels nothing
  arrives (``evidence``). Ranks pass on what they hear, so that a broken link between two does not keep them from
  hearing each other by way of a third. Who has heard all ranks decides (``verdict``); the others decide when the
  time is over.
- The first cause is published; the group is then poisoned, and later calls raise it at once.
- Where failed links may be avoided (``reroutes``), and every rank has been heard, the verdict is raised as
  ``LinksFailed`` and the group lives on in a new epoch. Where there is no other way, the ranks go on waiting for the
  links, until the deadline. All ranks come to the same verdict, since each rank says only one thing an inquiry
  (``inquiry``) and the verdict is a function of what all of them have said.

A thread of the process's listens too (``watch``), during calls and between them; what it hears is filed here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from mycel.collectives.program import Channel
from mycel.errors import CommunicationError
from mycel.runtime import job_fields as j
from mycel.runtime.control import NO_WAY, Control
from mycel.runtime.evidence import Hop, collect, has_stalled, probe
from mycel.runtime.headers import describe_header
from mycel.runtime.hearing import Hearing
from mycel.runtime.openings import Openings
from mycel.runtime.prepared import Job
from mycel.runtime.verdict import MOST_HEADERS, State, disagreement, is_common, is_whole_without, judge_states
from mycel.topology.model import Topology

__all__ = ["Alarm", "Attempt", "Faults", "LinksFailed"]

_LONGEST_GRACE_S = 2.0
#: Calls before the present one that a rank remembers: as many small ones as go into a ring before anybody takes them.
_RECENT = 4096
#: Between a probe and the look at what came of it: the kernel sends again after 0.2 s at the earliest.
_SETTLING_S = 0.6
#: How often a run that may be rerouted is looked at.
_LOOK_S = 0.5
#: How often a run is looked at that waits for a rank whose process has ended, and for how long nothing may come.
_ENDED_LOOK_S, _ENDED_S = 0.1, 1.0


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


class Awaiting(Protocol):
    """What opens connections (``Rendezvous``)."""

    @property
    def awaited(self) -> int:
        """The rank whose end is missing."""

    @property
    def unanswered(self) -> Channel | None:
        """The channel whose opening finds no answer."""


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
        self.hearing = Hearing(rank, size, control)
        self._openings = Openings(self.hearing, dtype_names)
        self.topology = topology
        self.reroutes = reroutes
        self._dtype_names = dtype_names
        self._channels = channels
        #: Headers of the last calls.
        self.recent: deque[tuple[int, int, int]] = deque(maxlen=_RECENT)
        self._progress: tuple[tuple[int, ...], float] = ((), 0.0)
        self._probed = -1  # number of the collective in which channels were probed last

    @property
    def cause(self) -> CommunicationError | None:
        """Why the group has failed; ``None`` while it has not."""
        return self.hearing.cause

    @property
    def epoch(self) -> int:
        """How often links have failed and the group has gone on without them."""
        return self.hearing.inquiry[0]

    def poison(self, kind: str, message: str, *, ranks: Iterable[int] = ()) -> CommunicationError:
        """Set the cause, unless there is one already, and tell the others; see ``Hearing.poison``."""
        return self.hearing.poison(kind, message, ranks=ranks)

    def again(self) -> CommunicationError:
        """The error for a call on a group that has failed before."""
        cause = self.hearing.settled() or CommunicationError("the process group has failed")
        return type(cause)(f"the process group failed earlier: {cause}")

    def next_epoch(self, topology: Topology) -> None:
        """Go on with a new fabric, and forget what was said about the old one."""
        self.topology = topology
        self._probed = -1
        self.recent.clear()  # the same calls may now run over other schedules
        self.hearing.next_epoch()

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
        if status == j.CONTROL and self.hearing.attend():
            self._conclude_run(job, attempt)
        elif status == j.CONTROL and (mismatch := self._other_call(attempt)):
            self._conclude_run(job, attempt, mismatch=mismatch)
        elif status == j.CLOSED:
            self._on_closed(job, attempt)
        elif status == j.MISMATCHED:
            self._conclude_run(job, attempt, mismatch=self._mismatch(job))
        elif status == j.TIMED_OUT:
            self._on_timeout(job, attempt)
        if self.cause is None and self.control.ended:
            self._miss_ended(job, attempt)
        if (cause := self.hearing.settled()) is not None:
            raise cause

    def first_look_ns(self, attempt: Attempt) -> int:
        """When the engine is to stop a run for the first time, as CLOCK_MONOTONIC nanoseconds."""
        if not self.reroutes:
            return int(attempt.deadline * 1e9)
        return int(min(attempt.deadline, time.monotonic() + _LOOK_S) * 1e9)

    def grace_s(self, timeout_s: float) -> float:
        """The part of a time-out that is kept for finding out who is to blame."""
        return min(_LONGEST_GRACE_S, 0.2 * timeout_s)

    # -- while channels are being opened ----------------------------------------------------------------------

    def observe_connecting(self, attempt: Attempt, rendezvous: Awaiting) -> None:
        """To be called now and then by whoever waits for a connection.

        Args:
            attempt: for which collective.
            rendezvous: what waits.

        Raises:
            CommunicationError: the group has failed.
            LinksFailed: see there.
            Alarm: a rank asks where everybody stands; answer with ``not_connected``.
        """
        alarm = self.hearing.attend()
        if (cause := self.hearing.settled()) is not None:
            raise cause
        awaited = rendezvous.awaited
        if not alarm and (mismatch := self._other_call(attempt)):
            self._conclude(attempt, (awaited,), mismatch=mismatch)
        elif not alarm and self._openings.is_missed(awaited):
            self._on_lost(awaited, attempt, (awaited,))
        elif not attempt.is_committing:
            self._openings.tell(awaited, attempt.header)
        if alarm and not self.reroutes:
            raise Alarm
        if alarm:
            self._conclude(attempt, (rendezvous.awaited,), unanswered=rendezvous.unanswered)
        if (cause := self.hearing.settled()) is not None:
            raise cause

    def _other_call(self, attempt: Attempt) -> str:
        """How another rank's call in place of this one differs; the round after a collective is in no one's place."""
        return "" if self.cause is not None or attempt.is_committing else self._openings.other_call(attempt.header)

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
            self._conclude(attempt, (peer,), unanswered=unanswered, may_wait=False)
        return self.hearing.settled() or self.poison("failed", f"{attempt.what}: no connection to rank {peer}")

    # -- the cases ----------------------------------------------------------------------------------------

    def _on_closed(self, job: Job, attempt: Attempt) -> None:
        channel = job.prepared.plan.channels[int(job.fields[j.J_FAILED_CHANNEL])]
        peer = channel.dst if channel.src == self.rank else channel.src
        if int(job.fields[j.J_ERRNO]) in NO_WAY:
            self._conclude(attempt, job.waiting_for(), may_wait=False)
        else:
            self._on_lost(peer, attempt, job.waiting_for())

    def _on_lost(self, peer: int, attempt: Attempt, waits_for: Iterable[int]) -> None:
        """A peer's socket ended. It is the cause unless somebody, the peer included, names another in time."""
        until = time.monotonic() + self.grace_s(attempt.timeout_s)
        alarm = False
        control = self.control
        while self.cause is None and not alarm and peer not in control.gone and time.monotonic() < until:
            alarm = self.hearing.attend(patience_s=0.05)
        if self.cause is None and not alarm:
            # What the peer said before it went, and what others say of it, is already in the buffers.
            alarm = self.hearing.attend(patience_s=0.05)
        if alarm and self.cause is None and peer not in control.gone:
            self._conclude(attempt, waits_for, may_wait=False)
        self._lose(peer, attempt)

    def _lose(self, peer: int, attempt: Attempt) -> None:
        how = "left (it had finished, or destroyed its group)" if peer in self.control.left else "was lost"
        self.poison(
            "lost",
            f"rank {peer} {how} during {attempt.what}: its connections closed (process died or was killed?)",
            ranks=(peer,),
        )

    def _miss_ended(self, job: Job, attempt: Attempt) -> None:
        """Wait for a rank whose process has ended only as long as something comes that it has sent before."""
        awaited = sorted(set(job.waiting_for()) & self.control.ended)
        if not awaited:
            return
        now = time.monotonic()
        rows = job.prepared.channel_rows
        progress = (
            attempt.header[0],
            int(job.fields[j.J_REMAINING]),
            int(rows[:, j.C_HEAD].sum()),
            int(rows[:, j.C_DONE].sum()),
        )
        if progress != self._progress[0]:
            self._progress = (progress, now)
        elif now - self._progress[1] >= _ENDED_S:
            self._lose(awaited[0], attempt)
        job.fields[j.J_DEADLINE_NS] = int(min(attempt.deadline, now + _ENDED_LOOK_S) * 1e9)

    def _mismatch(self, job: Job) -> str:
        """What came on a channel instead of this rank's call, in words."""
        number = int(job.fields[j.J_FAILED_CHANNEL])
        got = job.prepared.channel_rows[number, j.C_HEADER : j.C_HEADER + 4]
        own = [*job.fields[j.J_HEADER : j.J_HEADER + 3], job.prepared.channel_rows[number, j.C_STATED]]
        peer = job.prepared.plan.channels[number].src
        theirs = describe_header(int(got[1]), int(got[2]), int(got[3]), self._dtype_names)
        ours = describe_header(int(own[1]), int(own[2]), int(own[3]), self._dtype_names)
        if int(got[0]) != j.HEADER_MAGIC:
            theirs = "something that is no collective (corrupted stream?)"
        elif theirs == ours:
            theirs += " (with another schedule: do all ranks see the same topology and MYCEL_* settings?)"
        return f"rank {peer} called {theirs}, rank {self.rank} called {ours}"

    def _on_timeout(self, job: Job, attempt: Attempt) -> None:
        stalled = self.reroutes and has_stalled(self._channels(), self.rank)
        if stalled or time.monotonic() >= attempt.deadline or self.hearing.attend():
            self._conclude_run(job, attempt)
        else:
            job.fields[j.J_DEADLINE_NS] = self.first_look_ns(attempt)

    def _conclude_run(self, job: Job, attempt: Attempt, *, mismatch: str = "") -> None:
        self._conclude(attempt, job.waiting_for(), mismatch=mismatch)
        job.fields[j.J_DEADLINE_NS] = self.first_look_ns(attempt)

    def _conclude(
        self,
        attempt: Attempt,
        waits_for: Iterable[int],
        *,
        mismatch: str = "",
        unanswered: Channel | None = None,
        may_wait: bool = True,
    ) -> None:
        """Say where this rank stands, hear the others, and decide: go on waiting, or set the cause, or raise."""
        began = time.monotonic()
        said = State(
            what=attempt.what,
            waits_for=tuple(waits_for),
            header=attempt.header,
            is_committing=attempt.is_committing,
            limit_s=attempt.timeout_s if began >= attempt.deadline else 0.0,
            mismatch=mismatch,
            recent=self._recent(),
            may_wait=may_wait,
        )
        self.hearing.say(said)
        # Of two bytes out of band, the first becomes one of the data unless all before it has been read: so there is
        # one in each collective, for all ranks come through that before the next.
        is_probed = attempt.header[0] != self._probed
        if is_probed:
            self._probed = attempt.header[0]
            probe(self._channels(), self.rank)
        grace = self.grace_s(attempt.timeout_s)
        settled = began + min(_SETTLING_S, 0.4 * grace)
        patient = settled + 0.2 * grace  # for ranks that have forgotten the call that the hindmost is in
        until = began + 0.8 * grace
        if self.reroutes:
            until = max(until, attempt.deadline)
        while self.cause is None:
            self.hearing.attend(patience_s=0.02)
            states, evidence = self.hearing.said()
            now = time.monotonic()
            if not is_common(states):  # a rank is behind all that this one has told of, or another is to say more
                more = replace(said, recent=self._recent())
                if more.since < said.since:
                    said = more
                    self.hearing.say(said)
                    continue
            has_all = len(states) == self.size and (is_common(states) or now >= patient)
            if has_all and disagreement(states, self._dtype_names):
                break
            if now >= settled and self.rank not in evidence:
                heard = frozenset(states)
                waited_s = now - began
                found = collect(self._channels(), self.rank, heard, waited_s, unanswered, is_probed=is_probed)
                self.hearing.say_found(found)
                continue
            if now >= settled and has_all and (len(evidence) == self.size or mismatch):
                break  # a mismatch is told with all who are in it, or ranks that hear more would tell it otherwise
            if now >= until:
                break
        if not self.reroutes:
            self._let_others_decide(began + 0.95 * grace)
        if self.cause is None:
            self._decide()

    def _recent(self) -> tuple[tuple[int, int, int], ...]:
        """Headers of this rank's calls since the one that the hindmost of the ranks heard so far is in."""
        states, _ = self.hearing.said()
        if not states:
            return tuple(self.recent)[-MOST_HEADERS:]
        hindmost = min(state.header[0] for state in states.values())
        return tuple(header for header in self.recent if header[0] >= hindmost)[:MOST_HEADERS]

    def _let_others_decide(self, until: float) -> None:
        """A rank that hears the others and is not heard by them is what they will complain of: wait for that."""
        _, evidence = self.hearing.said()
        others = [one for rank, one in evidence.items() if rank != self.rank]
        deaf = sum(self.rank not in one.heard for one in others)
        while self.cause is None and deaf * 2 > len(others) and time.monotonic() < until:
            self.hearing.attend(patience_s=0.02)

    def _decide(self) -> None:
        states, evidence = self.hearing.said()
        verdict = judge_states(states, evidence, self.topology, self._dtype_names, self.hearing.planning)
        if self.reroutes and verdict.kind == "timeout" and len(evidence) == len(states) == self.size:
            if verdict.links and is_whole_without(self.topology, verdict.links):
                # A rank leaves the round after a collective when every rank has reached it: the ranks are in the
                # same collective, or the last ones are in the round after it.
                resume = min(state.header[0] + state.is_committing for state in states.values())
                raise LinksFailed(verdict.links, verdict.message, resume)
            if all(state.may_wait and not state.limit_s for state in states.values()):
                self.hearing.inquire_again()  # every rank comes to this: there is no other way, and there is time
                return
        self.poison(verdict.kind, verdict.message)
