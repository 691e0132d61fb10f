"""In groups of many ranks a process hears few machines itself: who is lost, cut off, or heard for somebody else."""

from __future__ import annotations

import socket
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.unit.test_relay import HOSTS, Net, net

from mycel.errors import PeerLostError
from mycel.runtime.control import Control
from mycel.runtime.hearing import Hearing
from mycel.runtime.messages import Heard, Question
from mycel.runtime.silence import LOST_S, Silences
from mycel.runtime.watch import Watched, _Watch

#: No kernel connects to this.
NOWHERE = ("255.255.255.255", 9)


class Eye:
    """What one process watches, a step at a time, on a clock of its own; nothing comes from ``silent`` machines."""

    def __init__(self, ranks: Net, rank: int, places: list[tuple[str, int]], patch: pytest.MonkeyPatch) -> None:
        self.ranks, self.now, self.began = ranks, 1000.0, 1000.0
        self.silent: set[str] = set()
        self.hearing = Hearing(rank, len(HOSTS), ranks.controls[rank])
        self.group = Watched(self.hearing, range(len(HOSTS)), HOSTS, places)
        self.watch = _Watch()
        self.watch._groups = (weakref.ref(self.group),)
        self.hearing.ears = self.watch
        patch.setattr(Control, "silence_s", lambda _, peer: self.silence_of(peer))
        patch.setattr("mycel.runtime.watch.time.monotonic", lambda: self.now)

    def silence_of(self, peer: int) -> float | None:
        if peer not in self.hearing.control.neighbours:
            return None
        return self.now - self.began if HOSTS[peer] in self.silent else 0.3

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until and self.hearing.cause is None:
            self.watch._look(self.now)
            self.ranks.settle(but=(self.hearing.rank,))
            self.hearing.observe()
            self.now += 0.25

    def close(self) -> None:
        self.watch._drop()


@contextmanager
def eye(rank: int, places: list[tuple[str, int]]) -> Iterator[Eye]:
    with net() as ranks, pytest.MonkeyPatch.context() as patch:
        made = Eye(ranks, rank, places, patch)
        try:
            yield made
        finally:
            made.close()


@contextmanager
def listener() -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made.getsockname()[:2]


def connected(eye: Eye) -> set[str]:
    return {HOSTS[rank] for rank in eye.group.connected}


def test_a_rank_hears_few_machines_itself() -> None:
    with eye(4, [NOWHERE] * len(HOSTS)) as sees:
        assert connected(sees) and len(connected(sees)) < len(set(HOSTS)) - 1
        assert sees.group.own_machine not in connected(sees)


def test_a_machine_that_is_silent_is_lost_for_all() -> None:
    with eye(4, [NOWHERE] * len(HOSTS)) as sees:
        silent = min(connected(sees))
        sees.silent = {silent}
        sees.run(LOST_S + 2)
        names = [rank for rank, host in enumerate(HOSTS) if host == silent]
        assert isinstance(sees.hearing.cause, PeerLostError) and sees.hearing.lost == set(names)
        sees.ranks.settle()
        said = {str(heard[-1][1].cause) for rank, heard in sees.ranks.heard.items() if rank != 4}  # type: ignore[union-attr]
        assert said == {str(sees.hearing.cause)}


def test_who_hears_none_of_its_few_machines_is_not_cut_off_while_others_answer() -> None:
    with listener() as place, eye(4, [place] * len(HOSTS)) as sees:
        sees.silent = connected(sees)
        for rank, host in enumerate(HOSTS):  # a rack without power
            if host in sees.silent:
                sees.group.places = (*sees.group.places[:rank], NOWHERE, *sees.group.places[rank + 1 :])
        sees.run(LOST_S + 3)
        assert sees.hearing.lost == {rank for rank, host in enumerate(HOSTS) if host in sees.silent}
        assert "hears no other machine" not in str(sees.hearing.cause)


def test_who_reaches_nobody_is_cut_off() -> None:
    with eye(4, [NOWHERE] * len(HOSTS)) as sees:
        sees.silent = connected(sees)
        sees.run(LOST_S + 3)
        assert "hears no other machine any more" in str(sees.hearing.cause)
        assert sees.hearing.lost == {rank for rank, host in enumerate(HOSTS) if host == HOSTS[4]}


def ask(sees: Eye, machine: str) -> None:
    """Have a rank ask who hears a machine, and everybody pass that on."""
    asker = max(sees.ranks.controls)
    number = sum(isinstance(m, Question) for _, m in sees.ranks.heard[0]) + 1
    sees.ranks.controls[asker].tell_all(Question(by=asker, number=number, machine=machine))
    sees.ranks.settle(but=(sees.hearing.rank,))
    sees.hearing.observe()


def answers(sees: Eye) -> int:
    sees.ranks.settle(but=(sees.hearing.rank,))
    return sum(isinstance(message, Heard) for _, message in sees.ranks.heard[0])


@pytest.mark.parametrize(("rank", "is_answered"), [(3, True), (4, False)], ids=["first of its machine", "second"])
def test_one_process_of_a_machine_tries_what_somebody_asks_about(rank: int, is_answered: bool) -> None:
    with listener() as place, eye(rank, [place] * len(HOSTS)) as sees:
        far = min(set(HOSTS) - connected(sees) - {HOSTS[rank]})
        ask(sees, far)
        sees.run(1.0)
        assert answers(sees) == is_answered
        assert sees.hearing.cause is None and not sees.watch._dials


def test_what_does_not_answer_either_is_not_heard() -> None:
    with eye(3, [NOWHERE] * len(HOSTS)) as sees:
        ask(sees, min(set(HOSTS) - connected(sees) - {HOSTS[3]}))
        sees.run(3.0)
        assert answers(sees) == 0 and not sees.watch._tried and not sees.watch._dials


def test_the_second_of_a_machine_takes_the_place_of_the_first_that_is_gone() -> None:
    with listener() as place, eye(4, [place] * len(HOSTS)) as sees:
        sees.ranks.kill(3)
        sees.ranks.settle()
        ask(sees, min(set(HOSTS) - connected(sees) - {HOSTS[4]}))
        sees.run(1.0)
        assert answers(sees) == 1


def test_machines_that_others_ask_about_are_named_with_the_own_ones() -> None:
    silences = Silences()
    found: tuple[str, ...] = ()
    for tick in range(48):
        now = 1000 + tick / 4
        if tick in (30, 34):
            silences.rumoured("far", now)
            silences.rumoured("heard", now)
            silences.heard_by_another("heard", now)
        found = found or silences.judge(now, {"near": now - 1000, "well": 0.5}).lost
    assert found == ("far", "near")


def test_what_others_have_asked_about_long_ago_is_forgotten() -> None:
    silences = Silences()
    silences.rumoured("far", 1000.0)
    found: tuple[str, ...] = ()
    for tick in range(48):
        now = 1000 + tick / 4
        found = found or silences.judge(now, {"near": now - 1000, "well": 0.5}).lost
    assert found == ("near",)
