"""The claims about sharded models, levels and sketches: their ways of communicating train and count bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunRanks = Callable[..., list[Any]]


@pytest.mark.parametrize(
    ("claim", "ways", "count"),
    [("qsdp", "timed_ways", 5), ("qsdp", "judged_ways", 5), ("lgreco", "ways", 5), ("tagc", "ways", 5)],
)
def test_the_ways_of_a_claim(run_ranks: RunRanks, claim: str, ways: str, count: int) -> None:
    found = run_ranks(2, "claims_fsdp", "trains", claim, ways, backend="gloo")
    assert found[0] == found[1]
    assert len(found[0]) == count
    for record in found[0]:
        assert 0 < record["validation_loss"] < 7, record
        assert record["metered_bytes"] is None or record["metered_bytes"] > 0, record
