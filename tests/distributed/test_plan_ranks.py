"""Plans of GPUs on CPU ranks, with real numbers, as collectives of torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.test_channels import examples

RunRanks = Callable[..., list[Any]]


@pytest.mark.parametrize(
    ("num_ranks", "env"),
    [(2, {}), (3, {"MYCEL_LOCAL": "tcp"}), pytest.param(4, {}, marks=pytest.mark.long)],
    ids=["2", "3-tcp", "4"],
)
def test_plans_serve_torchs_collectives(run_ranks: RunRanks, num_ranks: int, env: dict[str, str]) -> None:
    found = run_ranks(num_ranks, "plans", "serves", env=env)
    assert all(methods == found[0] for methods in found) and len(set(found[0])) == 6


def test_plans_that_cannot_be_registered(run_ranks: RunRanks) -> None:
    said = run_ranks(2, "plans", "refused")
    for text, expected in zip(
        said[0],
        [
            "all_gather over 2 ranks is wrong",
            "a plan for 3 ranks on .*, which has 2",
            "is a sendrecv, which no collective of torch's is",
            "register it with always=True",
            "carries out all_gather, and is to be registered for all_reduce",
            "ranks have come with different ones",
        ],
        strict=True,
    ):
        assert re.search(expected, text), text


def test_a_plan_in_a_file(run_ranks: RunRanks, tmp_path: Path) -> None:
    file = tmp_path / "packets.plan.json"
    file.write_text(examples.packets(3).to_text())
    assert run_ranks(3, "plans", "from_a_folder", str(file))[0].startswith("plan:packets@")
