"""Rounds of membership: all who are in a round see the same members, whoever vanishes on the way."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from mycel.elastic.roster import Candidate, Roster, Round, everyone
from mycel.errors import CollectiveTimeoutError, CommunicationError, UsageError

LIMIT = timedelta(seconds=20)


def gather(rosters: Sequence[Roster], handles: Sequence[str]) -> list[Round]:
    with ThreadPoolExecutor(len(rosters)) as pool:
        return list(pool.map(lambda pair: pair[0].gather(pair[1], timeout=LIMIT), zip(rosters, handles, strict=True)))


def test_all_see_the_same_round_in_the_order_of_places() -> None:
    store = dist.HashStore()
    rosters = [Roster(store, place=place, expected=3) for place in (2, 0, 1)]
    rounds = gather(rosters, ["c", "a", "b"])
    assert {(one.number, tuple(one.handles)) for one in rounds} == {(1, ("a", "b", "c"))}
    assert not any(roster.is_wanted for roster in rosters)


def test_a_round_closes_without_those_who_do_not_come() -> None:
    store = dist.HashStore()
    rosters = [Roster(store, place=place, expected=3, settle_s=0.1) for place in range(2)]
    assert {tuple(one.handles) for one in gather(rosters, ["a", "b"])} == {("a", "b")}


def test_who_comes_later_is_wanted_and_let_in() -> None:
    store = dist.HashStore()
    first = Roster(store, place=0, settle_s=0.05)
    assert first.gather("a", timeout=LIMIT).handles == ["a"]
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(Roster(store, place=1, expected=2).gather, "b", timeout=LIMIT)
        while not first.is_wanted:
            pass
        assert first.gather("a", timeout=LIMIT) == late.result(20)


def test_who_came_back_replaces_who_it_was() -> None:
    store = dist.HashStore()
    with pytest.raises(CollectiveTimeoutError):
        Roster(store, place=1, expected=9, settle_s=9).gather("dead", timeout=timedelta(seconds=0.1))
    rosters = [Roster(store, place=place, settle_s=0.3) for place in range(2)]
    assert {tuple(one.handles) for one in gather(rosters, ["a", "alive"])} == {("a", "alive")}


def test_a_round_is_closed_by_the_next_if_the_first_has_vanished() -> None:
    store = dist.HashStore()
    with pytest.raises(CollectiveTimeoutError, match=r"place 0: no round .* was closed"):
        Roster(store, place=0, settle_s=5).gather("vanished", timeout=timedelta(seconds=0.1))
    left = Roster(store, place=1, settle_s=0.05).gather("b", timeout=LIMIT)
    assert left.handles == ["vanished", "b"]  # forming the group then finds out who is gone


def test_the_job_says_who_is_in() -> None:
    def pairs(candidates: Sequence[Candidate]) -> Sequence[Candidate] | None:
        chosen = everyone(candidates)
        return chosen if len(chosen) % 2 == 0 else None

    store = dist.HashStore()
    rosters = [Roster(store, place=place, choose=pairs, settle_s=0.05) for place in range(2)]
    assert {tuple(one.handles) for one in gather(rosters, ["a", "b"])} == {("a", "b")}
    with pytest.raises(UsageError, match="settle_s=0 must be positive"):
        Roster(store, place=0, settle_s=0)


def test_who_is_not_chosen_waits_until_somebody_else_comes() -> None:
    def evens(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        places = {candidate.place for candidate in candidates}
        return [c for c in everyone(candidates) if c.place % 2 == 0 or places >= {1, 3}]

    store = dist.HashStore()
    first, spare = (Roster(store, place=place, choose=evens, settle_s=0.3) for place in (0, 1))
    with ThreadPoolExecutor(3) as pool:
        waiting = pool.submit(spare.gather, "b", timeout=LIMIT)
        assert first.gather("a", timeout=LIMIT).handles == ["a"]
        assert not waiting.done() and not first.is_wanted, "it does not disturb those who are in"
        partner = pool.submit(Roster(store, place=3, choose=evens, expected=3).gather, "d", timeout=LIMIT)
        while not first.is_wanted:
            pass
        assert first.gather("a", timeout=LIMIT).handles == ["a", "b", "d"]
        assert waiting.result(20).number == partner.result(20).number


def test_who_waits_for_a_job_that_is_over_is_told_and_so_is_who_comes_later() -> None:
    store = dist.HashStore()
    done = Roster(store, place=0, settle_s=0.05)
    assert done.gather("a", timeout=LIMIT).handles == ["a"] and not done.is_closed
    waiting = Roster(store, place=1, expected=9, settle_s=LIMIT.total_seconds())
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(waiting.gather, "b", timeout=LIMIT)
        while not done.is_wanted:
            pass
        done.close()
        with pytest.raises(CommunicationError, match="place 1: the roster is closed: the job is over"):
            waits.result()
    with pytest.raises(CommunicationError, match="closed"):
        Roster(store, place=2).gather("c", timeout=LIMIT)
    assert waiting.is_closed


def test_who_was_not_chosen_is_told_too() -> None:
    store = dist.HashStore()
    chosen = Roster(store, place=0, choose=lambda came: came[:1], expected=2)
    left_out = Roster(store, place=1, choose=lambda came: came[:1], expected=2)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(chosen.gather, "a", timeout=LIMIT)
        while not left_out.is_wanted or not chosen.round:
            pass
        second = pool.submit(left_out.gather, "b", timeout=LIMIT)
        assert first.result().handles == ["a"]
        chosen.close()
        with pytest.raises(CommunicationError, match="closed"):
            second.result()
