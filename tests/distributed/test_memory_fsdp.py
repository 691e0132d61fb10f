"""What ``fully_shard`` has sharded trains within a budget: its losses, checkpoints and bytes, over ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunRanks = Callable[..., list[Any]]


def is_right(found: dict[str, Any]) -> None:
    for name in ("layers", "two micro-batches", "kept gathered"):
        one = found[name]
        assert one["way"].startswith("residency"), (name, one)
        assert one["same"] and one["closed"] and one["off"] == 0 and one["moved"] > 0, (name, one)
    assert found["far"] and found["kept"] and found["loaded"], found


@pytest.mark.parametrize(
    ("backend", "world_size"),
    [("gloo", 2), pytest.param("mycel", 2, marks=pytest.mark.long), pytest.param("mycel", 4, marks=pytest.mark.long)],
)
def test_losses_and_checkpoints_are_those_of_fsdp2(
    run_ranks: RunRanks, tmp_path: Path, backend: str, world_size: int
) -> None:
    for found in run_ranks(world_size, "memory_fsdp", "trains", str(tmp_path / "saved"), backend=backend):
        is_right(found)


def test_budgets_are_kept_and_ranks_choose_alike(run_ranks: RunRanks) -> None:
    for found in run_ranks(3, "memory_fsdp", "fits"):
        assert found["way"] == "keep" and found["within"] and found["planned"], found
        assert found["ratios"] and all(0.98 <= ratio <= 1.08 for ratio in found["ratios"]), found
        assert found["moved"] == sorted(found["moved"], reverse=True) and found["moved"][-1] == 0, found
        assert "nothing fits" in found["refused"]
        assert "call fully_shard on the model, last" in found["in part"]
