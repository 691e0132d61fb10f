"""The solved autoencoder of examples/federated: the same on any number of ranks, and it finds anomalies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.distributed.checks import federated
from tests.distributed.checks.direct_feedback import alone
from tests.effort import long

RunRanks = Callable[..., list[Any]]


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=long), pytest.param(4, marks=long)])
def test_the_same_model_whatever_the_ranks(run_ranks: RunRanks, world_size: int) -> None:
    for found in run_ranks(world_size, "federated", "compare", backend="gloo"):
        assert found["ranks"] == world_size
        assert found["away"] < 1e-9
        assert found["auc"] > 0.93
        assert found["fedavg_rounds"] <= 2
        assert (found["bytes"] > 0) == (world_size > 1)


def test_one_rank_finds_anomalies() -> None:
    with alone():
        found = federated.compare(0, 1)
    assert found["away"] < 1e-9 and found["auc"] > 0.93 and found["bytes"] == 0
