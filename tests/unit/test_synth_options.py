"""Options of methods as text, from the command line to the method."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mycel.cli import synth as synth_command
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import Collective
from mycel.collectives.synth import SYNTHESIZERS
from mycel.collectives.synth.classics import CLASSICS
from mycel.collectives.synth.options import option_kinds, parse_options
from mycel.errors import UsageError
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
    assert "makes no schedule: leave out --method, -k, --size" in str(
        run("--summary", "--size", "1MB", "-k", "2", "--method", "tree")
    )
    assert "by method sketch: leave out -k" in str(run("--sketch", "no.json", "--method", "sketch", "-k", "2"))
    assert "give one of them" in str(run("--sketch", "no.json", "--summary"))
    assert "--time-limit would need --sketch FILE" in str(run("--size", "1MB", "--time-limit", "2"))
    assert "has no option 'steps'" in str(run("--option", "steps=2"))
