"""Options of methods as text, from the command line to the method."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mycel.cli import synth as synth_command
from mycel.cli.synth import schedule_record
from mycel.collectives.bound import bound
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import Collective, CollectiveName
from mycel.collectives.synth import SYNTHESIZERS
from mycel.collectives.synth.classics import CLASSICS
from mycel.collectives.synth.options import option_kinds, parse_options
from mycel.errors import UsageError
from mycel.runtime.planner import verified_schedules
from mycel.topology.load import load_topology
from mycel.topology.model import Topology


def method(
    topology: Topology,
    collective: Collective,
    *,
    steps: int | None = None,
    limit_s: float = 60.0,
    fast: bool = False,
    file: Path | None = None,
    name: str | None = None,
    progress: list[int] | None = None,
) -> Schedule:
    raise AssertionError("only its signature is looked at")


def test_values_become_what_the_signature_says() -> None:
    texts = ["steps=3", " limit-s = 0.5", "fast=Yes", "file=a=b.json", "name=x"]
    assert parse_options("m", method, texts) == {
        "steps": 3,
        "limit_s": 0.5,
        "fast": True,
        "file": Path("a=b.json"),
        "name": "x",
    }
    assert "progress" not in option_kinds(method)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["steps"], "option 'steps': expected NAME=VALUE"),
        (["=3"], "option '=3': expected NAME=VALUE"),
        (["steps=2.5"], "option 'steps': expected a whole number, got '2.5'"),
        (["steps="], "option 'steps': expected a whole number, got ''"),
        (["fast=maybe"], "option 'fast': expected true or false, got 'maybe'"),
        (["steps=1", "steps=2"], "option 'steps' is given twice"),
        (["topology=x"], "method 'm' has no option 'topology'; its options: fast, file, limit_s, name, steps"),
    ],
)
def test_what_cannot_be_read_is_named(texts: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}$"):
        parse_options("m", method, texts)


def test_options_of_every_method_can_be_listed() -> None:
    for known in (SYNTHESIZERS | CLASSICS).values():
        assert set(option_kinds(known).values()) <= {int, float, bool, Path, str}
    assert option_kinds(CLASSICS["ring"]) == {}
    with pytest.raises(UsageError, match="method 'ring' has no option 'k'; it has none"):
        parse_options("ring", CLASSICS["ring"], ["k=1"])


def run(*arguments: str) -> object:
    app = typer.Typer()
    app.callback()(lambda: None)
    synth_command.register(app)
    result = CliRunner().invoke(app, ["synth", "ring:ranks=4", "-c", "all_gather", *arguments])
    return result.exception or json.loads(result.stdout)


def test_the_command_hands_options_on() -> None:
    by_option, by_flag = run("--option", "k=3", "--json"), run("-k", "3", "--json")
    assert isinstance(by_option, dict) and isinstance(by_flag, dict)
    assert by_option["k"] == by_flag["k"] == 3
    assert "given twice" in str(run("-k", "3", "--option", "k=2"))
    assert "makes no schedule: leave out --option" in str(run("--summary", "--option", "k=2"))
    assert "makes no schedule: leave out --method, --size" in str(
        run("--summary", "--size", "1MB", "-k", "2", "--method", "tree")
    )
    assert "by method sketch: leave out -k" in str(run("--sketch", "no.json", "--method", "sketch", "-k", "2"))
    assert "give one of them" in str(run("--sketch", "no.json", "--summary"))
    assert "--time-limit would need --sketch FILE" in str(run("--size", "1MB", "--time-limit", "2"))
    assert "has no option 'steps'" in str(run("--option", "steps=2"))


def test_a_share_of_the_bound_and_a_size_are_handed_on() -> None:
    assert "give one of" in str(run("-k", "2", "--within", "0.9"))
    assert "give one of" in str(run("--size", "1MB", "--within", "0.9"))
    assert "give at least 1, and one of" in str(run("--summary", "-k", "2", "--within", "0.9"))
    assert "above 0 and at most 1" in str(run("--within", "1.5"))
    assert "above 0 and at most 1" in str(run("--summary", "--within", "0"))
    assert "has no option 'num_bytes'" in str(run("--size", "1MB", "--method", "tree"))
    for options in (
        ["--within", "0.7"],
        ["--size", "1MB"],
        ["--summary", "--within", "0.7"],
        ["--summary", "-k", "1"],
    ):
        record = run(*options, "--json")
        assert isinstance(record, dict)
        assert record["verified"] and record["algbw"] >= 0.7 * record["bound_algbw"]


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_reduce", "broadcast"])
@pytest.mark.parametrize(
    "spec",
    ["star:ranks=9", "torus:dims=3x4", "two_boxes:ranks=12", "dgx_h100:nodes=5", "mi250", "dgx_h100:nvls=true"],
)
def test_command_summary_and_runtime_have_one_forest(spec: str, collective: CollectiveName) -> None:
    app = typer.Typer()
    app.callback()(lambda: None)
    synth_command.register(app)
    records = [
        json.loads(CliRunner().invoke(app, ["synth", spec, "-c", collective, "--json", *more]).stdout)
        for more in ([], ["--summary"])
    ]
    topology = load_topology(spec)
    root = 0 if collective == "broadcast" else None
    schedule = verified_schedules(topology, collective, root, ["forest"])["forest"]
    best = bound(topology, Collective(name=collective, num_ranks=topology.num_ranks, root=root))
    records.append(schedule_record(best, schedule, k=None, seconds=0.0))
    keys = ("algbw", "optimal", "k", "depth", "num_trees")
    assert len({tuple(record[key] for key in keys) for record in records}) == 1
