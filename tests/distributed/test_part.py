"""Ranks of a job find their part of a larger topology, in every group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

RunRanks = Callable[..., list[Any]]
BOXES = "two_boxes:ranks=16,inside=400 Gbit/s,between=50 Gbit/s"


def test_ranks_that_are_named_are_the_jobs_in_every_group(run_ranks: RunRanks) -> None:
    found = run_ranks(4, "part", "labels", env={"MYCEL_TOPOLOGY": BOXES, "MYCEL_RANKS": "2,9-11", "MYCEL_PACE": "0"})
    named = ["left/2", "right/1", "right/2", "right/3"]
    assert [whole for whole, _, _ in found] == [named] * 4
    assert [part for _, part, _ in found] == [[], [], named[2:], named[2:]]
    assert {total for _, _, total in found} == {6.0}


def test_eight_ranks_on_a_file_of_sixteen_train_and_are_told_where(run_ranks: RunRanks, tmp_path: Path) -> None:
    env = {"MYCEL_TOPOLOGY": BOXES, "MYCEL_PACE": "0"}
    for said in run_ranks(8, "part", "by_itself", str(tmp_path / "store"), backend=None, env=env):
        assert len(said) == 1 and "describes 16 ranks and this job has 8" in said[0]
