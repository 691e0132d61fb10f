"""Arrays in memory that ranks share: right wherever whose are, not read when they may be written to, given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.effort import long

RunRanks = Callable[..., list[Any]]


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=long), pytest.param(4, marks=long)])
def test_any_rank_may_share_its_arrays(run_ranks: RunRanks, world_size: int) -> None:
    assert run_ranks(world_size, "shared", "any_placement") == [True] * world_size


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=long)])
def test_nobody_reads_what_is_over(run_ranks: RunRanks, world_size: int) -> None:
    assert run_ranks(world_size, "shared", "written_at_once") == [True] * world_size


def test_arrays_come_and_go(run_ranks: RunRanks) -> None:
    for held in run_ranks(2, "shared", "memory_comes_back"):
        assert held < 16 << 20


def test_what_a_rank_has_given_up_is_nobodys_result(run_ranks: RunRanks) -> None:
    first, second = run_ranks(2, "shared", "failing_alone")
    assert first == "interrupted"
    assert "interrupted in broadcast" in second


def test_fsdp2_asks_the_group_for_its_buffers(run_ranks: RunRanks) -> None:
    for same, asked in run_ranks(2, "shared", "fsdp"):
        assert same
        assert asked > 0
