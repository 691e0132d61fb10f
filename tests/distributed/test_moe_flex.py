"""One layout of experts serves every degree of parallelism, exchange and pipelining; nothing moves on a switch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunRanks = Callable[..., list[Any]]
#: Of float32 results, relative to the reference.
TOLERANCE = 1e-6


def assert_close(results: list[dict[str, dict[str, float]]], least: int) -> None:
    for rank, result in enumerate(results):
        assert len(result) >= least
        worst = {(case, name): e for case, errors in result.items() for name, e in errors.items() if e > TOLERANCE}
        assert not worst, f"rank {rank}: {worst}"


@pytest.mark.parametrize(
    ("world_size", "shapes"),
    [
        (2, [(1, None), (3, 2)]),  # fewer experts than ranks: slices without being asked for; more, in slices
        (3, [(4, None)]),
        (4, [(2, None), (1, None), (5, None), (3, 2)]),  # with one expert, r = 2 is between
    ],
)
def test_every_way_gives_the_reference(
    run_ranks: RunRanks, world_size: int, shapes: list[tuple[int, int | None]]
) -> None:
    assert_close(run_ranks(world_size, "moe_flex", "every_way", shapes), least=10)


def test_switching_moves_nothing(run_ranks: RunRanks) -> None:
    for found in run_ranks(4, "moe_flex", "switching"):
        assert found["unmoved"] and found["apart"] < 1e-5
        for r, (first, again) in found["bytes"].items():
            assert first == again, r  # what came before does not show
            assert first.get("weights", 0) == {0: 3, 1: 3, 2: 1, 4: 0}[r] * found["weights"], r


def test_slices_load_from_every_division(run_ranks: RunRanks, tmp_path: Path) -> None:
    for found in run_ranks(4, "moe_flex", "reloading", str(tmp_path / "saved")):
        assert len(found) == 4 and all(found.values()), found


def test_duplicates_are_not_sent(run_ranks: RunRanks) -> None:
    for found in run_ranks(4, "moe_flex", "token_replicas"):
        assert max(found["errors"].values()) < TOLERANCE, found["errors"]
        dropped, all_of_them = found["bytes"]
        assert dropped < 0.55 * all_of_them


@pytest.mark.parametrize("plan", [{}, {"degree": 2, "algorithm": "all_to_all"}, {"algorithm": "all_gather"}])
def test_recomputation_sends_nothing_again(run_ranks: RunRanks, plan: dict[str, Any]) -> None:
    for found in run_ranks(4, "moe_flex", "kept_exchanges", plan):
        (plain, _), (again, same_again), (kept, same_kept) = found["none"], found["again"], found["kept"]
        assert same_again and same_kept
        assert kept == plain < again


def test_choices_are_alike_everywhere_and_remembered(run_ranks: RunRanks, tmp_path: Path) -> None:
    results = run_ranks(4, "moe_flex", "adapting", str(tmp_path))
    first = results[0]
    for found in results:
        assert found["apart"] < 1e-5
        assert found["chosen"] == first["chosen"]
        decided = {bucket: plan for bucket, plan in found["chosen"].items() if plan is not None}
        assert {(2, 4, True), (2, 6, True)} <= set(decided)
        assert found["kept"] == decided
        assert found["table"].count("<- fastest of 2 tried") == len(decided)
