"""``mycel verify``: exit codes, the JSON object, the drawing, and files that hold no schedule."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mycel.cli.verify import read_schedule, register
from mycel.collectives.schedule import Chunk, Schedule, Transfer
from mycel.collectives.spec import Collective
from mycel.errors import ScheduleError, UsageError
from mycel.topology.model import Link, Topology, Vertex

PAIR = Topology(
    name="pair",
    unit="GB/s",
    vertices=(Vertex(kind="rank", label="a"), Vertex(kind="rank", label="b")),
    links=(Link(src=0, dst=1, capacity=2), Link(src=1, dst=0, capacity=2)),
)


def schedule(*, after: tuple[int, ...] = (0,)) -> Schedule:
    return Schedule(
        collective=Collective(name="all_reduce", num_ranks=2),
        topology=PAIR,
        method="by_hand",
        num_units=1,
        chunks=(Chunk(start=0, stop=1),),
        transfers=(
            Transfer(chunk=0, src=0, dst=1, reduce=True, path=(0, 1)),
            Transfer(chunk=0, src=1, dst=0, reduce=False, path=(1, 0), after=after),
        ),
    )


def run(*arguments: str):
    app = typer.Typer()
    register(app)
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(params=["json", "text"])
def written(request, tmp_path: Path):
    def write(subject: Schedule) -> str:
        file = tmp_path / "schedule"
        file.write_text(json.dumps(subject.to_json(), indent=1) if request.param == "json" else subject.to_text())
        return str(file)

    return write


def test_a_right_schedule(written):
    file = written(schedule())
    result = run(file, "--json")
    assert result.exit_code == 0
    assert json.loads(result.output) == {
        "ok": True,
        "format": "mycel",
        "collective": "all_reduce",
        "num_ranks": 2,
        "method": "by_hand",
        "num_chunks": 1,
        "num_transfers": 2,
        "depth": 2,
        "algbw": 2.0,
        "unit": "GB/s",
    }
    result = run(file)
    assert result.exit_code == 0
    assert result.output == "right: all_reduce over 2 ranks on pair, 2 transfers, depth 2, algbw 2 GB/s\n"


def test_a_wrong_schedule(written):
    file = written(schedule(after=()))
    result = run(file, "--json")
    assert result.exit_code == 1
    answer = json.loads(result.output)
    assert answer["ok"] is False
    assert answer["error"].startswith(
        "all_reduce over 2 ranks is wrong at rank 0, chunk 0: transfer 0 (step 0, 0 -> 1)"
    )
    result = run(file)
    assert result.exit_code == 1
    first, blank, *grid = result.output.splitlines()
    assert first == f"wrong: {answer['error']}"
    assert blank == ""
    assert any("]!" in line and line.startswith("rank 0") for line in grid)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "lacks the key"),
        (b"not a schedule\n", "line 1: cannot read 'not a schedule'"),
        (b"mycel.schedule 1\nunits many\n", "line 2: cannot read 'units many'"),
        (b'{"format": "mycel.schedule",\n oops', "line 2, column 2: not JSON"),
        (b'{"format": "mycel.topology"}', "not a mycel schedule"),
        (b'{"name": "ring", "gpus": 2, "nodes": []}', "not a mycel schedule"),
        (b'{"name": "plan", "gpus": 2}', "plan: gpus"),
        (b"<system/>", "line 1: <system> where MSCCL XML begins with <algo>"),
        (b"<algo", "line:1:1: not XML"),
        (b'{"format": "mycel.schedule"}', "lacks the key 'collective'"),
        (b"\xff\xfe\x00", "neither JSON nor text in UTF-8"),
        (b'{"a": ' + b"[" * 200_000, "not a schedule"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "not a schedule"),
    ],
)
def test_a_malformed_file(tmp_path, content, complaint):
    file = tmp_path / "broken"
    file.write_bytes(content)
    result = run(str(file), "--json")
    assert result.exit_code == 1
    answer = json.loads(result.output)
    assert answer["ok"] is False
    assert answer["error"].startswith(f"{file}: ")
    assert complaint in answer["error"]
    human = run(str(file))
    assert human.exit_code == 1
    assert human.output.startswith("wrong: ")
    assert len(human.output.splitlines()) == 1


def test_a_missing_file_is_a_wrong_call(tmp_path):
    with pytest.raises(UsageError, match=r"nowhere: cannot be read: No such file"):
        read_schedule(tmp_path / "nowhere")
    assert isinstance(run(str(tmp_path / "nowhere")).exception, UsageError)
    with pytest.raises(UsageError, match="cannot be read"):
        read_schedule(tmp_path)


def test_reading_names_the_file(tmp_path):
    file = tmp_path / "s.txt"
    file.write_text(schedule().to_text().replace("units 1", "units 2"))
    with pytest.raises(ScheduleError, match=r"s\.txt: chunks cover 1 of 2 units"):
        read_schedule(file)
    file.write_text(schedule().to_text())
    assert read_schedule(file) == schedule()
