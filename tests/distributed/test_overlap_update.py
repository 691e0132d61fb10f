"""Optimizers whose state is sliced: parameters are those of DDP, and state goes to any number of ranks by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.effort import long

RunRanks = Callable[..., list[Any]]


@pytest.mark.parametrize(
    ("world_size", "backend"),
    [(1, "mycel"), (2, "mycel"), (3, "mycel"), (2, "gloo"), pytest.param(4, "mycel", marks=long)],
)
def test_parameters_are_those_of_ddp(run_ranks: RunRanks, world_size: int, backend: str) -> None:
    for found in run_ranks(world_size, "overlap_update", "beside_ddp", backend=backend):
        assert len(found) == 12
        for case, difference in found.items():
            if world_size <= 2 and not case.startswith("lamb"):
                assert difference == 0, (case, difference)  # two terms have one sum
            assert difference < 1e-4, (case, difference)


def test_several_backward_passes_and_a_limit(run_ranks: RunRanks) -> None:
    for difference in run_ranks(2, "overlap_update", "accumulated_and_clipped"):
        assert difference < 1e-5


def test_state_loads_on_other_numbers_of_ranks(run_ranks: RunRanks, tmp_path: Path) -> None:
    file = str(tmp_path / "state.pt")
    expected = run_ranks(3, "overlap_update", "save", file)[0]
    for size in (1, 2):
        for found in run_ranks(size, "overlap_update", "load", file):
            assert found == pytest.approx(expected, abs=1e-6)
