"""Who takes part from now on, agreed over a store that outlives ranks: an engine of membership for jobs without one.

Membership goes by rounds. Whoever has lost its group, or wants in, opens the next round; all who are alive enter it
at the end of their step, or when their collectives fail; once nobody has come for a moment, one of them closes the
round and writes down who is in. torchft's lighthouse does the same, and more, as a server; this needs only a store.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from mycel.brief import brief
from mycel.errors import CollectiveTimeoutError, CommunicationError, UsageError

__all__ = ["Candidate", "Roster", "Round", "everyone"]

_log = logging.getLogger(__name__)

#: Between two looks at the store.
_LOOK_S = 0.02
#: After so many settling times without a result, the next candidate closes a round in place of the one before it.
_TURN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A process that has entered a round.

    Attributes:
        handle: of its group; see ``mycel.elastic.handle``.
        place: which rank of the fabric, or of the whole job, it is.
        note: what it wants to say to those who choose, such as the step that it has come to.

    Examples:
        >>> Candidate(handle="a handle", place=3)
        Candidate(handle='a handle', place=3, note=0)
    """

    handle: str
    place: int
    note: int = 0

    __repr__ = brief


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A round that is closed.

    Attributes:
        number: serves as the id of the group that is formed.
        members: who is in, by rank.

    Examples:
        >>> Round(number=3, members=(Candidate(handle="a", place=0), Candidate(handle="b", place=5))).handles
        ['a', 'b']
    """

    number: int
    members: tuple[Candidate, ...]

    __repr__ = brief

    @property
    def handles(self) -> list[str]:
        """Of the members, by rank."""
        return [member.handle for member in self.members]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """What whoever closes a round writes down: who is in, and among whom that was decided."""

    members: tuple[Candidate, ...]
    seen: tuple[Candidate, ...]

    def to_text(self) -> str:
        return json.dumps([[[c.handle, c.place, c.note] for c in part] for part in (self.members, self.seen)])

    @classmethod
    def from_text(cls, text: bytes) -> _Result:
        parts: list[list[Any]] = json.loads(text)
        members, seen = (tuple(Candidate(handle=h, place=p, note=n) for h, p, n in part) for part in parts)
        return cls(members=members, seen=seen)


def everyone(candidates: Sequence[Candidate]) -> list[Candidate]:
    """All who have come, in the order of their places.

    Args:
        candidates: who has come.

    Examples:
        >>> [c.place for c in everyone([Candidate(handle="b", place=5), Candidate(handle="a", place=0)])]
        [0, 5]
    """
    return sorted(candidates, key=lambda candidate: candidate.place)


class Roster:
    """This process's view of the rounds.

    Args:
        store: of torch, reached by all processes for as long as the job lives: of torchrun's agent, or of any process
            that is not a rank.
        place: which rank of the fabric, or of the whole job, this process is.
        choose: who is in, by rank, of those who have come; ``None``: wait for more. The same function everywhere.
        expected: a round is closed at once when so many have come.
        settle_s: otherwise once nobody has come for so long.

    Examples:
        >>> import torch.distributed as dist
        >>> roster = Roster(dist.HashStore(), place=0, expected=1)
        >>> round = roster.gather("a handle", timeout=timedelta(seconds=5))
        >>> round.number, round.handles, roster.is_wanted
        (1, ['a handle'], False)
    """

    def __init__(
        self,
        store: Store,
        *,
        place: int,
        choose: Callable[[Sequence[Candidate]], Sequence[Candidate] | None] = everyone,
        expected: int | None = None,
        settle_s: float = 0.5,
    ) -> None:
        if not settle_s > 0:
            raise UsageError(f"settle_s={settle_s!r} must be positive")
        self._store = PrefixStore("mycel/elastic/", store)
        self._place, self._choose = place, choose
        self._expected, self._settle_s = expected, settle_s
        self._store.compare_set("round", "", "1")
        #: The last round that this process has entered.
        self.round = 0

    @property
    def is_wanted(self) -> bool:
        """Whether somebody has opened a round that this process has not entered."""
        return self._open() > self.round

    @property
    def is_closed(self) -> bool:
        """Whether somebody has closed the roster."""
        return bool(self._store.check(["closed"]))

    def close(self) -> None:
        """Say that the job is over: who waits for a round, or comes back later, is told so instead of waiting on."""
        self._store.set("closed", "1")

    def gather(self, handle: str, *, note: int = 0, timeout: timedelta) -> Round:
        """Enter a round and wait until one is closed that this process is in.

        Args:
            handle: of this process's group.
            note: for ``choose``.
            timeout: for all of it.

        Raises:
            CollectiveTimeoutError: no round with this process in it was closed in time.
            CommunicationError: the roster is closed: the job is over.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        own = Candidate(handle=handle, place=self._place, note=note)
        while True:
            if self.is_closed:
                raise CommunicationError(f"place {self._place}: the roster is closed: the job is over")
            number = self._enter(own)
            closed = self._result(number, deadline)
            if closed is not None and own in closed.members:
                _log.info("place %d: round %d: %d members", self._place, number, len(closed.members))
                return Round(number=number, members=closed.members)
            if (
                closed is not None and own in closed.seen
            ):  # not wanted as things stand: who changes them opens a round
                self._wait_for_next(number, deadline)
            if time.monotonic() >= deadline:
                raise CollectiveTimeoutError(
                    f"place {self._place}: no round of members with this process in it was closed within "
                    f"{timeout.total_seconds():g} s; the last one was {number}, and {self._count(number)} had come"
                )

    def _open(self) -> int:
        return int(self._store.get("round"))

    def _enter(self, own: Candidate) -> int:
        """Enter the newest round, or open the next where that is closed or was entered before."""
        number = self._open()
        while number <= self.round or self._has_result(number):
            self._store.compare_set("round", str(number), str(number + 1))
            number = self._open()
        self.round = number
        position = int(self._store.add(f"{number}/count", 1)) - 1
        self._store.set(f"{number}/candidate/{position}", json.dumps([own.handle, own.place, own.note]))
        return number

    def _wait_for_next(self, number: int, deadline: float) -> None:
        while self._open() <= number and time.monotonic() < deadline and not self.is_closed:
            time.sleep(_LOOK_S)

    def _has_result(self, number: int) -> bool:
        return bool(self._store.check([f"{number}/result"]))

    def _count(self, number: int) -> int:
        return int(self._store.add(f"{number}/count", 0))

    def _candidates(self, number: int) -> list[Candidate]:
        found = []
        for position in range(self._count(number)):
            key = f"{number}/candidate/{position}"
            if self._store.check([key]):
                handle, place, note = json.loads(self._store.get(key))
                found.append(Candidate(handle=handle, place=place, note=note))
        newest = {candidate.place: candidate for candidate in found}  # who came back has a new handle
        return list(newest.values())

    def _result(self, number: int, deadline: float) -> _Result | None:
        """Wait until the round is closed; ``None`` where a newer one is open, the roster closed or the time over.

        Candidates close a round in turns: the first to enter, then, if it has vanished, the next one.
        """
        seen, since = 0, time.monotonic()
        while time.monotonic() < deadline:
            if self._has_result(number):
                return _Result.from_text(self._store.get(f"{number}/result"))
            if self._open() > number or self.is_closed:
                return None
            candidates = self._candidates(number)
            now = time.monotonic()
            if len(candidates) != seen:
                seen, since = len(candidates), now
            mine = next((i for i, c in enumerate(candidates) if c.place == self._place), 0)
            full = self._expected is not None and seen >= self._expected
            if full or now - since >= self._settle_s * (1 + _TURN * mine):
                chosen = self._choose(candidates)
                if chosen:
                    result = _Result(members=tuple(chosen), seen=tuple(candidates))
                    self._store.compare_set(f"{number}/result", "", result.to_text())
                    continue
            time.sleep(_LOOK_S)
        return None
