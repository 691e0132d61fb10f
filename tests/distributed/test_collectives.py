"""Collectives over the backend: every form, type, operation and size, also at odd world sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunRanks = Callable[..., list[Any]]
CHECKS = Path(__file__).resolve().parent / "checks"


def assert_same_bits(results: list[dict[str, Any]]) -> None:
    for check, value in results[0].items():
        assert all(result[check] == value for result in results), f"{check}: ranks got different bits"


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 7, 8])
def test_everything(run_ranks: RunRanks, world_size: int) -> None:
    results = run_ranks(world_size, "collectives", "everything")
    assert set(results[0]) >= {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "not_scheduled"}
    assert len(results[0]["all_reduce"]) == 127
    assert_same_bits(results)


def test_operations_that_gloo_carries_out_do_not_hang(run_ranks: RunRanks) -> None:
    run_ranks(4, "collectives", "many_not_scheduled")
