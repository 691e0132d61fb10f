"""Torch's distributed features run unchanged over the backend, and learn what they learn over Gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mycel.topology.builders import ring, two_boxes
from mycel.topology.json_format import to_json

RunRanks = Callable[..., list[Any]]
CHECKS = Path(__file__).resolve().parent / "checks"


def assert_same_as_gloo(run_ranks: RunRanks, world_size: int, function: str) -> None:
    ours = run_ranks(world_size, "training", function)
    theirs = run_ranks(world_size, "training", function, backend="gloo")
    for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert mine.keys() == other.keys()
        for form, losses in mine.items():
            assert losses == pytest.approx(other[form], rel=1e-5), f"{function}, {form}, rank {rank}"


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ddp(run_ranks: RunRanks, world_size: int) -> None:
    assert_same_as_gloo(run_ranks, world_size, "ddp")


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_fsdp(run_ranks: RunRanks, world_size: int) -> None:
    assert_same_as_gloo(run_ranks, world_size, "fsdp")


def test_groups_at_the_same_time(run_ranks: RunRanks) -> None:
    assert_same_as_gloo(run_ranks, 4, "groups")


def test_groups_on_a_given_fabric(run_ranks: RunRanks, tmp_path: Path) -> None:
    file = tmp_path / "ring.json"
    file.write_text(json.dumps(to_json(ring(num_ranks=4))))
    run_ranks(4, "training", "groups", env={"MYCEL_TOPOLOGY": str(file)})


@pytest.mark.parametrize("world_size", [2, 3])
def test_functional_collectives_and_dtensor(run_ranks: RunRanks, world_size: int) -> None:
    assert_same_as_gloo(run_ranks, world_size, "tensors")


def test_a_world_of_one(run_ranks: RunRanks) -> None:
    assert run_ranks(1, "training", "single") == run_ranks(1, "training", "single", backend="gloo")


def test_a_second_process_group_in_the_same_process(run_ranks: RunRanks) -> None:
    assert run_ranks(3, "training", "twice", "mycel", backend=None) == [[3.0, 6.0]] * 3


# -- which fabric ---------------------------------------------------------------------------------------------


def test_without_a_topology_ranks_of_one_machine_share_its_loopback(run_ranks: RunRanks) -> None:
    assert {name for name, _ in run_ranks(3, "training", "fabric")} == {"loopback_3"}


def test_a_given_topology_is_used(run_ranks: RunRanks, tmp_path: Path) -> None:
    topology = two_boxes(num_ranks=4)
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(to_json(topology)))
    got = run_ranks(4, "training", "fabric", env={"MYCEL_TOPOLOGY": str(file)})
    assert {fingerprint for _, fingerprint in got} == {topology.fingerprint}


def test_a_topology_of_fewer_ranks_is_refused(run_ranks: RunRanks, tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(to_json(two_boxes(num_ranks=4))))
    for kind, message in run_ranks(6, "training", "fails", backend=None, env={"MYCEL_TOPOLOGY": str(file)}):
        assert kind == "UsageError"
        assert "describes 4 ranks, but the world size is 6" in message


@pytest.mark.parametrize("text", ["not a topology", '{"vertices": 3}'])
def test_a_malformed_topology_is_refused(run_ranks: RunRanks, tmp_path: Path, text: str) -> None:
    file = tmp_path / "cluster.json"
    file.write_text(text)
    for kind, message in run_ranks(2, "training", "fails", backend=None, env={"MYCEL_TOPOLOGY": str(file)}):
        assert kind == "TopologyError"
        assert "cluster.json" in message


def test_a_malformed_variable_is_refused(run_ranks: RunRanks) -> None:
    for kind, message in run_ranks(2, "training", "fails", backend=None, env={"MYCEL_TIMEOUT": "soon"}):
        assert (kind, message) == ("UsageError", "MYCEL_TIMEOUT='soon' is not a number")


# -- launchers ------------------------------------------------------------------------------------------------


def test_torchrun(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("MYCEL_")} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(CHECKS / "launched.py"), str(tmp_path), "broadcast"],
        env=env,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answers = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert answers[0] == answers[1]
    assert answers[0]["size"] == 2
    assert answers[0]["fabric"] == "loopback_2"
