"""Training with encrypted sums equals training with the same sums in the clear; wrong calls end on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mycel.data_parallel.compress.sum_key import SumKey

pytest.importorskip("tenseal", reason="the extra encrypted is not installed")

RunRanks = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    file: Path = tmp_path_factory.mktemp("key") / "key"
    SumKey.make().save(file)
    return str(file)


@pytest.mark.parametrize(("world_size", "backend"), [(2, "mycel"), pytest.param(3, "gloo", marks=pytest.mark.long)])
def test_training_is_that_of_integer_sums(run_ranks: RunRanks, world_size: int, backend: str, key_file: str) -> None:
    for found in run_ranks(world_size, "encrypted", "in_training", key_file, backend=backend):
        assert all(found.values()), found


def test_wrong_calls_end_on_every_rank(run_ranks: RunRanks, key_file: str) -> None:
    for told in run_ranks(2, "encrypted", "refused", key_file, backend="gloo", timeout_s=100.0):
        assert "ranks have different keys" in told[0]
        assert "not finite on some ranks" in told[1]
        assert "fully_shard gathers weights in the clear" in told[2]
        assert len(told) == 3
