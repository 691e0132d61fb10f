"""A thread of the process's that listens between calls, and notices machines and processes that say nothing.

One a process, for all of its groups. It sleeps until somebody says something on a control connection, and once a
second asks its kernel for how long nothing has come from each other machine (``silence``). What it learns is filed in
each group's ``Hearing``, so that the call that is under way ends, and the next one does not begin.

In groups of many ranks a process is connected with some ranks only: it hears their machines, and follows those
processes. Where somebody asks about a machine, one process of each other machine tries to connect to it, and says so
if it answers: a machine is not lost because those that it is connected with do not hear it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Collection, Sequence

from mycel.errors import PeerLostError
from mycel.runtime.ending import at_work
from mycel.runtime.forks import let_go_in_children
from mycel.runtime.hearing import Hearing
from mycel.runtime.messages import Identity
from mycel.runtime.processes import follow
from mycel.runtime.silence import DOUBT_S, LOST_S, Silences
from mycel.runtime.transport.dial import Dial

__all__ = ["Watched", "check_members", "watch"]

_log = logging.getLogger(__name__)

#: Between looks at silent machines: while all are heard, and while some are not.
_LOOK_S, _HASTE_S = 1.0, 0.25
#: For so long a machine is tried for whoever has asked.
_TRY_S = 1.5
#: Machines that are tried by a process none of whose own are heard, before it takes itself for cut off.
_MOST_WITNESSES = 8
_serials = itertools.count()


class Watched:
    """A group, as the thread sees it; watched until it is closed or nobody holds it any more.

    Args:
        hearing: the group's.
        members: global ranks, in group order.
        machines: name of each rank's machine, in group order.
        places: address and port at which each rank listens.

    Attributes:
        serial: a number that no other group of the process has, or had.
    """

    def __init__(
        self, hearing: Hearing, members: Sequence[int], machines: Sequence[str], places: Sequence[tuple[str, int]]
    ) -> None:
        self.hearing = hearing
        self.members, self.machines, self.places = tuple(members), tuple(machines), tuple(places)
        self.serial = next(_serials)

    @property
    def own_machine(self) -> str:
        """This process's."""
        return self.machines[self.hearing.rank]

    def lost_of(self, wanted: Collection[int]) -> list[int]:
        """Which of these, by their global numbers, are lost: those that a cause names, else all that have died."""
        named = {self.members[rank] for rank in self.hearing.lost} & set(wanted)
        return sorted(named or {self.members[rank] for rank in self.hearing.control.dead} & set(wanted))

    def on(self, machines: Collection[str]) -> tuple[int, ...]:
        """Ranks on these machines that have not left."""
        left = self.hearing.control.left
        return tuple(rank for rank, name in enumerate(self.machines) if name in machines and rank not in left)

    @property
    def connected(self) -> tuple[int, ...]:
        """Ranks of other machines that this one has a connection to, and that have not left."""
        control, own = self.hearing.control, self.own_machine
        return tuple(rank for rank in control.neighbours if self.machines[rank] != own and rank not in control.left)

    @property
    def speaks_for_machine(self) -> bool:
        """Whether this rank is the first of its machine's that are there."""
        here = set(self.on((self.own_machine,))) - self.hearing.control.gone
        return self.hearing.rank == min(here, default=self.hearing.rank)

    def place_of(self, machine: str) -> tuple[str, int] | None:
        """Where a rank of a machine listens, or has listened."""
        ranks = self.on((machine,))
        return self.places[ranks[0]] if ranks else None

    def observe(self) -> None:
        """Take in what has been said; whatever goes wrong with that becomes the group's error."""
        try:
            self.hearing.observe()
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Have those who wait hear of an error of the thread's."""
        _log.exception("rank %d: watching the other ranks failed", self.hearing.rank)
        self.hearing.poison("failed", f"rank {self.hearing.rank}: watching the other ranks failed: {error!r}")

    def give_up(self, machines: Sequence[str], *, is_cut_off: bool) -> None:
        """Fail the group, if it has ranks on these machines, which nobody hears any more."""
        ranks = self.on(machines)
        if not ranks:
            return
        if is_cut_off:
            ranks = self.on((self.own_machine,))
            message = (
                f"{_of_one(ranks)} hears no other machine any more, and has not for {LOST_S:g} s: its own network is "
                "down, or all of them are"
            )
        else:
            one = len({self.machines[rank] for rank in ranks}) == 1
            whose = (
                f"{_of_one(ranks)} was lost: its machine has"
                if one
                else f"{_named(ranks)} were lost: their machines have"
            )
            message = f"{whose} not answered any rank for {LOST_S:g} s (power or network?)"
        self.hearing.poison("lost", message, ranks=ranks)

    def close(self) -> None:
        """Watch it no longer."""
        _watch.remove(self)


