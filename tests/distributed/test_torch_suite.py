"""A part of torch's own distributed tests over the backend; ``python -m tests.torch_suite`` runs all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.effort import long
from tests.torch_suite.__main__ import compare

ROOT = Path(__file__).resolve().parents[2]
#: Parts of names; between them they select one test or two of every collective, of messages, groups and DDP.
FEW = (
    "test_all_gather_coalesced_simple",
    "test_all_reduce_sum",
    "test_all_to_all_single_unequal_split_group",
    "test_barrier_group",
    "test_broadcast_group",
    "test_DistributedDataParallel_requires_grad",
    "test_gather_group",
    "test_isend",
    "test_new_subgroups_by_enumeration",
    "test_reduce_sum",
    "test_scatter_group",
    "test_send_recv_any_source",
)
#: Between them they select every collective, groups, barriers, DDP and its hooks.
PARTS = (
    "test_all_",
    "test_reduce_",
    "test_broadcast",
    "test_gather",
    "test_scatter",
    "test_barrier",
    "test_monitored",
)
MORE = (
    "test_send_recv",
    "test_isend",
    "test_new_subgroups",
    "test_DistributedDataParallel",
    "test_accumulate",
    "test_get_",
)


@pytest.mark.parametrize(
    ("world_size", "guise", "parts", "at_least"),
    [
        (3, "gloo", FEW, 12),
        (3, "mpi", ("test_all_to_all_single",), 5),
        pytest.param(3, "gloo", PARTS, 15, marks=long),
        pytest.param(4, "gloo", MORE, 15, marks=long),
        pytest.param(3, "mpi", ("test_all_to_all",), 12, marks=long),
    ],
)
def test_what_torch_tests(world_size: int, guise: str, parts: tuple[str, ...], at_least: int, tmp_path: Path) -> None:
    file = tmp_path / "outcomes.json"
    selected = [word for part in parts for word in ("-k", part)]
    command = [sys.executable, "-m", "tests.torch_suite", "--world-size", str(world_size), "--json", str(file)]
    command += ["--as", guise, *selected]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stdout[-4000:]
    outcomes = json.loads(file.read_text(encoding="utf-8"))
    assert sum(outcome == "passed" for outcome in outcomes.values()) >= at_least, outcomes


def test_comparison_names_what_was_lost() -> None:
    theirs = {"a": "passed", "b": "skipped", "c": "passed"}
    assert compare(theirs, {"a": "passed", "b": "passed", "c": "Traceback"}) == ["c"]
