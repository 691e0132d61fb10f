"""Torch's own ``context_parallel`` calls on CPU tensors, over our backend and another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.effort import long

RunRanks = Callable[..., list[Any]]
PRELOAD = ["mycel.sequence", "torch.distributed.tensor.experimental"]


@pytest.mark.parametrize(
    ("world_size", "backend"), [(3, "mycel"), *(pytest.param(n, "gloo", marks=long) for n in (2, 4))]
)
def test_torchs_own_calls_have_the_results_of_one_process(run_ranks: RunRanks, world_size: int, backend: str) -> None:
    for found in run_ranks(world_size, "context_parallel", "served", backend=backend, preload=PRELOAD):
        assert len(found["errors"]) == 16
        assert not {name: error for name, error in found["errors"].items() if not error < 1e-12}
        assert found["lengths"] == 2  # one for each balancing, however many calls
        assert "an attention mask inside context_parallel" in found["said"]["mask"]
        assert "attention of 4 queries to 2 keys" in found["said"]["parts"]
        assert found["left"]  # torch's table is its own again
