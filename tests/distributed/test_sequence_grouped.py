"""Groups of unequal degree side by side in processes: under DDP and FSDP2 all is as in one; a lost rank is named."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from tests.effort import long

pytest.importorskip("transformers", reason="transformers is not installed")

RunRanks = Callable[..., list[Any]]


@pytest.fixture
def run(run_ranks: RunRanks) -> RunRanks:
    return partial(run_ranks, preload=["mycel.sequence", "transformers.models.llama.modeling_llama"], timeout_s=120)


@pytest.mark.parametrize(
    ("world_size", "backend"),
    [(3, "mycel"), pytest.param(3, "gloo", marks=long), pytest.param(4, "mycel", marks=long)],
)
def test_losses_and_gradients_are_those_of_one_process(run: RunRanks, world_size: int, backend: str) -> None:
    for found in run(world_size, "sequence_grouped", "everything", backend=backend):
        assert len(found["gradients"]) == 6
        wrong = {name: far for name, far in found["gradients"].items() if max(far) > 1e-12}
        assert not wrong, wrong
        assert found["losses"] == pytest.approx(found["wanted"], rel=1e-5)
        assert any(len(set(degrees)) > 1 for degrees in found["degrees"])


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_killed_in_the_agreement_is_named(run: RunRanks, victim: int) -> None:
    found = [of for of in run(3, "sequence_grouped", "lost", victim, backend=None) if of is not None]
    assert len(found) == 2
    for kind, message in found:
        assert kind == "PeerLostError" and f"rank {victim} " in message
