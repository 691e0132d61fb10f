"""Permutations of blocks between ranks, by way of others where that is faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunRanks = Callable[..., list[Any]]
BOXES = "two_boxes:ranks=4,inside=1600 Mbit/s,between=200 Mbit/s"


@pytest.mark.parametrize(
    ("size", "fabric", "method"),
    [
        (4, BOXES, "permute"),
        (3, "ring:ranks=3,bandwidth=1 GB/s", ""),
        (2, None, "direct|permute"),
    ],
)
def test_blocks_arrive_and_wrong_lengths_are_refused(
    run_ranks: RunRanks, size: int, fabric: str | None, method: str
) -> None:
    env = {} if fabric is None else {"MYCEL_TOPOLOGY": fabric}
    for chosen, *wrong in run_ranks(size, "permute", "moved", backend="mycel", env=env):
        assert not wrong
        assert not method or chosen in method.split("|")


def test_a_ring_of_attention_goes_over_all_links(run_ranks: RunRanks) -> None:
    for found in run_ranks(4, "permute", "ring", backend="mycel", env={"MYCEL_TOPOLOGY": BOXES}):
        assert found["apart"] < 1e-14


def test_a_lost_rank_is_named(run_ranks: RunRanks) -> None:
    run_ranks(4, "permute", "killed", backend=None, env={"MYCEL_TOPOLOGY": BOXES}, timeout_s=90)
