"""What torch lets a program do with a process group works over mycel, with the results that Gloo gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunRanks = Callable[..., list[Any]]


@pytest.mark.parametrize(
    "check",
    ["objects", "layouts", "kinds_of_tensors", "point_to_point", "sparse", "groups_in_flight", "coalesced"],
)
def test_results(run_ranks: RunRanks, check: str) -> None:
    run_ranks(3, "completeness", check)


def test_one_graph(run_ranks: RunRanks) -> None:
    run_ranks(2, "completeness", "compiled")


def test_between_graphs(run_ranks: RunRanks) -> None:
    ours, theirs = (run_ranks(2, "completeness", "graph_breaks", backend=name) for name in ("mycel", "gloo"))
    assert ours == [pytest.approx(losses, rel=1e-5) for losses in theirs]


@pytest.mark.parametrize("check", ["hooks", "gradients", "meshes", "custom_communication", "zero"])
def test_same_as_gloo(run_ranks: RunRanks, check: str) -> None:
    ours = run_ranks(4, "completeness", check)
    theirs = run_ranks(4, "completeness", check, backend="gloo")
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=1e-5)


def test_checkpoints(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(4, "completeness", "checkpoint", str(tmp_path))


def test_one_process_group_after_the_other_leaves_nothing(run_ranks: RunRanks) -> None:
    for left in run_ranks(3, "completeness", "many_lives", "mycel", 6, backend=None):
        descriptors, threads, resident = zip(*left, strict=True)
        assert descriptors[-1] == descriptors[1], left
        assert threads[-1] == threads[1], left
        assert resident[-1] < resident[1] * 1.05, left
