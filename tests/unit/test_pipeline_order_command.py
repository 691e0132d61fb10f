"""``mycel plan order``: what it prints and writes, and what it says of wrong input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mycel.cli import build_app
from mycel.errors import MycelError, UsageError
from mycel.pipeline.check import check
from mycel.pipeline.order import Order

pytest.importorskip("ortools")

DATA = Path(__file__).parents[1] / "data" / "pipeline" / "placements.json"
SHAPES: dict[str, dict[str, Any]] = {shape["name"]: shape for shape in json.loads(DATA.read_text())["shapes"]}


@pytest.fixture
def place(tmp_path: Path) -> Any:
    def write(name: str, **changes: Any) -> str:
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(SHAPES[name] | changes))
        return str(file)

    return write


def run(*arguments: str) -> str:
    result = CliRunner().invoke(build_app(), ["plan", "order", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_a_period_in_words_and_as_json(place: Any) -> None:
    assert "period 16/3, 3 micro-batches in a repetend of 16; the least of any schedule" in run(place("V4_cap3"))
    record = json.loads(run(place("V4_cap3"), "--json"))
    assert Fraction(record["period"]) == Fraction(record["bound"]) == Fraction(16, 3)
    assert record["proved"] is True
    assert record["validated"] is True
    assert record["peak"] == [3, 3, 2, 1]
    alone = json.loads(run(place("V4_cap3"), "--json", "--repetend", "1"))
    assert alone["period"] == "8"
    assert alone["proved"] is False
    assert alone["proof"] == "the least of repetends of one micro-batch"


def test_a_batch_in_words_and_as_json(place: Any) -> None:
    assert "4 micro-batches, makespan 28; the least of any schedule" in run(place("K4_cap6"), "-m", "4")
    record = json.loads(run(place("K4_cap6"), "-m", "4", "--json"))
    assert record["makespan"] == record["bound"] == 28
    assert record["proved"] is True
    assert record["validated"] is True


@pytest.mark.parametrize("end", ["order.csv", "order.json", "trace.json", "picture.svg"])
def test_files(place: Any, tmp_path: Path, end: str) -> None:
    file = tmp_path / end
    run(place("K4_cap6"), "-m", "3", "-o", str(file))
    text = file.read_text()
    if end in ("order.csv", "order.json"):
        order = Order.from_text(text)
        check(order)
        assert (order.ranks, order.num_stages, order.num_micro_batches) == (4, 4, 3)
    elif end == "trace.json":
        assert json.loads(text)["traceEvents"]
    else:
        assert text.startswith("<svg")


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"cap": [0, 0, 0, 0]}, (), "cap 0 of device 0 is under the 1"),
        ({"deps": []}, (), "not connected"),
        ({"deps": [[0, 1], [1, 0]]}, (), "in a circle: "),
        ({"version": 9}, (), "version 9"),
        ({}, ("-o", "order.txt"), "its name says no form"),
        ({}, ("-o", "nowhere/order.csv"), "no folder"),
        ({}, ("-m", "0"), "at least 1"),
        ({}, ("-m", "9" * 30), "at most 6250 are put in order"),
        ({}, ("-m", "4", "--repetend", "2"), "say one of the two"),
        ({}, ("--repetend", "0"), "micro-batches a repetend"),
        ({}, ("--time-limit", "0"), "time limit"),
        ({}, ("--time-limit", "nan"), "time limit"),
    ],
)
def test_wrong_input_is_said_in_a_line(
    place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: Any, options: tuple[str, ...], message: str
) -> None:
    file = place("V4_cap4", **changes)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(MycelError, match=message) as caught:
        CliRunner().invoke(build_app(), ["plan", "order", file, *options], catch_exceptions=False)
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_files_that_are_not_there_or_no_text(tmp_path: Path) -> None:
    (tmp_path / "raw.json").write_bytes(b"\xff\xfe\x00")
    for name in ("raw.json", "none.json", "."):
        with pytest.raises(UsageError):
            CliRunner().invoke(build_app(), ["plan", "order", str(tmp_path / name)], catch_exceptions=False)


def test_ctrl_c_keeps_the_best(place: Any, tmp_path: Path) -> None:
    """A search that would go on for minutes, of which the first answer is there at once."""
    file = tmp_path / "order.csv"
    program = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from mycel.pipeline.search import batch\n"
        "improve = batch.improve\n"
        "def said(*a, **k):\n"
        "    print('improving', flush=True)\n"
        "    return improve(*a, **k)\n"
        "batch.improve = said\n"
        "sys.argv = ['mycel', *sys.argv[1:]]\n"
        "from mycel.cli import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", program, "plan", "order", place("NN8_cap12"), "-m", "40", "--time-limit", "600"]
    with subprocess.Popen(
        [*command, "--json", "-o", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    ) as process:
        watch = threading.Timer(120, process.kill)
        watch.start()
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "improving\n"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate()
        finally:
            watch.cancel()
    assert process.returncode == 0, err
    record = json.loads(out.splitlines()[-1])
    assert record["interrupted"] is True
    assert record["makespan"] >= record["bound"]
    check(Order.from_text(file.read_text()))
