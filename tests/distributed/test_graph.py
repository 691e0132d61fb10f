"""Groups whose control connections are a graph, which those of many ranks have, with few: four machines of three."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from tests.effort import long

RunRanks = Callable[..., list[Any]]
SIZE, PER_MACHINE, TIMEOUT_S = 12, 3, 4.0
GRAPH = {"MYCEL_MESH_RANKS": "4"}


def test_twelve_ranks_with_few_connections_each(run_ranks: RunRanks) -> None:
    found = run_ranks(SIZE, "graph", "works", PER_MACHINE, False, backend=None, env=GRAPH)
    assert all(relays and neighbours <= 6 for neighbours, relays in found)


@long
def test_a_job_with_a_secret(run_ranks: RunRanks) -> None:
    env = GRAPH | {"MYCEL_SECRET": "twenty-four bytes of it."}
    assert all(relays for _, relays in run_ranks(SIZE, "graph", "works", PER_MACHINE, True, backend=None, env=env))


def test_few_ranks_have_a_connection_to_each_other_one(run_ranks: RunRanks) -> None:
    found = run_ranks(4, "graph", "works", 2, False, backend=None, env=GRAPH)
    assert found == [(3, False)] * 4


@pytest.mark.parametrize("victim", [5, pytest.param(0, marks=long)])
def test_all_name_a_rank_that_is_killed(run_ranks: RunRanks, victim: int) -> None:
    found = run_ranks(SIZE, "graph", "lose", PER_MACHINE, "kill", [victim], 20.0, backend=None, env=GRAPH)
    kinds, messages, seconds = zip(*(each for each in found if each is not None), strict=True)
    assert set(kinds) == {"PeerLostError"} and len(set(messages)) == 1
    assert f"rank {victim} was lost" in messages[0] and max(seconds) < 10.0


@long
def test_a_machine_whose_ranks_are_killed(run_ranks: RunRanks) -> None:
    victims = [3, 4, 5]
    found = run_ranks(SIZE, "graph", "lose", PER_MACHINE, "kill", victims, 20.0, backend=None, env=GRAPH)
    for kind, message, seconds in [each for each in found if each is not None]:
        assert kind == "PeerLostError" and seconds < 10.0
        assert any(message.startswith(f"rank {victim} was lost") for victim in victims), message


@long
@pytest.mark.parametrize("victims", [[7], [6, 7, 8]], ids=["a rank", "a machine"])
def test_all_name_who_is_stopped(run_ranks: RunRanks, victims: list[int]) -> None:
    found = run_ranks(SIZE, "graph", "lose", PER_MACHINE, "stop", victims, TIMEOUT_S, backend=None, env=GRAPH)
    kinds, messages, seconds = zip(*(each for each in found if each is not None), strict=True)
    assert set(kinds) == {"CollectiveTimeoutError"} and len(set(messages)) == 1, set(messages)
    silent = {int(number) for number in re.findall(r"rank (\d+)", messages[0].partition(" silent ")[0])}
    assert silent and silent <= set(victims), messages[0]  # of a machine, those that others wait for
    assert max(seconds) <= TIMEOUT_S + 2.0


def test_first_calls_that_differ_are_told_to_ranks_far_away(run_ranks: RunRanks) -> None:
    found = run_ranks(SIZE, "graph", "differ", PER_MACHINE, 7, backend=None, env=GRAPH)
    assert {kind for kind, _ in found} == {"MismatchError"}, found
    assert all("broadcast" in message and "all_reduce" in message for _, message in found)


@long
@pytest.mark.parametrize("lost", [0, 2])
def test_survivors_shrink_the_group(run_ranks: RunRanks, lost: int) -> None:
    env = {"MYCEL_MESH_RANKS": "0"}
    assert sum(took > 0 for took in run_ranks(4, "elastic", "shrink", lost, backend=None, env=env)) == 3
