"""Collectives of one's own under torch: registered, agreed, run, refused and taken back."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mycel
from mycel.collectives.language import load_written

RunRanks = Callable[..., list[Any]]
EXAMPLES = Path(__file__).parents[2] / "examples" / "collectives.py"


@pytest.mark.parametrize("env", [{}, {"MYCEL_LOCAL": "tcp"}, {"MYCEL_ON_LINK_FAILURE": "replan"}], ids=str)
def test_a_registered_schedule_serves_its_sizes(run_ranks: RunRanks, env: dict[str, str]) -> None:
    found = run_ranks(3, "written", "serves", ["ring", "halving_doubling", "double_tree"], env=env)
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == 3


def test_four_ranks_add_each_others_sums(run_ranks: RunRanks) -> None:
    run_ranks(4, "written", "serves", ["doubling", "all_pairs", "both_ways"])


def test_other_collectives(run_ranks: RunRanks) -> None:
    run_ranks(3, "written", "others_too")


def test_offered_schedules_are_chosen_by_the_model(run_ranks: RunRanks) -> None:
    usual, kept = run_ranks(3, "written", "offered")[0]
    assert usual == kept or kept.startswith("ring@")


def test_ranks_with_different_schedules_are_told_so(run_ranks: RunRanks) -> None:
    said = run_ranks(3, "written", "different")
    assert said[0] == said[1] == said[2]
    assert re.search(r"ranks 0, 1: ring@\w{8}; rank 2: all_pairs@\w{8}", said[0])


def test_a_schedule_that_one_rank_refuses(run_ranks: RunRanks) -> None:
    said = run_ranks(3, "written", "refused_by_one")
    assert said[0] == said[2] and said[1] in said[0] and "rank 1: all_reduce over 3 ranks is wrong" in said[0]


def test_what_cannot_be_registered(run_ranks: RunRanks) -> None:
    said = run_ranks(3, "written", "not_for_this")
    assert said[0] == said[1]
    for text, expected in zip(
        said[0],
        [
            "ring is for 4 ranks, and this group has 3",
            "not for broadcast",
            "would form their sums in different orders",
            "int cannot be registered",
            "no array is from 10 to 5 bytes",
            "registered: none",
        ],
        strict=True,
    ):
        assert expected in text


def test_a_rank_that_does_not_come_is_named(run_ranks: RunRanks) -> None:
    said = run_ranks(3, "written", "alone")
    assert "rank 2" in said[0] and "registration of a schedule" in said[0]


def test_groups_have_their_own(run_ranks: RunRanks) -> None:
    run_ranks(3, "written", "in_groups")


def test_schedules_of_a_folder(run_ranks: RunRanks, tmp_path: Path) -> None:
    for name, ranks, file in [("ring", 3, "ours@-1MB.json"), ("all_pairs", 2, "pair.json")]:
        schedule = load_written(f"{EXAMPLES}:{name}").on(mycel.load_topology(f"star:ranks={ranks}"))
        (tmp_path / file).write_text(schedule.to_text(), encoding="utf-8")
    (tmp_path / "notes.md").write_text("not a schedule", encoding="utf-8")
    found = run_ranks(3, "written", "from_folder", env={"MYCEL_SCHEDULES": str(tmp_path)})
    assert found[0][0].startswith("ring@") and not found[0][1].startswith("ring@")
    assert found[0][2].startswith("all_pairs@") and len(found[2]) == 2


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long), 4])
def test_ddp_trains_as_over_gloo(run_ranks: RunRanks, world_size: int) -> None:
    run_ranks(world_size, "written", "trains", timeout_s=90.0)


def test_flight_records_name_it(run_ranks: RunRanks, tmp_path: Path) -> None:
    for method, is_there in run_ranks(2, "written", "is_recorded", str(tmp_path / "flight")):
        assert method.startswith("ring@") and is_there == "True"


def test_errors_name_the_authors_line(run_ranks: RunRanks) -> None:
    said = run_ranks(2, "written", "wrong_is_refused")
    assert said[0] == said[1]
    assert re.search(r"checks/written\.py:\d+: chunk\.add\(rank, owner\)", said[0])
