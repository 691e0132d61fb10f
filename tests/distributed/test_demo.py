"""The whole demo, made small: on an emulated cluster, and where none can be emulated."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import mycel.demo.run
from mycel.demo.run import DemoOptions, run_demo, write_report
from mycel.errors import EmulationError
from mycel.topology.builders import star

SMALL = ("--width", "32", "--layers", "1")


@pytest.mark.namespaces
def test_demo_on_an_emulated_cluster(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from mycel.cli import main; main()", "demo", "--ranks", "2", "--steps", "4"]
    command += [*SMALL, "--size", "4KB", "--json", "--output", str(tmp_path / "report")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["emulated"] is True
    assert document["world_size"] == 2
    assert document["loss_relative_difference"] < 1e-4
    assert document["speedup"] == document["baseline"]["median_step_s"] / document["ours"]["median_step_s"]
    for run in (document["baseline"], document["ours"]):
        assert [step["step"] for step in run["steps"]] == [1, 2, 3, 4]
        assert run["evaluations"][-1]["bits_per_byte"] < run["evaluations"][0]["bits_per_byte"]
    pairs = zip(document["baseline"]["steps"], document["ours"]["steps"], strict=True)
    assert all(a["loss"] == pytest.approx(b["loss"], rel=1e-5) for a, b in pairs)
    assert len(document["rows"]) == 8
    assert all(row["correct"] for row in document["rows"])
    page = Path(document["files"]["html"]).read_text(encoding="utf-8")
    assert "No cluster was emulated" not in page
    assert Path(document["files"]["png"]).stat().st_size > 20_000


@pytest.mark.usefixtures("warm_ranks")
def test_demo_without_emulation_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise EmulationError("this machine has no veth")

    monkeypatch.setattr(mycel.demo.run, "check_support", refuse)
    options = DemoOptions(topology=star(num_ranks=2), steps=2, bandwidth_bytes=0, train_arguments=SMALL)
    stages: list[str] = []
    report = run_demo(options, progress=lambda stage, record: stages.append(stage))
    assert set(stages) == {"gloo", "mycel"}
    assert not report.emulated
    assert report.bounds == {}
    assert report.loss_difference < 1e-4
    page = write_report(report, tmp_path)["html"].read_text(encoding="utf-8")
    assert "this machine has no veth" in page
    assert "the speed figures are of loopback" in page
