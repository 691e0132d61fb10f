"""What a rank has heard from the others of its group: why it has failed, where they stand, who they are.

The run under way hears (``faults``), and so does a thread of the process's (``watch``), during calls and between
them. What either hears is filed here. Ranks pass on what they hear, once, so that a broken link between two does not
keep them from hearing each other by way of a third; in groups of many ranks ``control`` does that for all words.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

from mycel.errors import CollectiveTimeoutError, CommunicationError, MismatchError, PeerLostError
from mycel.runtime.control import Control
from mycel.runtime.evidence import Evidence
from mycel.runtime.inquiry import Inquiry
from mycel.runtime.messages import (
    Abort,
    Calling,
    Finding,
    Heard,
    Identity,
    Message,
    Planning,
    Position,
    Question,
    shortened,
)
from mycel.runtime.processes import own_identity
from mycel.runtime.underway import planned
from mycel.runtime.verdict import State

__all__ = ["Ears", "Hearing"]

_ERRORS: dict[str, type[CommunicationError]] = {
    "lost": PeerLostError,
    "timeout": CollectiveTimeoutError,
    "mismatch": MismatchError,
    "failed": CommunicationError,
}
#: Ranks in different calls may miss the same rank at the same moment: for so long the words of the lowest count.
_SETTLING_S = 0.1
#: Questions and answers that have been passed on and are known if they come again.
_KNOWN = 4096


class Ears(Protocol):
    """What knows which machines this process hears (``watch``)."""

    def asked(self, machine: str) -> bool:
        """Somebody asks who hears a machine; whether this process is to answer."""

    def heard(self, machine: str) -> None:
        """Somebody else hears a machine."""


class Hearing:
    """One a communicator. Threads may share it.

    Args:
        rank, size: in the group.
        control: the group's control connections.

    Attributes:
        ears: told of questions about silent machines, and of answers.
        lost: ranks that the cause names as lost; those that nobody has missed yet are ``control.dead``.
        num_introduced: how often ranks have said which process they are.
    """

    def __init__(self, rank: int, size: int, control: Control) -> None:
        self.rank, self.size, self.control = rank, size, control
        self.ears: Ears | None = None
        self.lost: frozenset[int] = frozenset()
        self.num_introduced = 0
        self._lock = threading.RLock()
        self._cause: CommunicationError | None = None
        self._named_by, self._settled = rank, 0.0
        self._identities: dict[int, Identity] = {}
        self._inquiry = Inquiry(rank)
        self._known: OrderedDict[tuple[str, int, int], None] = OrderedDict()
        self._asked = 0
        self._calls: dict[int, tuple[int, int, int]] = {}
        self._has_news = False
        steps = {1 << i for i in range(max(1, (size - 1).bit_length()))}
        self._near = sorted({(rank + s) % size for s in steps} | {(rank - s) % size for s in steps} - {rank})
        identity = own_identity()
        if identity is not None:
            control.tell_neighbours(identity)

    @property
    def cause(self) -> CommunicationError | None:
        """Why the group has failed; ``None`` while it has not."""
        return self._cause

    @property
    def identities(self) -> dict[int, Identity]:
        """The process of each rank that has said which it is."""
        with self._lock:
            return dict(self._identities)

    def poison(self, kind: str, message: str, *, ranks: Iterable[int] = ()) -> CommunicationError:
        """Set the cause, unless there is one already, and tell the others.

        Args:
            kind: one of ``messages.KINDS``.
            message: for people.
            ranks: that are lost.
        """
        with self._lock:
            if self._cause is None:
                ranks, message = tuple(ranks), shortened(message)
                self._fail(kind, message, ranks, self.rank)
                self._notify(Abort(by=self.rank, kind=kind, cause=message, ranks=ranks))
            return self._cause or CommunicationError(message)

    def settled(self) -> CommunicationError | None:
        """The cause; one that names lost ranks not before others who have found the same at the same time were heard.

        Waits for a tenth of a second at most, once.
        """
        while self._cause is not None and (left := self._settled - time.monotonic()) > 0:
            self.attend(patience_s=left)
        return self._cause

    def _fail(self, kind: str, message: str, ranks: Iterable[int], by: int) -> None:
        """Set the cause, and have the engine look up."""
        if self._cause is None and kind == "lost":
            self._settled = time.monotonic() + _SETTLING_S
        self.lost, self._named_by = frozenset(ranks), by
        self._cause = _ERRORS[kind](message)
        self.control.alert()

    # -- inquiries ------------------------------------------------------------------------------------------

    @property
    def inquiry(self) -> tuple[int, int]:
        """Number of the present one, of which the first part is the epoch."""
        return self._inquiry.number

    def say(self, state: State) -> None:
        """Say in the present inquiry where this rank stands."""
        with self._lock:
            own = Position(by=self.rank, inquiry=self.inquiry, state=state)
            self._inquiry.note(own)
            self._notify(own)

    def say_found(self, evidence: Evidence) -> None:
        """Say in the present inquiry what this rank has found on its channels."""
        with self._lock:
            pieces = Finding.of(self.rank, self.inquiry, evidence)
            self._inquiry.note_found(pieces)
            for piece in pieces:
                self._notify(piece)

    def said(self) -> tuple[dict[int, State], dict[int, Evidence]]:
        """What has been said in the present inquiry, by rank."""
        with self._lock:
            return self._inquiry.states, self._inquiry.evidence

    @property
    def planning(self) -> dict[int, str]:
        """What ranks are planning that have said so in the present inquiry, each by way of its watching thread."""
        with self._lock:
            return self._inquiry.planning

    def inquire_again(self) -> None:
        """Open the next inquiry, on the same fabric."""
        with self._lock:
            self._inquiry.again()

    def next_epoch(self) -> None:
        """Open the first inquiry on another fabric, and forget what was said about the old one."""
        with self._lock:
            self._inquiry.next_epoch()
            self._calls.clear()

    # -- calls ----------------------------------------------------------------------------------------------

    def say_call(self, peer: int, header: tuple[int, int, int]) -> None:
        """Tell a rank, whose end of a channel is missing, which call needs it."""
        self.control.tell((peer,), Calling(epoch=self.inquiry[0], header=header))

    @property
    def calls(self) -> dict[int, tuple[int, int, int]]:
        """Header of the call for which each rank has last said that it waits for this one."""
        with self._lock:
            return dict(self._calls)

    # -- listening ------------------------------------------------------------------------------------------

    def observe(self) -> None:
        """Take in what has been said, and have the run under way look up where it matters to that."""
        self.control.flush()
        with self._lock:
            self._take()
            if self._cause is None and self._inquiry.is_open:
                self._say_planning()
            if self._cause is not None or self._inquiry.is_open or self.control.ended or self._has_news:
                self.control.alert()

    def _say_planning(self) -> None:
        """Say for a thread that plans what it is at: it is asked, and hears nothing. Once an inquiry."""
        if self.rank in self._inquiry.states or self.rank in self._inquiry.planning or not (what := planned()):
            return
        self._inquiry.note_planning(self.rank, self.inquiry, what)
        self._notify(Planning(inquiry=self.inquiry, what=what))

    def attend(self, patience_s: float = 0.0) -> bool:
        """Take in what has been said, for the run under way; waits at most ``patience_s`` for the first word.

        Returns:
            Whether anybody has said, in the present inquiry, where it stands: this rank is to do so, too.
        """
        if patience_s > 0:
            self.control.wait(patience_s)
        with self._lock:
            self.control.calm()
            self._take()
            self._has_news = False
            return self._inquiry.is_open

    def ask_for(self, machine: str) -> None:
        """Ask the others who still hears a machine."""
        with self._lock:
            self._asked += 1
            self._notify(Question(by=self.rank, number=self._asked, machine=machine))

    def answer_for(self, machine: str) -> None:
        """Tell the others that this process hears a machine."""
        with self._lock:
            self._asked += 1
            self._notify(Heard(by=self.rank, number=self._asked, machine=machine))

    def _notify(self, message: Message) -> None:
        self.control.tell(range(self.size), message)

    def _pass_on(self, message: Abort | Position | Finding | Question | Heard, peer: int) -> None:
        if not self.control.relays:
            self.control.tell([near for near in self._near if near not in (peer, message.by)], message)

    def _take(self) -> None:
        for event in self.control.take():
            message, peer = event.message, event.peer
            if isinstance(message, Abort):
                if self._cause is None or self._is_the_same(message):
                    self._fail(message.kind, message.cause, message.ranks, message.by)
                    self._pass_on(message, peer)
            elif isinstance(message, Position | Finding):
                if self._inquiry.file(message):
                    self._pass_on(message, peer)
            elif isinstance(message, Identity):
                self._identities[peer] = message
                self.num_introduced += 1
            elif isinstance(message, Calling):
                if message.epoch == self.inquiry[0]:
                    self._calls[peer], self._has_news = message.header, True
            elif isinstance(message, Planning):
                self._inquiry.note_planning(peer, message.inquiry, message.what)
            elif isinstance(message, Question | Heard):
                self._hear(message, peer)

    def _is_the_same(self, message: Abort) -> bool:
        """Whether a rank lower than the one that has named the cause names the same ranks, and in time."""
        is_lost = message.kind == "lost" and isinstance(self._cause, PeerLostError) and bool(self.lost)
        is_lower = message.by < self._named_by and frozenset(message.ranks) == self.lost
        return is_lost and is_lower and time.monotonic() < self._settled

    def _hear(self, message: Question | Heard, peer: int) -> None:
        """A question about a silent machine, or an answer: known ones come again by way of others."""
        key = (message.TYPE, message.by, message.number)
        if self.ears is None or message.by == self.rank or key in self._known:
            return
        self._known[key] = None
        if len(self._known) > _KNOWN:
            self._known.popitem(last=False)
        self._pass_on(message, peer)
        if isinstance(message, Heard):
            self.ears.heard(message.machine)
        elif self.ears.asked(message.machine):
            self.answer_for(message.machine)
