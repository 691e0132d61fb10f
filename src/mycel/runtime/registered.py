"""Schedules that a program has registered with a group, and which of them serve a call."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mycel.brief import brief
from mycel.collectives.plan_programs import PlanTemplate
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import CollectiveName
from mycel.units import format_size

__all__ = ["Registered", "Registry"]

_log = logging.getLogger(__name__)

#: Numbers of schedules that headers have room for: what is left of 63 bits.
_MOST_METHODS = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A schedule that serves calls of a group; made by ``register``.

    Attributes:
        method: what flight records, measurements and logs call it: the schedule's own name, and the first digits of
            what it holds.
        name: of the collective.
        root: of one that has a root.
        least_bytes, most_bytes: sizes of the whole array that it is for, ends included; ``None``: however large.
        always: whether it serves all of these calls, or is one of those that the cost model chooses from.
        digest: of what it holds, the same on all ranks.

    Examples:
        >>> ring = Registered(method="ring@0a1b2c3d", name="all_reduce", digest="0a1b2c3d")
        >>> ring.covers(1 << 20), str(ring)
        (True, 'ring@0a1b2c3d for all_reduce of any size')
    """

    method: str
    name: CollectiveName
    digest: str
    root: int | None = None
    least_bytes: int = 0
    most_bytes: int | None = None
    always: bool = True

    __repr__ = brief

    def __str__(self) -> str:
        least, most = self.least_bytes, self.most_bytes
        sizes = f"from {format_size(least)}" if least else "of any size" if most is None else ""
        if most is not None:
            sizes = f"{sizes} up to {format_size(most)}".lstrip()
        offered = "" if self.always else ", where the cost model prefers it"
        return f"{self.method} for {self.name} {sizes}{offered}"

    def covers(self, num_bytes: int) -> bool:
        """Whether it is for arrays of so many bytes."""
        return self.least_bytes <= num_bytes and (self.most_bytes is None or num_bytes <= self.most_bytes)


class Registry:
    """The registered schedules of one group, the same on all of its ranks."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Registered, Schedule | PlanTemplate]] = {}
        #: Of calls that say for which blocks they want schedules: a digest of these, and the schedule.
        self._made_for: dict[str, tuple[str, Schedule]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[Registered]:
        return iter([registered for registered, _ in self._known.values()])

    def add(self, registered: Registered, schedule: Schedule | PlanTemplate) -> None:
        """Have it serve the calls to come; what was registered under its name is replaced."""
        self._known[registered.method] = (registered, schedule)

    def keep(self, method: str, digest: str, schedule: Schedule) -> str:
        """Know a schedule that is for some calls only, which ask for it; gives the name that it has here.

        Args:
            method: that has made it.
            digest: of what it is for, the same on all ranks.
            schedule: verified.
        """
        name = f"{method}@{digest}"
        self._made_for[name] = (digest, schedule)
        return name

    def remove(self, method: str) -> Registered | None:
        """Have it serve no more calls; ``None``: it is not known."""
        found = self._known.pop(method, None)
        return None if found is None else found[0]

    def drop(self, *, is_said: bool) -> None:
        """Remove all, since the fabric that they were made for is another one; ``is_said``: in the log."""
        if self._known and is_said:
            dropped = ", ".join(map(str, self))
            _log.warning("registered schedules were for the fabric with it and serve no more: %s", dropped)
        self._known.clear()
        self.forget()

    def forget(self) -> None:
        """Of calls that want schedules of their own, none is known any more."""
        self._made_for.clear()

    def schedule(self, method: str) -> Schedule | None:
        """The schedule of this name, if it is one."""
        if method in self._made_for:
            return self._made_for[method][1]
        found = self._known.get(method)
        return found[1] if found is not None and isinstance(found[1], Schedule) else None

    def plan(self, method: str) -> PlanTemplate | None:
        """The plan of this name, if it is one."""
        found = self._known.get(method)
        return found[1] if found is not None and isinstance(found[1], PlanTemplate) else None

    def serving_plan(self, name: CollectiveName, root: int | None, num_bytes: int) -> str | None:
        """The name of the plan for a call; of several, the last."""
        names = [
            registered.method
            for registered, given in self._known.values()
            if (registered.name, registered.root) == (name, root)
            and registered.covers(num_bytes)
            and isinstance(given, PlanTemplate)
        ]
        return names[-1] if names else None

    def number(self, method: str, usual: Sequence[str]) -> int:
        """The number of a method in headers, by which ranks notice that they run different ones.

        Args:
            method: one of the usual ones, or of a schedule that is registered.
            usual: their numbers are their places.
        """
        found, made_for = self._known.get(method), self._made_for.get(method)
        if found is None and made_for is None:
            return usual.index(method)
        digest = found[0].digest if made_for is None and found is not None else made_for[0]  # type: ignore[index]
        return len(usual) + int(digest, 16) % (_MOST_METHODS - len(usual))

    def serving(self, name: CollectiveName, root: int | None, num_bytes: int) -> dict[str, tuple[Schedule, bool]]:
        """The schedules that are for a call, and of each whether it always serves it."""
        return {
            registered.method: (schedule, registered.always)
            for registered, schedule in self._known.values()
            if (registered.name, registered.root) == (name, root)
            and registered.covers(num_bytes)
            and isinstance(schedule, Schedule)
        }
