"""Stages of a pipeline whose ranks divide the sequence: two stages on two ranks each, against one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from tests.effort import long

RunRanks = Callable[..., list[Any]]
USUAL = ["torch 1f1b", "1f1b", "gpipe, experts", "zb_h1"]
OTHERS = ["torch gpipe", "interleaved", "zb_h1, sharded"]


@pytest.fixture
def run(run_ranks: RunRanks) -> RunRanks:
    return partial(run_ranks, preload=["mycel.sequence", "mycel.parallel", "mycel.moe"], timeout_s=240)


@pytest.mark.parametrize(
    ("backend", "names"), [("gloo", USUAL), pytest.param("mycel", [*USUAL, *OTHERS], marks=long)]
)
def test_losses_and_gradients_are_those_of_one_process(run: RunRanks, backend: str, names: list[str]) -> None:
    for found in run(4, "sequence_pipelines", "stages_over_ranks", names, backend=backend):
        assert list(found) == names
        assert not {name: error for name, error in found.items() if not error < 1e-12}
