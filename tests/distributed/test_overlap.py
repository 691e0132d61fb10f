"""Overlapped operators equal whole arrays in float64, forwards and backwards, on every number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.effort import long

RunRanks = Callable[..., list[Any]]


@pytest.mark.parametrize(
    ("world_size", "backend"),
    [
        (1, "mycel"),
        (2, "mycel"),
        (3, "mycel"),
        (2, "gloo"),
        *(pytest.param(4, b, marks=long) for b in ("mycel", "gloo")),
    ],
)
def test_operators_are_what_whole_arrays_give(run_ranks: RunRanks, world_size: int, backend: str) -> None:
    for errors in run_ranks(world_size, "overlap", "every_combination", "float64", backend=backend):
        assert len(errors) > 100
        assert not {name: e for name, e in errors.items() if e > 1e-12}


@pytest.mark.parametrize(
    ("world_size", "first", "backend"), [(2, 1, "mycel"), (3, 1, "mycel"), (4, 2, "mycel"), (3, 2, "gloo")]
)
def test_slices_cross_a_boundary_of_stages(run_ranks: RunRanks, world_size: int, first: int, backend: str) -> None:
    for rows in (7, 1):
        results = run_ranks(world_size, "overlap", "through_a_boundary", first, rows, backend=backend)
        for errors in results:
            assert len(errors) == 8 and max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("case", ["attention_output", "adam", "between_layers"])
def test_rewritten_programs_run_to_the_same_results(run_ranks: RunRanks, world_size: int, case: str) -> None:
    for found in run_ranks(world_size, "overlap", "rewritten_programs", case, 30):
        assert found["count"] >= 8 and {"fuse", "overlap"} <= found["kinds"]
