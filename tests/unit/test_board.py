"""How ranks use the group's store: in few requests, whatever the number of ranks, where the store can do that."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from mycel.errors import CommunicationError
from mycel.runtime.transport.board import Board
from mycel.runtime.transport.rendezvous import Address, Rendezvous
from mycel.runtime.transport.secret import Secret

LONG_S = 30.0
SECRET = Secret(b"a secret of sixteen bytes and more")


class Counting:
    """A store for threads, which counts what each of them asks for; questions whether keys are there aside."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.requests: Counter[int] = Counter()

    def _count(self) -> None:
        self.requests[threading.get_ident()] += 1

    def set(self, key: str, value: str) -> None:
        self._count()
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        self._count()
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


class Extended(Counting):
    """Likewise, for several keys at once."""

    def has_extended_api(self) -> bool:
        return True

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self._count()
        self.values |= {key: value.encode() for key, value in zip(keys, values, strict=True)}

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._count()
        return [self.values[key] for key in keys]


def meet(store: Counting, size: int, **given: Any) -> list[Any]:
    """The ranks of a group, each in a thread, or what they raise."""
    results: list[Any] = [None] * size

    def one(rank: int) -> None:
        own = Address(host="a", ip="127.0.0.1", port=0, pid=rank + 1)
        try:
            results[rank] = Rendezvous(rank=rank, size=size, store=store, own=own, timeout_s=LONG_S, **given)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def close(ranks: list[Any]) -> None:
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize("size", [2, 7])
@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_rank_asks_as_often_however_many_there_are(size: int, secret: Secret | None) -> None:
    """One to write; others than rank 0 one more to learn the group's token; one to read everything."""
    store = Extended()
    ranks = meet(store, size, notice="for all", secret=secret)
    assert sorted(store.requests.values()) == [2, *[3] * (size - 1)]
    for rank in ranks:
        assert [address.pid for address in rank.addresses] == list(range(1, size + 1))
        assert rank.notice == "for all"
    close(ranks)


def test_a_store_of_single_keys_will_do() -> None:
    store = Counting()
    ranks = meet(store, 3, notice="for all")
    assert {rank.notice for rank in ranks} == {"for all"}
    assert len({rank.addresses for rank in ranks}) == 1
    close(ranks)


@pytest.mark.parametrize("kind", [Counting, Extended])
def test_what_rank_0_does_not_know_yet_it_makes_when_all_have_come(kind: Callable[[], Counting]) -> None:
    store = kind()
    came: list[int] = []

    def make() -> str:
        came.append(sum("/rank" in key for key in store.values))
        return "made"

    ranks = meet(store, 3, make_notice=make)
    assert came == [3]
    assert {rank.notice for rank in ranks} == {"made"}
    close(ranks)


def test_all_hear_that_rank_0_could_not_make_it() -> None:
    def fail() -> str:
        raise CommunicationError("no clock")

    errors = meet(Extended(), 3, make_notice=fail)
    assert all("no clock" in str(error) for error in errors)
    assert [str(error).startswith("the group of 3 ranks cannot start: rank 0") for error in errors] == [
        False,
        True,
        True,
    ]


def test_what_a_stranger_has_written_is_passed_over_among_many() -> None:
    """Of several texts that come in one answer, one without a proof does not spoil the others."""
    store = Extended()
    boards = [Board(store, rank=rank, size=2, secret=SECRET) for rank in range(2)]
    boards[0].join({"a": "right", "b": "right too"}, 0.0)
    boards[1].token = boards[0].token
    place = f"mycel/{boards[0].token}/a"
    right = store.values[place]
    store.values[place] = right.replace(b"right", b"wrong")
    timer = threading.Timer(0.05, lambda: store.values.__setitem__(place, right))
    timer.start()
    assert boards[1].get_all({"a": 0, "b": 0}, time.monotonic() + LONG_S) == {"a": "right", "b": "right too"}
    timer.join()


def test_who_fails_before_its_life_began_is_heard() -> None:
    """Rank 0 may find that it cannot listen before it has written anything: the others must not wait for it."""
    store = Extended()
    board = Board(store, rank=0, size=2)
    board.fail(CommunicationError("no descriptors"))
    other = Board(store, rank=1, size=2)
    other.join({"rank1": "here"}, float("inf"))
    with pytest.raises(CommunicationError, match="cannot start: rank 0: no descriptors"):
        other.look()
