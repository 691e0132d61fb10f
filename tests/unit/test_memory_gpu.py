"""The benchmark of memory on one GPU: what it says where there is none, and that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "memory_gpu.py"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = run()
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.strip() == "no CUDA GPU here: nothing to time; --rehearse shows that the script runs"


@pytest.mark.long
def test_a_rehearsal_goes_through_every_part(tmp_path: Path) -> None:
    done = run("--rehearse", "--output", str(tmp_path / "rows"))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert {row["part"] for row in rows} == {"link", "activations", "parameters"}
    assert all("no figure of a GPU" in row["on"] and 0 < row["p10_s"] <= row["p90_s"] for row in rows)
    plan = next(row for row in rows if row["way"] == "plan")
    assert plan["near"] <= plan["budget"] and plan["bound_s"] <= plan["planned_s"]
    far = next(row for row in rows if "chosen" in row)
    assert far["chosen"].startswith("residency") and far["predicted_bytes"] <= far["budget"]
    assert far["losses_apart"] == 0.0
