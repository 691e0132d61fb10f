"""Gradients of tasks over ranks: formulas, the same bits, DDP with heads, shards, local updates, wrong calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunRanks = Callable[..., list[Any]]


@pytest.mark.parametrize(
    ("world_size", "backend"),
    [
        (3, "mycel"),
        pytest.param(1, "gloo", marks=pytest.mark.long),
        pytest.param(2, "mycel", marks=pytest.mark.long),
        pytest.param(4, "gloo", marks=pytest.mark.long),
        pytest.param(8, "mycel", marks=pytest.mark.long),
    ],
)
def test_weighted_sums_with_the_same_bits(run_ranks: RunRanks, world_size: int, backend: str) -> None:
    """Parts of the tolerance: 1e-9 of the largest number in float64, 1e-4 in float32."""
    for rank, found in enumerate(run_ranks(world_size, "tasks", "formulas", backend=backend)):
        wrong = {case: share for case, share in found.items() if not share < 1}
        assert found and not wrong, f"rank {rank}: {wrong}"


def test_in_training(run_ranks: RunRanks) -> None:
    for rank, found in enumerate(run_ranks(3, "tasks", "in_training", backend="gloo")):
        wrong = {case: error for case, error in found.items() if not error < 2e-4}
        assert found and not wrong, f"rank {rank}: {wrong}"


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_several_tasks_a_rank(run_ranks: RunRanks, world_size: int) -> None:
    for rank, found in enumerate(run_ranks(world_size, "tasks", "several", backend="gloo")):
        wrong = {case: error for case, error in found.items() if not error < 2e-4}
        assert len(found) == 34 and not wrong, f"rank {rank}: {wrong}"


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_shards_of_replicas(run_ranks: RunRanks, world_size: int) -> None:
    for rank, found in enumerate(run_ranks(world_size, "tasks", "shards", backend="gloo")):
        wrong = {case: error for case, error in found.items() if not error < 1e-5}
        assert "refused" in found and not wrong, f"rank {rank}: {wrong}"


def test_wrong_calls_end_on_every_rank(run_ranks: RunRanks) -> None:
    for told in run_ranks(2, "tasks", "disagreements", backend="gloo", timeout_s=60.0):
        assert "tasks disagree about what they share" in told[0]
        assert "tasks disagree about what they share" in told[1]
        assert "no parameter fits 'tail.*'" in told[2]
        assert "tell(loss)" in told[3]
        assert told[4:] == ["not finite"] * 8
        assert all("\n" not in line for line in told)
