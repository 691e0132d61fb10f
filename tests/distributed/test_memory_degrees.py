"""Ranks share sequences where that is what makes a model fit, and learn what one process does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunRanks = Callable[..., list[Any]]


@pytest.mark.parametrize(("backend", "world_size"), [("gloo", 2), pytest.param("mycel", 4, marks=pytest.mark.long)])
def test_degrees_are_chosen_that_fit_and_losses_are_those_of_one_process(
    run_ranks: RunRanks, backend: str, world_size: int
) -> None:
    by_rank = run_ranks(world_size, "memory_degrees", "fits", backend=backend)
    for found in by_rank:
        for one, first in zip(found, by_rank[0], strict=True):
            assert (one["way"], one["degree"], one["choices"]) == (first["way"], first["degree"], first["choices"])
            costs = {(degree, way): s * degree for degree, way, _, s in one["choices"] if s is not None}
            assert costs[one["degree"], one["way"]] == min(costs.values()), one["told"]
            assert one["losses"] == pytest.approx(one["wanted"], rel=1e-4), one
            assert one["given back"] and f"* {one['way']}, {one['degree']} rank" in one["told"]
        enough, half, least = found
        assert (enough["degree"], enough["way"], len(enough["choices"])) == (1, "keep", 4)
        assert {degree for degree, *_ in half["choices"]} >= {1, 2}
        assert least["degree"] == world_size, least["told"]


@pytest.mark.long
def test_models_of_hugging_face_unedited(run_ranks: RunRanks) -> None:
    by_rank = run_ranks(2, "memory_degrees", "hugging_face", backend="gloo", preload=("transformers",))
    for found in by_rank:
        assert (found[0]["way"], found[0]["degree"]) == ("keep", 1)
        for one in found:
            assert one["losses"] == pytest.approx(one["wanted"], rel=1e-4), one


def test_peaks_are_those_that_are_counted(run_ranks: RunRanks) -> None:
    for ratios in run_ranks(2, "memory_degrees", "predicted", backend="gloo"):
        assert all(0.98 <= ratio <= 1.08 for ratio in ratios.values()), ratios


def test_what_cannot_be_shared_is_refused_alike(run_ranks: RunRanks) -> None:
    for small, other, wrong, places, shape in run_ranks(2, "memory_degrees", "refused", backend="gloo"):
        assert (
            "nothing fits; nearest is " in small and "ranks a sequence" in small and "more ranks, a smaller" in small
        )
        assert other == "a degree of 3 does not divide 2 ranks; these do: 1, 2"
        assert wrong.startswith("expected degrees, got list")
        assert "which of several by place have tokens, nobody says" in places
        assert shape == "(1, 384)"
