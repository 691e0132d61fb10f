"""Overlapped operators' gradients by differences, errors beside plain torch's, and activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.effort import long

RunRanks = Callable[..., list[Any]]


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=long)])
def test_gradients_are_those_of_differences(run_ranks: RunRanks, world_size: int) -> None:
    for found in run_ranks(world_size, "overlap_numbers", "gradients_by_differences"):
        assert len(found) == 3 + 6 + 6
        assert max(found.values()) < 1e-6, found


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_errors_are_at_most_twice_plain_torchs(run_ranks: RunRanks, world_size: int, kind: str) -> None:
    for found in run_ranks(world_size, "overlap_numbers", "beside_plain", kind):
        assert len(found) == 12
        assert not {what: pair for what, pair in found.items() if pair[0] > 2 * pair[1]}


@pytest.mark.parametrize("world_size", [2, 3])
def test_nothing_is_sent_again_for_checkpoints(run_ranks: RunRanks, world_size: int) -> None:
    for same in run_ranks(world_size, "overlap_numbers", "checkpointed"):
        assert same == {"gathered": True, "scattered": True, "everywhere": True}
