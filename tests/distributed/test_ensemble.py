"""Ensembles over ranks equal ensembles in one process; members with other batches are told so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunRanks = Callable[..., list[Any]]


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_equal_to_one_process(run_ranks: RunRanks, world_size: int) -> None:
    for rank, found in enumerate(run_ranks(world_size, "ensemble", "same_as_one_process", backend="gloo")):
        assert found.pop("sharing") < 1e-5, rank
        assert all(found.values()), f"rank {rank}: {found}"


@pytest.mark.long
def test_members_that_are_groups(run_ranks: RunRanks) -> None:
    assert run_ranks(4, "ensemble", "groups") == [True] * 4


def test_members_with_different_batches_are_told_on_every_rank(run_ranks: RunRanks) -> None:
    for told in run_ranks(2, "ensemble", "different_batches", backend="gloo", timeout_s=60.0):
        assert "[3, 4] examples by member" in told[0]
        assert "the same examples in the same order" in told[1]
        assert "overlap 3 of 2 members" in told[2]
        assert "expected [B, C] and [B]" in told[3]
        assert len(told) == 4
