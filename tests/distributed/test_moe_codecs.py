"""Coded exchanges: errors as stated, in both directions; bytes as counted; centroids in place of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.effort import long

RunRanks = Callable[..., list[Any]]


@pytest.mark.parametrize("dispatcher", ["all_to_all", "hierarchical"])
def test_rows_and_gradients_are_within_the_stated_error(run_ranks: RunRanks, dispatcher: str) -> None:
    hops = 2 if dispatcher == "hierarchical" else 1
    for result in run_ranks(4, "moe_codecs", "errors", dispatcher):
        assert len(result) == 8
        for name, (rows, gradients, stated, stated_of_gradients) in result.items():
            # The second hop rounds rows whose largest number may have grown by the first one's error.
            assert rows <= (1 + stated) ** hops - 1 + 1e-6, name
            assert gradients <= (1 + stated_of_gradients) ** hops - 1 + 1e-6, name
        assert result["int8 exact"][1] == 0.0


@pytest.mark.parametrize("dispatcher", ["all_to_all", "hierarchical"])
def test_layers_are_as_near_as_their_codec(run_ranks: RunRanks, dispatcher: str) -> None:
    limits = {"identity": 1e-6, "bf16": 0.02, "int8": 0.05, "fp8": 0.25, "int4": 0.5}
    for result in run_ranks(4, "moe_codecs", "layers", dispatcher):
        assert set(result) == set(limits)
        for name, errors in result.items():
            assert max(errors.values()) < limits[name], (name, errors)
            assert name == "identity" or max(errors.values()) > 1e-5


@pytest.mark.parametrize(
    ("size", "dispatcher"),
    [pytest.param(1, "all_to_all", marks=long), (2, "all_to_all"), pytest.param(4, "hierarchical", marks=long)],
)
def test_a_run_that_goes_on_rounds_as_the_unbroken_one(run_ranks: RunRanks, size: int, dispatcher: str) -> None:
    through = run_ranks(size, "moe_codecs", "trained", dispatcher, 0, None)
    saved = [middle for middle, _ in through]
    again = run_ranks(size, "moe_codecs", "trained", dispatcher, 0, saved)
    assert [weights for _, weights in again] == [weights for _, weights in through]
    other = run_ranks(size, "moe_codecs", "trained", dispatcher, 1, None)
    assert any(weights != others for (_, weights), (_, others) in zip(through, other, strict=True))


def test_bytes_are_as_counted(run_ranks: RunRanks) -> None:
    for totals in run_ranks(4, "moe_codecs", "metered"):
        for name, (metered, counted) in totals.items():
            assert metered == counted, name


@pytest.mark.parametrize("dispatcher", ["all_to_all", "hierarchical"])
def test_centroids_travel_as_if_experts_were_here(run_ranks: RunRanks, dispatcher: str) -> None:
    for rank, errors in enumerate(run_ranks(4, "moe_codecs", "centroids", dispatcher)):
        share = errors.pop("share sent")
        assert len(errors) > 5 and max(errors.values()) < 1e-6, errors
        assert 0.1 < share < 0.9 or rank == 1  # which has no tokens


def test_centroids_are_fewer_bytes(run_ranks: RunRanks) -> None:
    totals = run_ranks(2, "moe_codecs", "metered_centroids")
    assert sum(rows for _, rows in totals) > 0
    assert all(centroids * 10 == rows for centroids, rows in totals)


def test_nothing_is_compiled_in_an_exchange(run_ranks: RunRanks) -> None:
    for found in run_ranks(2, "moe_codecs", "compiles_late", "int8", backend="gloo"):
        assert found == {"same": True, "any": True}
