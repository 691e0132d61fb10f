"""Collectives of one's own under torch: registered, agreed, run, refused and taken back."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.faults.__main__ import PROCESSES, Cell, matrix

import mycel
from mycel.collectives.language import load_written
from mycel.emulate import start
from mycel.topology import load_topology

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


# -- whatever torch and accidents do, with a registered all_reduce -----------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``MYCEL_SCHEDULES`` with an all_reduce for groups of two, three and four."""
    made = tmp_path / "schedules"
    made.mkdir()
    for ranks in (2, 3, 4):
        schedule = load_written(f"{EXAMPLES}:ring").on(mycel.load_topology(f"star:ranks={ranks}"))
        (made / f"ring{ranks}.json").write_text(json.dumps(schedule.to_json()), encoding="utf-8")
    monkeypatch.setenv("MYCEL_SCHEDULES", str(made))
    return made


FEW = ("test_all_reduce_sum", "test_barrier_group", "test_reduce_sum", "test_DistributedDataParallel_requires_grad")
MORE = ("test_all_reduce", "test_reduce_", "test_new_subgroups", "test_DistributedDataParallel", "test_broadcast")


@pytest.mark.long  # the same program without a schedule runs by default, and the schedule under everything else
@pytest.mark.parametrize(("parts", "at_least"), [(FEW, 4), (MORE, 25)])
def test_what_torch_tests(folder: Path, parts: tuple[str, ...], at_least: int, tmp_path: Path) -> None:
    file = tmp_path / "outcomes.json"
    selected = [word for part in parts for word in ("-k", part)]
    command = [sys.executable, "-m", "tests.torch_suite", "--world-size", "3", "--json", str(file), *selected]
    root = Path(__file__).parents[2]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stdout[-4000:]
    outcomes = json.loads(file.read_text(encoding="utf-8"))
    assert sum(outcome == "passed" for outcome in outcomes.values()) >= at_least, outcomes


@pytest.mark.usefixtures("warm_ranks")
def test_faults_of_processes(folder: Path) -> None:
    chosen = [
        Cell(fault="kill", collective="all_reduce"),
        Cell(fault="handler", collective="all_reduce"),
        Cell(fault="mismatch", variant="type", collective="all_reduce"),
        Cell(fault="orphan", collective="all_reduce"),
    ]
    with matrix(PROCESSES, 256) as ranks:
        outcomes = [ranks.outcome(cell) for cell in chosen]
    assert not [outcome for outcome in outcomes if outcome.complaints]


@pytest.mark.long
@pytest.mark.namespaces
def test_faults_of_links(folder: Path) -> None:
    chosen = [
        Cell(fault="down", collective="all_reduce"),
        Cell(fault="slow", collective="all_reduce"),
        Cell(fault="new_group", collective="all_reduce"),
        Cell(fault="swap", collective="all_reduce"),
    ]
    with matrix("star4") as ranks:
        outcomes = [ranks.outcome(cell) for cell in chosen]
    assert not [outcome for outcome in outcomes if outcome.complaints]


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.long
@pytest.mark.namespaces
def test_a_lost_link_ends_it_and_rank_0_says_so(tmp_path: Path) -> None:
    """The ring goes over a cable that is cut; training goes on over what is found without it."""
    root = Path(__file__).parents[2]
    fabric = load_topology(root / "examples" / "clusters" / "ring4.yaml")
    schedule = load_written(f"{EXAMPLES}:ring").on(fabric)
    (tmp_path / "ring.json").write_text(json.dumps(schedule.to_json()), encoding="utf-8")
    program, steps, lines = Path(__file__).parent / "programs" / "replan.py", 12, list[str]()
    environ = {"OMP_NUM_THREADS": "1", "MYCEL_ON_LINK_FAILURE": "replan", "MYCEL_TIMEOUT": "40"}
    with start(
        fabric,
        [sys.executable, str(program), str(steps)],
        env=environ | {"MYCEL_SCHEDULES": str(tmp_path), "MYCEL_DEBUG": "info"},
        output=lambda rank, line: lines.append(line),
    ) as run:
        until, broken = time.monotonic() + 150.0, False
        while run.wait(0.01) is None and time.monotonic() < until:
            if not broken and any('"broken"' in line and '"step": 3,' in line for line in tuple(lines)):
                broken = True
                run.set_link(1, 2, up=False)
                run.set_link(2, 1, up=False)
        assert broken and run.exit_codes == (0, 0, 0, 0), "\n".join(lines)
    assert any(re.search(r"registered: ring@\w{8} for all_reduce of any size", line) for line in lines)
    (warning,) = [line for line in lines if "serve no more" in line]
    assert re.search(r"were for the fabric with it and serve no more: ring@\w{8} for all_reduce", warning)
    losses = [json.loads(line) for line in lines if line.startswith('{"run"')]
    whole, other = (
        {(r["rank"], r["step"]): r["loss"] for r in losses if r["run"] == name} for name in ("whole", "broken")
    )
    assert len(whole) == 4 * steps and other == pytest.approx(whole, rel=1e-5)
