"""Combiners over ranks equal their formulas on whole vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mycel.comm.bundle import Packed
from mycel.data_parallel.combine import Adasum, combine_gradients, combine_rows
from mycel.errors import UsageError

RunRanks = Callable[..., list[Any]]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_formulas_in_float64(run_ranks: RunRanks, world_size: int) -> None:
    for rank, found in enumerate(run_ranks(world_size, "combine", "errors", "float64", backend="gloo")):
        wrong = {case: error for case, error in found.items() if not error < 1e-12}
        assert found and not wrong, f"rank {rank}: {wrong}"


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 5e-3)])
def test_formulas_over_mycel(run_ranks: RunRanks, dtype: str, tolerance: float) -> None:
    for found in run_ranks(3, "combine", "errors", dtype):
        assert found and all(error < tolerance for error in found.values()), found


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_rows(run_ranks: RunRanks, world_size: int) -> None:
    results = run_ranks(world_size, "combine", "rows", backend="gloo" if world_size == 3 else "mycel")
    for by_rank in zip(*results, strict=True):
        assert all(error < 1e-12 for error, _ in by_rank)
        assert len({count for _, count in by_rank}) == 1


def test_rows_of_ranks_without_any(run_ranks: RunRanks) -> None:
    assert run_ranks(2, "combine", "no_rows", timeout_s=40.0) == [3, 3]


@pytest.mark.parametrize("kind", ["adasum", "sum"])
@pytest.mark.parametrize("backend", ["mycel", "gloo"])
def test_gradients_of_ddp(run_ranks: RunRanks, backend: str, kind: str) -> None:
    for worst in run_ranks(3, "combine", "ddp", kind, backend=backend):
        assert worst < 1e-4


def test_half_types_are_held_in_float32_and_types_apart() -> None:
    tensors = [torch.ones(2, 2, dtype=torch.bfloat16), torch.full((3,), 2.0, dtype=torch.float64), torch.zeros(1)]
    packed = Packed(tensors)
    packed.copy_from(tensors)
    assert [bundle.flat.dtype for bundle in packed.bundles] == [torch.float32, torch.float64]
    assert packed.num_bytes == 5 * 4 + 3 * 8
    packed.bundles[1].flat.mul_(2)
    packed.copy_to(tensors)
    assert tensors[1].tolist() == [4.0, 4.0, 4.0]


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UsageError, match="DistributedDataParallel"):
        combine_gradients(nn.Linear(2, 2), Adasum())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="known: model"):
        combine_rows(torch.arange(2), torch.ones(2, 3), None, combiner="median")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"expected \[k\] and \[k, d\]"):
        combine_rows(torch.arange(2), torch.ones(3, 3), None)  # type: ignore[arg-type]
