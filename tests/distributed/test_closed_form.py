"""Closed form over ranks: one model whatever the ranks, bytes as computed, and nobody waits for who has no data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.effort import long

RunRanks = Callable[..., list[Any]]


@pytest.mark.parametrize(
    ("world_size", "backend"),
    [(3, "mycel"), pytest.param(2, "gloo", marks=long), pytest.param(4, "mycel", marks=long)],
)
def test_one_model_over_ranks(run_ranks: RunRanks, world_size: int, backend: str) -> None:
    for found in run_ranks(world_size, "closed_form", "everything", backend=backend):
        assert max(found["away"]) < 1e-9
        assert all(found["same"])
        assert found["probe"] < 1e-6
        assert {"sums", "factors"} == set(found["forms"])
        for sent, expected, header in found["bytes"]:
            assert sent == pytest.approx(expected, abs=16 * world_size)  # integer division by ranks
            assert header == 512 * (world_size - 1)
        empty, other, broken, probe, form = found["complaints"]
        assert empty.startswith(f"rank 1 of {world_size} has no examples; give it some, or leave it out")
        assert other.startswith("rank 1 has a layer of (activation, inputs, outputs, bias) ['linear', 10, 1, True]")
        assert broken == f"rank {world_size - 1}: example 0 has an input that is not finite; leave such examples out"
        assert probe.startswith("rank 0: no examples for the probe")
        assert form.startswith("rank 0 has sums, of which no factors are made again")
