"""MASHA follows its algorithms to the solution, HD-PiSSA equals its formula; both go on where they were saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.effort import long

RunRanks = Callable[..., list[Any]]


@pytest.mark.parametrize(
    ("world_size", "backend", "steps"),
    [
        (1, "gloo", 300),
        pytest.param(1, "gloo", 800, marks=long),
        (2, "mycel", 0),
        (3, "gloo", 0),
        (4, "mycel", 0),
        pytest.param(2, "mycel", 800, marks=long),
        pytest.param(3, "gloo", 800, marks=long),
        pytest.param(4, "mycel", 800, marks=long),
    ],
)
def test_masha_follows_its_algorithm(run_ranks: RunRanks, world_size: int, backend: str, steps: int) -> None:
    """The first nine steps are the algorithm's, and 300 or 800 more come near the solution: it converges linearly."""
    left = {0: float("inf"), 300: 1e-3, 800: 1e-9}[steps]
    for found in run_ranks(world_size, "beyond_averaging", "masha_follows_its_algorithm", steps, backend=backend):
        assert set(found) == {"random_k", "top_k", "int8"}
        for kind, (early, late, sent) in found.items():
            assert early < 1e-6, kind  # payloads are float32
            assert late < left, kind
            assert sent == pytest.approx(1.0), kind


@pytest.mark.parametrize("kind", ["random_k", "top_k"])
def test_masha_goes_on_with_the_same_bits(run_ranks: RunRanks, kind: str) -> None:
    assert run_ranks(3, "beyond_averaging", "masha_goes_on", kind) == [True] * 3


def test_masha_goes_on_with_fewer_and_more_ranks(run_ranks: RunRanks, tmp_path: Path) -> None:
    file = str(tmp_path / "saved.pt")
    left = [
        run_ranks(size, "beyond_averaging", "masha_part_of_a_run", "top_k", file, 60, first)[0]
        for size, first in ((3, True), (2, False), (4, False))
    ]
    assert left[1] < left[0] / 3 and left[2] < left[1] / 3


def test_masha_under_a_policy(run_ranks: RunRanks) -> None:
    for found in run_ranks(2, "beyond_averaging", "masha_options", backend="gloo"):
        # 4096 weights in 4 bits with a scale each 1024, 64 biases and 65 weights exact, against bfloat16.
        assert found["probability"] == pytest.approx((4096 / 2 + 16 + 4 * 128) / (2 * (4096 + 128)))
        assert found["steps"] == 3 and found["ratio"] > 1


@pytest.mark.parametrize(("world_size", "backend"), [(1, "gloo"), (2, "mycel"), (4, "gloo")])
def test_hd_pissa_equals_its_formula(run_ranks: RunRanks, world_size: int, backend: str) -> None:
    answers = run_ranks(world_size, "beyond_averaging", "hd_pissa_equals_its_formula", backend=backend)
    assert len({found["bits"] for found in answers}) == 1
    for found in answers:
        assert found["difference"] < 1e-11
        assert found["moved"] == ["first.weight", "tied.weight", "seldom.weight", "head.weight"]
        assert found["bytes"]
        assert found["gradients"] == []
        assert found["after"] == ["frozen.weight"]
        assert len(found["names"]) == 12 and "again.weight" in found["names"]


@pytest.mark.parametrize("world_size", [1, 4])
def test_the_change_has_a_high_rank_and_no_more(run_ranks: RunRanks, world_size: int) -> None:
    for values, num_parameters in run_ranks(world_size, "beyond_averaging", "hd_pissa_ranks", backend="gloo"):
        bound = 2 * world_size  # twice the directions of all ranks
        assert values[bound] < 1e-4 * values[0]
        assert values[bound - 1] > 1e-2 * values[0]
        assert num_parameters == 1


def test_hd_pissa_goes_on_with_the_same_bits(run_ranks: RunRanks) -> None:
    answers = run_ranks(2, "beyond_averaging", "hd_pissa_goes_on")
    assert all(same for same, _ in answers) and answers[0][1] == answers[1][1]


def test_hd_pissa_goes_on_with_fewer_and_more_ranks(run_ranks: RunRanks, tmp_path: Path) -> None:
    file = str(tmp_path / "saved.pt")
    losses = []
    for size, begin, rows in ((4, 0, 2), (2, 20, 4), (3, 40, 3)):
        answers = run_ranks(size, "beyond_averaging", "hd_pissa_part_of_a_run", file, begin, begin + 20)
        assert len({found["bits"] for found in answers}) == 1
        assert all(found["kept"] for found in answers)
        assert max(answers[0]["rows"]) == rows  # eight directions
        losses += answers[0]["losses"]
    assert sum(losses[20:30]) < sum(losses[:10]) and sum(losses[50:]) < sum(losses[:10])


def test_hd_pissa_says_what_it_cannot_do(run_ranks: RunRanks) -> None:
    for said in run_ranks(1, "beyond_averaging", "hd_pissa_refusals", backend="gloo"):
        assert len(said) == 3 and all(text.startswith("UsageError") for text in said), said
        assert "before DistributedDataParallel" in said[0]
        assert "tied.weight is missing" in said[1]
        assert "Adafactor keeps" in said[2]