class _Watch:
    """The thread and what it looks after. Only ``ears`` and the groups are used by other threads."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._groups: tuple[weakref.ref[Watched], ...] = ()
        self._thread: threading.Thread | None = None
        self._bell = -1
        self._silences = Silences()
        self._dials: dict[str, Dial] = {}
        #: Machines that are tried for others, and until when.
        self._tried: dict[str, float] = {}
        #: Descriptor of each process that shares a group with this one; -1: it has ended, -2: it cannot be followed.
        self._followed: dict[Identity, int] = {}
        #: Those of them that run: one descriptor to wait for, however many there are.
        self._running: select.epoll | None = None
        #: Who is followed for whom, and what groups had said of that when it was looked at last.
        self._users: dict[Identity, list[tuple[weakref.ref[Watched], int]]] = {}
        self._said: tuple[tuple[int, int], ...] = ()

    def after_fork_in_child(self) -> None:
        """The child has no such thread, and nothing to watch."""
        self._drop()
        self._reset()

    def _drop(self) -> None:
        if self._running is not None:
            self._running.close()
        for descriptor in (self._bell, *self._followed.values()):
            if descriptor >= 0:
                os.close(descriptor)
        for dial in self._dials.values():
            dial.close()

    # -- for others -----------------------------------------------------------------------------------------

    @property
    def groups(self) -> list[Watched]:
        """What is being watched."""
        return [group for group in (reference() for reference in self._groups) if group is not None]

    def add(self, group: Watched) -> None:
        group.hearing.ears = self
        let_go_in_children(self)
        with self._lock:
            self._groups = (*self._groups, weakref.ref(group))
            if self._thread is None:
                self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                self._thread = threading.Thread(target=self._run, name="mycel-watch", daemon=True)
                self._thread.start()
            else:
                os.eventfd_write(self._bell, 1)

    def remove(self, group: Watched) -> None:
        with self._lock:
            self._groups = tuple(each for each in self._groups if each() is not None and each() is not group)
            thread, is_last = self._thread, not self._groups
            if thread is not None:
                os.eventfd_write(self._bell, 1)
        if is_last and thread is not None and thread is not threading.current_thread():
            thread.join(5.0)

    def asked(self, machine: str) -> bool:
        """Somebody asks who hears a machine; whether this process is to answer."""
        now = time.monotonic()
        self._silences.asked(machine, now)
        if not self._silences.must_answer(machine, now):
            return False
        if self._hears(machine):
            return True
        self._try_for_others(machine, now)
        return False

    def heard(self, machine: str) -> None:
        """Somebody else hears a machine."""
        self._silences.heard_by_another(machine, time.monotonic())

    def _hears(self, machine: str) -> bool:
        for group in self.groups:
            if machine == group.own_machine:
                return True
            ages = (group.hearing.control.silence_s(rank) for rank in group.on((machine,)))
            if any(age is not None and age < DOUBT_S for age in ages):
                return True
        return False

    def _try_for_others(self, machine: str, now: float) -> None:
        """Have the thread try a machine that this process is not connected with, if that is for it to do."""
        groups = [group for group in self.groups if group.hearing.control.relays and group.on((machine,))]
        if not groups or any(group.machines[rank] == machine for group in self.groups for rank in group.connected):
            return
        self._silences.rumoured(machine, now)
        if any(group.speaks_for_machine for group in groups):
            self._tried[machine] = now + _TRY_S
            with self._lock:
                if self._bell >= 0:
                    os.eventfd_write(self._bell, 1)

    # -- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        next_look = time.monotonic() + _LOOK_S
        while self._goes_on():
            self._sleep(max(0.0, next_look - time.monotonic()))
            with at_work:
                for group in self.groups:
                    group.observe()
            try:
                self._follow_processes()
                if time.monotonic() >= next_look or self._tried.keys() - self._dials.keys():
                    self._look(time.monotonic())
                    is_quiet = self._silences.is_quiet and not self._tried
                    next_look = time.monotonic() + (_LOOK_S if is_quiet else _HASTE_S)
            except Exception as error:
                for group in self.groups:
                    group.fail(error)
                next_look = time.monotonic() + _LOOK_S

    def _goes_on(self) -> bool:
        with self._lock:
            self._groups = tuple(each for each in self._groups if each() is not None)
            if self._groups:
                return True
            self._drop()
            self._bell, self._thread = -1, None
            self._followed, self._dials, self._tried, self._silences = {}, {}, {}, Silences()
            self._running, self._users, self._said = None, {}, ()
            return False

    def _sleep(self, patience_s: float) -> None:
        """Until somebody says something, a process ends, or groups come or go. Holds no group meanwhile."""
        poller = select.poll()
        poller.register(self._bell, select.POLLIN)
        for descriptor, events in [pair for group in self.groups for pair in group.hearing.control.watched()]:
            poller.register(descriptor, events)
        if self._running is not None:
            poller.register(self._running, select.POLLIN)
        poller.poll(patience_s * 1000)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)

    def _follow_processes(self) -> None:
        """Follow the processes that have said who they are, and tell groups of those that have ended.

        What takes longer the more ranks there are is done where somebody has said something new.
        """
        groups = self.groups
        said = tuple((group.serial, group.hearing.num_introduced) for group in groups)
        ended = self._newly_ended()
        if said != self._said:
            self._said = said
            self._find_users(groups)
            ended = [identity for identity, descriptor in self._followed.items() if descriptor == -1]
        for identity in ended:
            for reference, peer in self._users.get(identity, ()):
                group = reference()
                if group is not None and peer not in group.hearing.control.ended:
                    group.observe()  # it may have said goodbye
                    group.hearing.control.note_ended(peer)

    def _find_users(self, groups: Sequence[Watched]) -> None:
        """Who is to be followed for whom; follows those who were not, and lets go of others."""
        self._users = {}
        for group in groups:
            for peer, identity in group.hearing.identities.items():
                self._users.setdefault(identity, []).append((weakref.ref(group), peer))
        for identity in [identity for identity in self._followed if identity not in self._users]:
            self._let_go(self._followed.pop(identity))
        for identity in self._users:
            if identity not in self._followed:
                found = follow(identity)
                self._followed[identity] = -2 if found is None else found
                if found is not None and found >= 0:
                    if self._running is None:
                        self._running = select.epoll()
                    self._running.register(found, select.EPOLLIN)

    def _let_go(self, descriptor: int) -> None:
        if descriptor >= 0:
            if self._running is not None:
                self._running.unregister(descriptor)  # to close it would not do where a child holds it, too
            os.close(descriptor)

    def _newly_ended(self) -> list[Identity]:
        if self._running is None:
            return []
        over = {descriptor for descriptor, _ in self._running.poll(0)}
        ended = [identity for identity, descriptor in self._followed.items() if descriptor in over] if over else []
        for identity in ended:
            self._let_go(self._followed[identity])
            self._followed[identity] = -1
        return ended

    def _look(self, now: float) -> None:
        """Look for machines that say nothing."""
        ages: dict[str, float] = {}
        places: dict[str, tuple[str, int]] = {}
        groups = [group for group in self.groups if group.hearing.cause is None]
        for group in groups:
            for rank in group.connected:
                machine = group.machines[rank]
                if ages.get(machine, DOUBT_S) < DOUBT_S:
                    continue  # one that is heard is enough
                age = group.hearing.control.silence_s(rank)
                if age is not None:
                    ages[machine] = min(age, ages.get(machine, age))
                    places[machine] = group.places[rank]
        self._call_witnesses(groups, ages, places, now)
        decision = self._silences.judge(now, ages)
        self._dial(decision.dial, groups, places, now)
        for machine in decision.ask:
            for group in groups:
                group.hearing.ask_for(machine)
        if decision.lost:
            for group in groups:
                group.give_up(decision.lost, is_cut_off=decision.is_cut_off)

    def _call_witnesses(
        self, groups: Sequence[Watched], ages: dict[str, float], places: dict[str, tuple[str, int]], now: float
    ) -> None:
        """Where none of the few machines that are connected is heard, judge some others as well, evenly chosen.

        All of them may be gone, as when a rack is; or this one is cut off.
        """
        silence_s = min(ages.values(), default=0.0)
        if silence_s < DOUBT_S:
            return
        for group in [group for group in groups if group.hearing.control.relays]:
            others = [name for name in dict.fromkeys(group.machines) if name not in (group.own_machine, *ages)]
            for machine in others[:: -(-len(others) // _MOST_WITNESSES) or 1]:
                place = group.place_of(machine)
                if place is not None:
                    ages[machine] = 0.0 if self._silences.has_answered(machine, now) else silence_s
                    places[machine] = place

    def _dial(
        self,
        doubted: Sequence[str],
        groups: Sequence[Watched],
        places: dict[str, tuple[str, int]],
        now: float,
    ) -> None:
        """Try to connect to machines in doubt, and for others to those that they doubt."""
        for machine, until in tuple(self._tried.items()):  # others write it
            if until <= now:
                del self._tried[machine]
        tried = tuple(self._tried)
        for machine in tried:
            place = next(filter(None, (group.place_of(machine) for group in groups)), None)
            if place is not None:
                places.setdefault(machine, place)
        machines = [machine for machine in (*doubted, *tried) if machine in places]
        for machine in [machine for machine in self._dials if machine not in machines]:
            self._dials.pop(machine).close()
        for machine in dict.fromkeys(machines):
            dial = self._dials.setdefault(machine, Dial(*places[machine]))
            if dial.is_answered():
                self._silences.answered(machine, now)
                if self._tried.pop(machine, None) is not None and self._silences.must_answer(machine, now):
                    for group in groups:
                        if group.on((machine,)):
                            group.hearing.answer_for(machine)


_watch = _Watch()


def watch(group: Watched) -> None:
    """Begin to watch a group; ends with ``group.close()``, or when nobody holds it any more."""
    _watch.add(group)


def check_members(members: Sequence[int]) -> None:
    """To be called while a new group is being made: no need to wait for a member that is known to be lost.

    Args:
        members: global ranks.

    Raises:
        PeerLostError: a group of this process knows that one of them is lost.
    """
    for group in _watch.groups:
        lost = group.lost_of(members)
        if lost:  # no more is said: ranks would not say the same, as they learn of it from different groups
            raise PeerLostError(
                f"a new group of {_named(members)} cannot be made, for {_named(lost)} was lost: its process ended or "
                "its machine does not answer"
            )


def _named(ranks: Sequence[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks)


def _of_one(ranks: Sequence[int]) -> str:
    """Ranks of one machine in words.

    Examples:
        >>> _of_one((1,)), _of_one((1, 2, 5))
        ('rank 1', 'rank 1 (and rank 2, rank 5 of the same machine)')
    """
    first, *others = ranks
    return f"rank {first} (and {_named(others)} of the same machine)" if others else f"rank {first}"
