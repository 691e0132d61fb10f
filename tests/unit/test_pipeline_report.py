"""``mycel report`` of pipelines: planned against measured time of every action."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mycel.cli import build_app
from mycel.errors import UsageError
from mycel.parallel.record import Flight, planned_times
from mycel.pipeline.order import Action
from mycel.pipeline.placement import Block, Dependency, Placement
from mycel.pipeline.timed import Timed
from mycel.report.pipeline import compare, read_pipelines, sentences

F0, B0 = Action.parse("0F0"), Action.parse("0B0")


def written(folder: Path) -> None:
    for rank in range(2):
        flight = Flight(rank, "toy", {f"{rank}F0": (0.0, 0.5), f"{rank}B0": (0.5, 1.5)})
        flight.restart()
        for name in (f"{rank}F0", f"{rank}SEND_F0", f"{rank}B0"):
            with flight.during(Action.parse(name)):
                if name.endswith("B0"):
                    with flight.waiting():
                        pass
        flight.write(folder)


def test_records_go_there_and_back(tmp_path: Path) -> None:
    written(tmp_path)
    flights = read_pipelines([tmp_path])
    assert [flight.rank for flight in flights] == [0, 1]
    rows = compare(flights)
    assert sorted(row.action for row in rows) == ["0B0", "0F0", "1B0", "1F0"]  # messages are no computations
    assert all(row.planned is not None and row.measured[1] >= row.measured[0] for row in rows)
    assert rows[0].late_s is not None and rows[0].late_s < 0
    assert sentences(flights)[0].startswith("toy: 2 ranks, 4 computations")


def test_an_action_that_failed_is_said(tmp_path: Path) -> None:
    flight = Flight(0, "toy")
    flight.restart()
    with pytest.raises(RuntimeError), flight.during(F0):
        raise RuntimeError
    flight.write(tmp_path)
    assert sentences(read_pipelines([tmp_path])) == ["toy: the step was not finished: rank 0 at 0F0"]


def test_the_command_prints_every_action(tmp_path: Path) -> None:
    written(tmp_path)
    result = CliRunner().invoke(build_app(), ["report", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    actions = json.loads(result.stdout)["actions"]
    assert {a["action"] for a in actions} == {"0F0", "0B0", "1F0", "1B0"}
    assert all(len(a["planned_s"]) == len(a["measured_s"]) == 2 for a in actions)
    shown = CliRunner().invoke(build_app(), ["report", str(tmp_path)])
    assert shown.exit_code == 0 and "planned ms" in shown.stdout and "1B0" in shown.stdout


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "not JSON"), ("{}", "no flight record"), ('{"format":"mycel.pipeline.flight","version":1}', "its parts")],
)
def test_what_is_no_record_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "pipeline-rank0.json").write_text(text)
    with pytest.raises(UsageError, match=words):
        read_pipelines([tmp_path])


def test_planned_times_are_those_of_the_search() -> None:
    blocks = tuple(Block(name=name, devices=(0,), time=time) for name, time in (("F0", 1), ("B0", 2)))
    one = Placement(name="", num_devices=1, blocks=blocks, dependencies=(Dependency(before=0, after=1),))
    planned = planned_times(Timed(placement=one, starts=((0, 1),)), 0.25)
    assert planned == {"0F0": (0.0, 0.25), "0B0": (0.25, 0.75)}
    with pytest.raises(UsageError, match="above 0"):
        planned_times(Timed(placement=one, starts=((0, 1),)), 0)


def test_a_page_has_both_lanes_of_every_rank(tmp_path: Path) -> None:
    written(tmp_path)
    page = tmp_path / "page.html"
    result = CliRunner().invoke(build_app(), ["report", str(tmp_path), "-o", str(page)])
    assert result.exit_code == 0, result.output
    text = page.read_text(encoding="utf-8")
    assert text.count(">planned</text>") == text.count(">measured</text>") == 2
    # Two computations a rank, each drawn as planned and as measured, and the waits of the backwards.
    assert text.count("<rect") == 2 * (2 + 2 + 1)
    assert "0B0: 500.0 to 1500.0 ms" in text
    assert "http" not in text.replace("http://www.w3.org", "")


def test_there_is_no_timeline_for_viewers(tmp_path: Path) -> None:
    written(tmp_path)
    result = CliRunner().invoke(build_app(), ["report", str(tmp_path), "-o", str(tmp_path / "out.json")])
    assert isinstance(result.exception, UsageError) and "must end in .html" in str(result.exception)
    assert not (tmp_path / "out.json").exists()
