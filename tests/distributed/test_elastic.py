"""Groups that are formed anew while ranks come and go."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.effort import long

from mycel.topology.builders import ring
from mycel.topology.json_format import to_json

RunRanks = Callable[..., list[Any]]


@pytest.mark.parametrize("size", [2, 3])
def test_cases_of_torch(run_ranks: RunRanks, size: int) -> None:
    run_ranks(size, "elastic", "torch_cases", backend=None)


def test_torchs_own_interface(run_ranks: RunRanks) -> None:
    if not all(run_ranks(3, "elastic", "by_torchs_own_names", backend=None)):
        pytest.skip("this torch has no interface for groups whose members change; make test-newest tries it")


def test_groups_meshes_and_ddp_of_the_new_ranks(run_ranks: RunRanks) -> None:
    run_ranks(4, "elastic", "groups_of_the_new_ranks", backend=None)


def test_who_does_not_come_is_named(run_ranks: RunRanks) -> None:
    for late, gone in run_ranks(3, "elastic", "who_does_not_come", backend=None)[:-1]:
        assert "rank 2 (pid" in late and "did not come within 0.5 s; 2 of 3 members did" in late
        assert "rank 2 (pid" in gone and "gone" in gone


@pytest.mark.parametrize("lost", [0, 2])
def test_survivors_shrink_the_group(run_ranks: RunRanks, lost: int) -> None:
    """Without the first rank, too, which has the store that the job began with."""
    assert sum(took > 0 for took in run_ranks(4, "elastic", "shrink", lost, backend=None)) == 3


def test_schedules_are_for_the_part_of_the_fabric_that_is_there(run_ranks: RunRanks, tmp_path: Path) -> None:
    file = tmp_path / "ring.json"
    file.write_text(json.dumps(to_json(ring(num_ranks=4, bandwidth="1 Gbit/s"))))
    seen = run_ranks(4, "elastic", "over_a_fabric", backend=None, env={"MYCEL_TOPOLOGY": str(file)})
    assert seen[1] == [(["0", "1", "2", "3"], 8), (["1", "2", "3"], 4), (["2", "3", "0", "1"], 8)]
    assert seen[0] == [seen[1][0], seen[1][2]]


def test_a_step_that_fails_leaves_the_state_as_it_was(run_ranks: RunRanks) -> None:
    """Wherever it fails, while FSDP holds whole parameters of some layers too."""
    losses, others = run_ranks(2, "elastic", "failing_steps", preload=["torch.distributed.fsdp"])
    assert len(losses) > 15, "a step is over ten collectives, forwards and back"
    (truth,) = run_ranks(1, "elastic", "reference", len(losses), backend=None)
    assert losses == others == pytest.approx(truth, abs=1e-9)


@pytest.mark.parametrize(("size", "shards"), [(3, 1), pytest.param(4, 2, marks=long), pytest.param(8, 4, marks=long)])
def test_training_goes_on_while_a_rank_is_killed_and_comes_back(run_ranks: RunRanks, size: int, shards: int) -> None:
    """DDP, and HSDP of whole replicas: each step is taken once, with the loss of the run that nobody disturbs."""
    lives = run_ranks(size, "elastic", "example", shards, 1, backend=None, preload=["torch.distributed.fsdp"])
    taken = [line for lines in lives for said in lines for line in said if "step" in line]
    losses = {line["step"]: line["loss"] for line in taken}
    assert all(line["loss"] == pytest.approx(losses[line["step"]], abs=1e-12) for line in taken)
    assert sorted(losses) == list(range(1, max(losses) + 1)), "no step is missing"
    assert {line["size"] for line in taken} <= {size, size - shards}, "whole replicas only"
    assert any("step" in line and line["size"] == size for line in lives[1][1]), "it came back"
    lost = {line["lost"] for lines in lives for said in lines for line in said if "lost" in line}
    assert len(lost) <= 2
    (truth,) = run_ranks(1, "elastic", "reference", max(losses), backend=None)
    assert [losses[step] for step in sorted(losses)] == pytest.approx(truth, abs=1e-9)
