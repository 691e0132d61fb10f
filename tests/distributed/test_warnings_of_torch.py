"""Nothing that mycel does makes torch warn: each wing runs with every warning an error in every rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

RunRanks = Callable[..., list[Any]]


@pytest.mark.parametrize("wing", ["collectives", "replicated", "sharded", "apart", "experts"])
def test_a_wing_runs_without_a_warning(run_ranks: RunRanks, wing: str) -> None:
    found = run_ranks(2, "warnings_of_torch", wing, strict=True)
    assert all(math.isfinite(loss) for loss in found)


def test_ranks_that_are_strict_hear_what_others_do_not(run_ranks: RunRanks) -> None:
    assert run_ranks(1, "warnings_of_torch", "heard", strict=True, backend=None) == ["an old name"]
    assert run_ranks(1, "warnings_of_torch", "heard", backend=None) == ["nothing"]
