"""Attention along sequences over real ranks: every way is dense softmax, and a rank that is killed is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.effort import long

RunRanks = Callable[..., list[Any]]


@pytest.mark.parametrize(
    ("world_size", "backend"),
    [(3, "mycel"), (3, "gloo"), *(pytest.param(n, b, marks=long) for n in (2, 4) for b in ("mycel", "gloo"))],
)
def test_every_way_is_dense_softmax(run_ranks: RunRanks, world_size: int, backend: str) -> None:
    found = run_ranks(world_size, "sequence_attention", "every_way", backend=backend, preload=["mycel.sequence"])
    for of_rank in found:
        assert len(of_rank["errors"]) >= 40 and not {n: e for n, e in of_rank["errors"].items() if not e < 1e-12}
        assert (of_rank["first"], of_rank["tuned"]) == (found[0]["first"], found[0]["tuned"])


@pytest.mark.parametrize("way", ["sliced", "ring"])
def test_a_rank_that_is_killed_inside_a_slice_is_named(run_ranks: RunRanks, way: str) -> None:
    run_ranks(3, "sequence_attention", "killed", way, backend=None, preload=["mycel.sequence"], timeout_s=90)
