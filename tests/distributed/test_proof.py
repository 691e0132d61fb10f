"""Programs that were broken after their schedule was verified are refused by the ranks that would run them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunRanks = Callable[..., list[Any]]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("how", ["drop", "redirect", "reorder", "forget"])
def test_broken_everywhere(run_ranks: RunRanks, world_size: int, how: str) -> None:
    for heard in run_ranks(world_size, "proof", "refused", how, list(range(world_size))):
        assert "refuses to run all_reduce" in heard[0]
        assert " instruction " in heard[0]
        assert "failed earlier" in heard[1]


def test_broken_on_one_rank(run_ranks: RunRanks) -> None:
    """The others would run right programs, and hear of it instead of waiting for their time-out."""
    for heard in run_ranks(3, "proof", "refused", "redirect", [2]):
        assert "rank 2 refuses to run all_reduce" in heard[0]
        assert "failed earlier" in heard[1]


def test_every_size_is_looked_at_where_that_is_asked_for(run_ranks: RunRanks) -> None:
    env = {"MYCEL_VERIFY": "sizes", "MYCEL_PIECE_BYTES": "32"}
    assert run_ranks(2, "proof", "every_size", env=env) == [1, 1]


def test_broken_after_the_schedule_has_run(run_ranks: RunRanks) -> None:
    assert run_ranks(2, "proof", "broken_later") == [1, 1]
