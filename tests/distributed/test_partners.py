"""Schedules in which partners add each other's sums, run by ranks: right, and the same bits on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunRanks = Callable[..., list[Any]]


@pytest.mark.parametrize(
    ("world_size", "method"), [(2, "exchange"), (3, "exchange"), (4, "exchange"), (5, "recursive_doubling")]
)
def test_all_ranks_have_the_same_bits(run_ranks: RunRanks, world_size: int, method: str) -> None:
    env = {"MYCEL_METHODS": method, "MYCEL_PIECE_BYTES": "16384"}
    results = run_ranks(world_size, "partners", "bits", env=env)
    assert [result["method"] for result in results] == [method] * world_size
    assert all(result["digests"] == results[0]["digests"] for result in results), "bits differ between ranks"
    assert all(result["alike"] for result in results), "both engines add in the same order"


def test_what_is_small_is_exchanged_without_being_asked_for(run_ranks: RunRanks) -> None:
    results = run_ranks(2, "partners", "bits")
    assert {result["method"] for result in results} == {"exchange"}
    assert all(result["digests"] == results[0]["digests"] for result in results)
