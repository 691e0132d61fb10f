"""``examples/moe_lm`` from its one command: every model runs, and what is compared is comparable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "moe_lm" / "train.py"


@pytest.mark.namespaces
def test_one_command(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("MYCEL_")} | {"OMP_NUM_THREADS": "1"}
    small = ["--quick", "--steps", "3", "--batch-size", "2", "--length", "32", "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *small], env=env, capture_output=True, text=True, timeout=220, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "moe_lm.json").read_text(encoding="utf-8"))
    models = {model["name"]: model for model in document["models"]}
    assert list(models)[:2] == ["dense", "flat"] and len(models) == 8
    assert all(f"| {name} |" in done.stdout for name in models)
    assert (tmp_path / "moe_lm.png").stat().st_size > 20_000
    last = {name: model["evaluations"][-1]["loss"] for name, model in models.items()}
    # The same text and the same first weights: exchanges change nothing beyond rounding, codecs little.
    assert last["flat"] == pytest.approx(last["hierarchical"], abs=1e-4)
    for name in list(models)[2:]:
        assert last[name] == pytest.approx(last["flat"], abs=0.2 if name.endswith("int4") else 0.05), name
    rows = {name: model["bytes_of_rows"] for name, model in models.items()}
    assert rows["dense"] == 0 < rows["hierarchical, int4"] < rows["hierarchical, int8"] < rows["hierarchical, bf16"]
    assert rows["hierarchical, fp8"] == pytest.approx(rows["hierarchical, int8"], rel=0.1)
    assert rows["hierarchical, bf16"] < rows["hierarchical"] < rows["flat"]
    for model in models.values():  # what cables counted is rows, gradients of what all ranks hold, and headers
        assert model["bytes_between"] > model["bytes_of_rows"]
