"""The training examples learn over mycel what they learn over Gloo, and start with the commands they name."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mycel.emulate import launch
from mycel.runtime import warm
from mycel.topology.builders import two_boxes

RunRanks = Callable[..., list[Any]]
FOLDER = Path(__file__).resolve().parents[2] / "examples" / "training"
SMALL = ("--steps", "4", "--width", "64", "--length", "16", "--batch-size", "2")


def assert_learns_the_same(run_ranks: RunRanks, name: str, world_size: int = 4) -> None:
    ours = run_ranks(world_size, "examples", "losses", name, *SMALL)
    theirs = run_ranks(world_size, "examples", "losses", name, *SMALL, backend="gloo")
    assert len(ours[0]) == 4
    assert ours[0][-1] < ours[0][0]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "hsdp", "two_dimensions", "pipeline"])
def test_losses_are_those_of_gloo(run_ranks: RunRanks, name: str) -> None:
    assert_learns_the_same(run_ranks, name)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_losses_of_the_trainer_are_those_of_gloo(run_ranks: RunRanks) -> None:
    assert_learns_the_same(run_ranks, "hf_trainer", world_size=2)


def losses(output: str) -> list[float]:
    return [float(text) for text in re.findall(r"step +\d+ +loss ([\d.]+)", output)]


def test_one_command() -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("MYCEL_")} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(FOLDER / "ddp.py"), *SMALL], env=env, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(losses(done.stdout)) == 4
    assert "over 2 ranks of mycel" in done.stdout


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.namespaces
def test_over_an_emulated_cluster(run_ranks: RunRanks) -> None:
    """Over links as over loopback: where packets go changes nothing that is learned."""
    heard: list[str] = []
    code = launch(
        two_boxes(num_ranks=4, inside="400 Mbit/s", between="100 Mbit/s"),
        [sys.executable, str(FOLDER / "pipeline.py"), *SMALL],
        env={"OMP_NUM_THREADS": "1"},
        output=lambda rank, line: heard.append(line),
        timeout_s=120.0,
        warm=warm,
    )
    assert code == 0, "\n".join(heard)
    here = run_ranks(4, "examples", "losses", "pipeline", *SMALL)
    assert losses("\n".join(heard)) == pytest.approx(here[0], abs=1e-3)
