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
