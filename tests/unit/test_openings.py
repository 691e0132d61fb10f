"""What ranks tell each other while channels are being opened, and when they give a rank up that is gone."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from mycel.runtime import openings as module
from mycel.runtime.control import Control
from mycel.runtime.headers import pack_kind
from mycel.runtime.hearing import Hearing
from mycel.runtime.openings import Openings
from mycel.runtime.reduce_kernels import DType, ReduceOp

ALL_REDUCE = (3, pack_kind("all_reduce", DType.FLOAT32, ReduceOp.SUM, None, 0), 64)
ALL_GATHER = (3, pack_kind("all_gather", DType.FLOAT32, None, None, 0), 64)
ALL_TO_ALL = (3, pack_kind("all_to_all", DType.FLOAT32, None, None, 0), 64)


class Clock:
    """Stands for ``time``."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


@contextmanager
def two_ranks() -> Iterator[tuple[Hearing, Hearing]]:
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    with (
        closing(Control({1: ends[0]}, rank=0, size=2)) as here,
        closing(Control({0: ends[1]}, rank=1, size=2)) as there,
    ):
        yield Hearing(0, 2, here), Hearing(1, 2, there)


def test_who_waits_says_so_now_and_then_but_not_at_once(clock: Clock) -> None:
    with two_ranks() as (mine, other):
        openings = Openings(mine, str)
        heard = []
        for _ in range(26):  # an eighth of a second each
            openings.tell(1, ALL_REDUCE)
            other.attend()
            heard.append(dict(other.calls))
            other.next_epoch()  # forgets
            mine.next_epoch()
            clock.now += 0.125
        assert [number for number, calls in enumerate(heard) if calls] == [8, 16, 24]
        assert heard[8] == {0: ALL_REDUCE}
        openings.tell(1, ALL_GATHER)
        other.attend()
        assert not other.calls, "another call begins anew"


def test_another_call_in_ones_place_is_noticed(clock: Clock) -> None:
    with two_ranks() as (mine, other):
        openings = Openings(mine, str)
        other.say_call(0, ALL_GATHER)
        mine.attend()
        said = openings.other_call(ALL_REDUCE)
        assert "rank 0 called all_reduce" in said and "rank 1 called all_gather" in said
        assert openings.other_call(ALL_GATHER) == ""
        assert openings.other_call((4, *ALL_REDUCE[1:])) == "", "the call after it"
        other.say_call(0, ALL_TO_ALL)
        mine.attend()
        assert "rank 1 called all_to_all" in openings.other_call(ALL_REDUCE), "the last word counts"


def test_what_was_said_on_another_fabric_is_passed_over() -> None:
    with two_ranks() as (mine, other):
        other.next_epoch()
        other.say_call(0, ALL_GATHER)
        mine.attend()
        assert not mine.calls


def test_the_call_under_way_looks_up_even_if_another_thread_has_read_it() -> None:
    with two_ranks() as (mine, other):
        other.say_call(0, ALL_GATHER)
        mine.control.wait(20.0)
        mine.observe()
        watched = mine.control.descriptors.tolist()
        assert select.select(watched, [], [], 0)[0]
        mine.attend()
        assert not select.select(watched, [], [], 0)[0]


def test_who_is_gone_is_missed_a_little_later(clock: Clock) -> None:
    """Its connection for the channel may have come by a longer way than the end of its control connection."""
    with two_ranks() as (mine, other):
        openings = Openings(mine, str)
        assert not openings.is_missed(1)
        other.control.close()
        mine.attend(20.0)
        assert not openings.is_missed(1)
        clock.now += 0.4
        assert not openings.is_missed(1)
        clock.now += 0.2
        assert openings.is_missed(1)
        assert not openings.is_missed(0)
        assert not openings.is_missed(1), "it counts from when it is waited for again"
