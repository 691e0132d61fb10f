"""What people see on a terminal: whole names in narrow tables, what is being done, and one line after Ctrl-C."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from mycel.cli import build_app, consoles
from mycel.cli import draw as draw_command
from mycel.cli import probe as probe_command
from mycel.errors import UsageError

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"


@pytest.mark.parametrize("width", [20, 40, 80])
@pytest.mark.parametrize(
    "command",
    [
        ["select", "star:ranks=4", "-c", "broadcast", "--sizes", "1KB,1MB"],
        ["steps", "star:ranks=3", "-c", "all_gather", "--chunks", "1"],
    ],
    ids=["select", "steps"],
)
def test_no_table_cuts_a_name(monkeypatch: pytest.MonkeyPatch, command: list[str], width: int) -> None:
    if command[0] == "steps":
        pytest.importorskip("ortools")
    text = io.StringIO()
    monkeypatch.setattr(consoles, "output", lambda *, wide=False: Console(file=text, width=width, markup=False))
    result = CliRunner().invoke(build_app(), command)
    assert result.exit_code == 0, result.output
    shown = text.getvalue()
    assert shown.count("\n") > 4
    assert "…" not in shown


def test_what_is_done_is_said_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal in (True, False):
        text = io.StringIO()
        made = Console(file=text, force_terminal=is_terminal, width=80, markup=False)
        monkeypatch.setattr(consoles, "notes", lambda made=made: made)
        with consoles.doing("counting [sheep]") as say:
            say("counting [goats]")
        assert ("counting [goats]" in text.getvalue()) == is_terminal
        assert is_terminal or text.getvalue() == ""
        text.truncate(0)
        with consoles.doing("counting", shown=False):
            pass
        assert "counting" not in text.getvalue()


def _interrupted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, command: list[str]) -> str:
    """What a command says that is interrupted in a function of its module."""

    def interrupt(*_: object, **__: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, name, interrupt)
    result = CliRunner().invoke(build_app(), command)
    assert result.exit_code == 128 + signal.SIGINT
    assert result.stdout == ""
    return result.stderr


def test_interrupted_it_says_that_nothing_was_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RANK", raising=False)
    file = tmp_path / "fabric.dot"
    command = ["draw", str(CLUSTERS / "star4.yaml"), "-c", "all_gather", "-o", str(file)]
    said = _interrupted(monkeypatch, draw_command, "bound", command)
    assert said == "mycel: interrupted; nothing was written\n"
    assert not file.exists()
    monkeypatch.setenv("RANK", "1")  # rank 0 speaks for all
    assert _interrupted(monkeypatch, draw_command, "bound", command) == ""


def test_interrupted_between_two_files_it_says_which_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    import mycel.probe
    import mycel.settings

    file = tmp_path / "found.yaml"
    monkeypatch.setattr(mycel.probe, "probe", lambda *_, **__: object())
    monkeypatch.setattr(mycel.settings, "read_launched", lambda: None)
    monkeypatch.setattr(probe_command, "_write", lambda found, output: output.write_text("ranks: 2"))
    said = _interrupted(monkeypatch, probe_command, "_draw", ["probe", "-o", str(file)])
    assert said == f"mycel: interrupted; {file} was written, its picture was not\n"


def test_a_real_interruption_ends_in_one_line() -> None:
    """The signal comes while the bound is being looked for."""
    program = (
        "import os, signal\n"
        "from mycel.cli import bound, main\n"
        "bound.bound = lambda *_: os.kill(os.getpid(), signal.SIGINT)\n"
        "main()"
    )
    env = {name: value for name, value in os.environ.items() if name != "RANK"}
    result = subprocess.run(
        [sys.executable, "-c", program, "bound", "star:ranks=4", "-c", "all_gather"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=env,
    )
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr.splitlines()[-1] == "mycel: interrupted; nothing was written"
    assert "Traceback" not in result.stderr


def test_errors_are_no_interruptions() -> None:
    result = CliRunner().invoke(build_app(), ["bound", "star:ranks=4", "-c", "all_gather", "--size", "much"])
    assert isinstance(result.exception, UsageError)
