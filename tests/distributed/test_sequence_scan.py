"""Scans of states and halos over real ranks: those of one process, and a rank that is killed inside is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.effort import long

RunRanks = Callable[..., list[Any]]
PRELOAD = ["mycel.sequence"]


@pytest.mark.parametrize(
    ("world_size", "backend"),
    [(3, "mycel"), (3, "gloo"), *(pytest.param(n, b, marks=long) for n in (2, 4, 7) for b in ("mycel", "gloo"))],
)
def test_every_way_is_the_fold_of_one_process(run_ranks: RunRanks, world_size: int, backend: str) -> None:
    found = run_ranks(world_size, "sequence_scan", "every_way", backend=backend, preload=PRELOAD)
    for of_rank in found:
        assert len(of_rank["errors"]) == 4 * ((1 + 2 + 1) * 5 * 3 + 6)
        assert not {n: e for n, e in of_rank["errors"].items() if not e < 1e-12}
        assert of_rank["said"] == found[0]["said"]


@pytest.mark.parametrize(("world_size", "backend"), [(3, "mycel"), (2, "gloo")])
def test_halos_are_what_is_there(run_ranks: RunRanks, world_size: int, backend: str) -> None:
    for errors in run_ranks(world_size, "sequence_scan", "halos", backend=backend, preload=PRELOAD):
        assert len(errors) == 2 * (2 + 5) and max(errors) < 1e-12


@pytest.mark.parametrize(
    "what",
    [
        "chain",
        "two_exchanges",
        "halo",
        *(pytest.param(w, marks=long) for w in ("all_gather", "doubling", "two_levels")),
    ],
)
def test_a_rank_that_is_killed_inside_is_named(run_ranks: RunRanks, what: str) -> None:
    run_ranks(3, "sequence_scan", "killed", what, backend=None, preload=PRELOAD, timeout_s=90)
