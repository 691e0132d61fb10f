"""The MoE layer over ranks equals a token-by-token reference in float64, forward and in every gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.effort import long

RunRanks = Callable[..., list[Any]]
#: Of float32 results, relative to the reference.
TOLERANCE = 1e-6


def assert_close(results: list[dict[str, dict[str, float]]]) -> None:
    for rank, result in enumerate(results):
        assert result
        worst = {(case, name): e for case, errors in result.items() for name, e in errors.items() if e > TOLERANCE}
        assert not worst, f"rank {rank}: {worst}"


DISPATCHERS = ["all_to_all", "hierarchical", "all_gather", "all_reduce"]


@pytest.mark.parametrize(
    ("world_size", "backend"),
    [
        *((size, "mycel") for size in (1, 3, 4)),
        (2, "gloo"),
        pytest.param(2, "mycel", marks=long),
        *(pytest.param(size, "gloo", marks=long) for size in (1, 3, 4)),
    ],
)
def test_every_router_capacity_and_dispatcher(run_ranks: RunRanks, world_size: int, backend: str) -> None:
    assert_close(run_ranks(world_size, "moe", "every_combination", DISPATCHERS, backend=backend))


@pytest.mark.parametrize("form", ["by hand", "fsdp", "ddp"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_of_expert_times_data_parallel(run_ranks: RunRanks, world_size: int, form: str) -> None:
    assert_close(run_ranks(world_size, "moe", "expert_and_data", form))


def test_gradients_of_summed_losses(run_ranks: RunRanks) -> None:
    for errors in run_ranks(3, "moe", "summed_losses"):
        assert errors and max(errors.values()) < TOLERANCE


@pytest.mark.parametrize("world_size", [2, 4])
def test_checkpoints_load_at_every_division(run_ranks: RunRanks, world_size: int, tmp_path: Path) -> None:
    for good in run_ranks(world_size, "moe", "reload", str(tmp_path / "saved")):
        assert len(good) >= 4 and all(good.values()), good


@pytest.mark.parametrize("top_k", [2, 4])
def test_bytes_between_nodes_are_as_counted(run_ranks: RunRanks, top_k: int) -> None:
    results = run_ranks(4, "moe", "bytes_between_nodes", top_k)
    for totals in results:
        for form, (metered, counted) in totals.items():
            assert metered == counted, form
    sent = {form: metered for form, (metered, _) in results[0].items()}
    assert sent["all_to_all bf16"] * 2 == sent["all_to_all identity"]
    if top_k == 4:  # with so many experts a token, most of them share a node
        assert sent["hierarchical identity"] < 0.8 * sent["all_to_all identity"]


def test_rounded_rows_are_near(run_ranks: RunRanks) -> None:
    for errors in run_ranks(3, "moe", "rounded_rows"):
        assert 1e-6 < max(errors.values()) < 2e-2, errors


def test_dispatchers_that_do_not_fit_are_named(run_ranks: RunRanks) -> None:
    for said in run_ranks(2, "moe", "wrong_meshes"):
        assert said == [
            "dispatcher 'hierarchical' wants a mesh of 2 dimensions, got 1",
            "dispatcher 'local' wants a mesh of 0 dimensions, got 1",
            "dispatcher 'all_gather' sends tokens as they are; codecs are for the all-to-all ones",
        ]


@pytest.mark.parametrize("dispatchers", [[], pytest.param(DISPATCHERS, marks=long)])
def test_compiled_layers_stay_right(run_ranks: RunRanks, dispatchers: list[str]) -> None:
    assert_close(run_ranks(2, "moe", "compiled", dispatchers))
