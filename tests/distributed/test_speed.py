"""What ranks choose, by whose numbers, and over which sockets bytes go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.effort import long

RunRanks = Callable[..., list[Any]]


@pytest.mark.parametrize("world_size", [3, 4])
def test_all_ranks_choose_by_the_numbers_of_rank_0(run_ranks: RunRanks, world_size: int) -> None:
    by_rank = run_ranks(world_size, "speed", "choices")
    assert all(found == by_rank[0] for found in by_rank)
    first, second = by_rank[0]
    assert any(first[key][:2] != second[key][:2] for key in first), "the numbers made no difference to any choice"


@pytest.mark.parametrize("world_size", [2, 4])
def test_memory_and_both_kinds_of_sockets_give_the_same_bits(run_ranks: RunRanks, world_size: int) -> None:
    by_rank = run_ranks(world_size, "speed", "transports")
    for found in by_rank:
        assert {kind: (families, rings) for kind, (families, rings, _) in found.items()} == {
            "tcp": (["AF_INET"], False),
            "unix": (["AF_UNIX"], False),
            "memory": (["AF_UNIX"], True),
        }
    bits = [bits for found in by_rank for _, _, bits in found.values()]
    assert all(one == bits[0] for one in bits)


@pytest.mark.parametrize("world_size", [2, 3])
def test_small_sums_are_run_again(run_ranks: RunRanks, world_size: int) -> None:
    run_ranks(world_size, "speed", "small_calls_again")


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=long)])
def test_small_moves_are_run_again(run_ranks: RunRanks, world_size: int) -> None:
    run_ranks(world_size, "speed", "other_small_calls_again")


@pytest.mark.parametrize("local", ["memory", "unix"])
def test_calls_that_are_run_again_hold_nothing(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, local: str
) -> None:
    monkeypatch.setenv("MYCEL_LOCAL", local)
    run_ranks(2, "speed", "calls_again_hold_nothing")


def test_signals_come_between_small_sums(run_ranks: RunRanks) -> None:
    run_ranks(2, "speed", "small_calls_among_signals", 2000)


def test_a_small_sum_that_was_run_before_fails_by_name(run_ranks: RunRanks) -> None:
    run_ranks(3, "speed", "small_calls_that_fail")


def test_methods_that_were_asked_for(run_ranks: RunRanks) -> None:
    assert run_ranks(3, "speed", "methods") == ["ring"] * 3
