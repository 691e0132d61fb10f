"""The example that trains by a plan, and the command that measures ranks, as people start them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.effort import long
from typer.testing import CliRunner

from mycel.cli import build_app
from mycel.errors import UsageError
from mycel.parallel.measure import RankRates, machine_of
from mycel.planning.cluster import load_cluster
from mycel.planning.machines import load_machine
from mycel.planning.models import load_model
from mycel.planning.plan.build import plan_of
from mycel.planning.search import Limits, search
from mycel.report.pipeline import read_pipelines

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "planned" / "train.py"
ODD = ROOT / "examples" / "clusters" / "odd.yaml"


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def torchrun(count: int, *command: str) -> str:
    return run("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", *command)


def found_plan(folder: Path, cluster_name: str, *limits: str) -> Path:
    cluster, model = load_cluster(cluster_name), load_model("tiny")
    found = search(cluster, model.shape, batch=4, seq=32, limits=Limits.from_text(*limits))
    plan = plan_of(found, None, model, cluster)
    file = folder / "plan.json"
    file.write_text(plan.to_text(), encoding="utf-8")
    return file


def losses_of(file: Path) -> list[float]:
    return json.loads(file.read_text(encoding="utf-8"))["losses"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("limits", "ranks_of_pipeline"), [(("pp=2", "chunks=1"), 2), (("cp=2",), 1)])
def test_the_example_trains_by_a_plan_as_one_process_does(
    tmp_path: Path, limits: tuple[str, ...], ranks_of_pipeline: int
) -> None:
    plan = found_plan(tmp_path, "generic:nodes=1,ranks_per_node=2", *limits)
    said = torchrun(
        2, str(EXAMPLE), "--plan", str(plan), "--steps", "2", "--losses", str(tmp_path / "by_plan"),
        "--flight", str(tmp_path / "flight"), "--checkpoint", str(tmp_path / "checkpoint"),
    )  # fmt: skip
    assert "the plan predicts" in said and "step   2" in said
    run(
        str(EXAMPLE), "--steps", "2", "--batch-size", "4", "--length", "32", "--losses", str(tmp_path / "alone")
    )  # fmt: skip
    for mine, other in zip(losses_of(tmp_path / "by_plan"), losses_of(tmp_path / "alone"), strict=True):
        assert abs(mine - other) <= 1e-5
    assert len(read_pipelines([tmp_path / "flight"])) == ranks_of_pipeline
    assert (tmp_path / "checkpoint" / ".metadata").exists()


@long
def test_ranks_are_measured_into_a_machine(tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    said = torchrun(2, "-m", "mycel", "plan", "measure", "-o", str(file), "--size", "128", "--max-bytes", "256KB")
    assert "rank 1, node 0" in said
    machine = load_machine(file)
    assert machine.name == "here" and machine.rates.ranks_per_node == 2
    assert machine.device.flops > 1e6 and machine.fits[0].num_rows == 0
    # What was measured is a machine to plan with.
    found = search(
        load_cluster("generic:nodes=1,ranks_per_node=2", machine=file), load_model("tiny").shape, batch=4, seq=32
    )
    assert found.best.seconds.error == machine.fits[0].mean_error


def test_measuring_needs_ranks_and_a_file_of_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for name, said in (("machine.yaml", "must end in .json"), ("machine.json", "runs once a rank")):
        result = CliRunner().invoke(build_app(), ["plan", "measure", "-o", str(tmp_path / name)])
        assert isinstance(result.exception, UsageError) and said in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_the_slowest_rank_makes_the_machine() -> None:
    fast = RankRates(node="0", flops=2e9, half_rows=10.0, memory_gbps=4.0, operation_s=1e-6, memory_bytes=1 << 33)
    slow = replace(fast, node="1", flops=1e9, memory_gbps=2.0, memory_bytes=1 << 32)
    machine = machine_of("pair", [fast, fast, slow], 1.0, 0.5, 1e-4)
    fit, device = machine.fits[0].coefficients, machine.device
    # What is predicted of a product, of memory and of messages is what was measured.
    assert device.flops * fit.matmul_efficiency == pytest.approx(1e9)
    assert device.memory_gbps * fit.memory_efficiency == pytest.approx(2.0)
    assert machine.rates.link_gbps * fit.link_efficiency == pytest.approx(1.0)
    assert machine.rates.network_gbps * fit.network_efficiency == pytest.approx(0.5)
    assert device.memory_bytes == 1 << 32 and machine.rates.ranks_per_node == 2


@long
@pytest.mark.namespaces
def test_the_odd_cluster_from_search_to_losses(tmp_path: Path) -> None:
    plan = found_plan(tmp_path, str(ODD))
    said = run(
        "-m", "mycel", "emulate", "--timeout", "150", str(ODD), "--", sys.executable, str(EXAMPLE),
        "--plan", str(plan), "--steps", "5", "--losses", str(tmp_path / "by_plan"),
    )  # fmt: skip
    assert "computation is paced" in said
    run(str(EXAMPLE), "--steps", "5", "--batch-size", "4", "--length", "32", "--losses", str(tmp_path / "alone"))
    for mine, other in zip(losses_of(tmp_path / "by_plan"), losses_of(tmp_path / "alone"), strict=True):
        assert abs(mine - other) <= 1e-5
