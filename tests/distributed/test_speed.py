"""What ranks choose, by whose numbers, and over which sockets bytes go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunRanks = Callable[..., list[Any]]


@pytest.mark.parametrize("world_size", [3, 4])
def test_all_ranks_choose_by_the_numbers_of_rank_0(run_ranks: RunRanks, world_size: int) -> None:
    by_rank = run_ranks(world_size, "speed", "choices")
    assert all(found == by_rank[0] for found in by_rank)
    first, second = by_rank[0]
    assert any(first[key][:2] != second[key][:2] for key in first), "the numbers made no difference to any choice"


@pytest.mark.parametrize("world_size", [2, 4])
def test_both_kinds_of_sockets(run_ranks: RunRanks, world_size: int) -> None:
    for found in run_ranks(world_size, "speed", "sockets"):
        assert found == {"tcp": ["AF_INET"], "unix": ["AF_UNIX"]}


def test_methods_that_were_asked_for(run_ranks: RunRanks) -> None:
    assert run_ranks(3, "speed", "methods") == ["ring"] * 3
