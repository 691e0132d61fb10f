"""When a machine that says nothing is lost: what one process knows of the others, and what it makes of that.

Kernels answer for their machines whatever programs do (keepalive of the control connections), so that a machine from
which nothing comes for seconds is switched off, or the way to it is broken. One process cannot tell which: it asks
the others who still hears that machine, and tries anew to connect, since a connection that was interrupted may need
as long again as the interruption before its kernel tries. If nobody hears it, it is lost; if somebody does, a link is
to blame, and collectives find out which (``evidence``). Who hears no other machine at all is cut off itself.

In groups of many ranks a process is connected with few of the other machines. Those that it is not connected with are
in doubt where somebody asks about them; it does not give them up by itself, but names them with those that it does,
so that all who give up several at once name the same ones.

The clock is the caller's. What was seen while the process could not run (it was stopped, or its interpreter was held)
is not held against anybody: a decision needs seconds of looking.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["ASK_S", "DOUBT_S", "LOST_S", "Decision", "Silences"]

#: Seconds of silence after which a new connection is tried, others are asked, and a machine is given up.
DOUBT_S, ASK_S, LOST_S = 4.0, 7.5, 8.5
#: Seconds of looking that a decision takes at least, and within which others answer.
_LOOKING_S, _ANSWER_S = 1.5, 0.9
#: For so long counts what somebody else has heard; meanwhile they are asked again.
_HEARSAY_S, _AGAIN_S = 5.0, 2.0
#: Of a question that another rank has asked already.
_SAME_S = 0.5
_NEVER = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is to be done about silent machines, by their names.

    Attributes:
        dial: try to connect to these.
        ask: ask the others about these.
        lost: nobody hears these.
        is_cut_off: no other machine is heard at all, and there are several.
    """

    dial: tuple[str, ...] = ()
    ask: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    is_cut_off: bool = False


@dataclass(slots=True)
class _Doubt:
    """What is known about a silent machine; times as the caller's clock has them."""

    since: float
    asked: float = _NEVER  # by anybody, last
    first_asked: float | None = None


@dataclass(slots=True)
class Silences:
    """The silent machines, as one process sees them.

    Examples:
        >>> silences = Silences()
        >>> for now in range(100, 110):  # nothing has come from b for longer and longer
        ...     decision = silences.judge(now, {"a": 0.4, "b": now - 100 + 1.0})
        >>> decision.lost, decision.is_cut_off
        (('b',), False)
    """

    _doubts: dict[str, _Doubt] = field(default_factory=dict)
    _answered: dict[str, float] = field(default_factory=dict)
    _hearsay: dict[str, float] = field(default_factory=dict)
    #: Machines that others ask about: when they did first, and last.
    _rumours: dict[str, tuple[float, float]] = field(default_factory=dict)

    def judge(self, now: float, ages: Mapping[str, float]) -> Decision:
        """What to do.

        Args:
            now: in seconds.
            ages: seconds since each other machine was last heard.
        """
        dial, ask, lost, silent = [], [], [], 0
        for machine in self._doubts.keys() - ages.keys():
            del self._doubts[machine]
        for machine, heard_ago in sorted(ages.items()):
            age = min(heard_ago, now - self._answered.get(machine, _NEVER))
            if age < DOUBT_S:
                self._doubts.pop(machine, None)
                continue
            silent += 1
            doubt = self._doubts.setdefault(machine, _Doubt(now))
            dial.append(machine)
            if age < ASK_S:
                continue
            if now - doubt.asked >= _AGAIN_S:
                ask.append(machine)
                self.asked(machine, now)
            if (
                age >= LOST_S
                and now - doubt.since >= _LOOKING_S
                and doubt.first_asked is not None
                and now - doubt.first_asked >= _ANSWER_S
                and now - self._hearsay.get(machine, _NEVER) >= _HEARSAY_S
            ):
                lost.append(machine)
        if lost:
            lost = sorted({*lost, *self._lost_to_others(now, ages)})
        return Decision(
            dial=tuple(dial),
            ask=tuple(ask),
            lost=tuple(lost),
            is_cut_off=bool(lost) and len(ages) > 1 and silent == len(ages),
        )

    def _lost_to_others(self, now: float, ages: Mapping[str, float]) -> list[str]:
        """Machines that others have asked about for long enough, and that nobody hears."""
        return [
            machine
            for machine, (first, last) in tuple(self._rumours.items())  # others write it
            if machine not in ages
            and now - first >= _ANSWER_S
            and now - last <= 2 * _AGAIN_S
            and now - self._hearsay.get(machine, _NEVER) >= _HEARSAY_S
            and now - self._answered.get(machine, _NEVER) >= DOUBT_S
        ]

    @property
    def is_quiet(self) -> bool:
        """Whether no machine is in doubt."""
        return not self._doubts

    def asked(self, machine: str, now: float) -> None:
        """Somebody asks about a machine: the answers will be for all."""
        doubt = self._doubts.get(machine)
        if doubt is not None:
            doubt.asked = now
            doubt.first_asked = now if doubt.first_asked is None else doubt.first_asked

    def rumoured(self, machine: str, now: float) -> None:
        """Somebody asks about a machine that this process is not connected with."""
        first, last = self._rumours.get(machine, (now, now))
        self._rumours[machine] = (now if now - last > 2 * _AGAIN_S else first, now)

    def answered(self, machine: str, now: float) -> None:
        """A new connection was answered."""
        self._answered[machine] = now

    def has_answered(self, machine: str, now: float) -> bool:
        """Whether a new connection was answered since a machine that is to be given up now was heard last."""
        return now - self._answered.get(machine, _NEVER) < LOST_S

    def heard_by_another(self, machine: str, now: float) -> None:
        """Another rank hears it."""
        self._hearsay[machine] = now

    def must_answer(self, machine: str, now: float) -> bool:
        """Whether somebody who hears a machine should say so, and has not been forestalled by another."""
        return now - self._hearsay.get(machine, _NEVER) >= _SAME_S
