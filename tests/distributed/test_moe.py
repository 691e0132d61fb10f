"""The MoE layer over ranks equals a token-by-token reference in float64, forward and in every gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunRanks = Callable[..., list[Any]]
#: Of float32 results, relative to the reference.
TOLERANCE = 1e-6


def assert_close(results: list[dict[str, dict[str, float]]]) -> None:
    for rank, result in enumerate(results):
        assert result
        worst = {(case, name): e for case, errors in result.items() for name, e in errors.items() if e > TOLERANCE}
        assert not worst, f"rank {rank}: {worst}"


DISPATCHERS = ["all_to_all", "hierarchical", "all_gather", "all_reduce"]


@pytest.mark.parametrize("backend", ["mycel", "gloo"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_router_capacity_and_dispatcher(run_ranks: RunRanks, world_size: int, backend: str) -> None:
    assert_close(run_ranks(world_size, "moe", "every_combination", DISPATCHERS, backend=backend))
