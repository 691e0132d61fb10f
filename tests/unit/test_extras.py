"""Without torch, matplotlib and OR-tools the core plans; all else ends in one line that says what to install."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mycel.cli import COMMANDS
from mycel.errors import MissingExtraError, MycelError, UsageError
from mycel.extras import EXTRAS, needs, without

ROOT = Path(__file__).resolve().parents[2]
RUN_SIDE = ("runtime", "comm", "wire", "moe", "data_parallel", "elastic", "overlap", "sequence")
SKETCHES = ROOT / "examples" / "sketches"
#: ``mycel``, in a process that cannot import what the extras bring.
BARE = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {tuple(EXTRAS)!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
sys.argv[0] = "mycel"
from mycel.cli import main
main()
"""
#: As torchrun sets them, for commands that are a rank.
RANK = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "9",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def process(folder: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path} | (RANK if arguments[:1] == ("probe",) else {})
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)


def bare(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return process(folder, BARE, *arguments)


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        ("bench --loopback 2", "run"),
        ("bench --here", "run"),
        ("advise some.module:make", "run"),
        ("demo --steps 1", "run,plots"),
        ("emulate star:ranks=2 -- true", "run"),
        ("probe -o found.yaml", "run"),
        ("probe -o found", "run"),
        ("warm", "run"),
        ("draw star:ranks=3 -o fabric.svg", "plots"),
        ("steps star:ranks=3 -c all_gather", "solver"),
        ("synth ring:ranks=3 -c all_gather --method steps", "solver"),
        (f"synth {SKETCHES / 'ndv2.json'} -c all_gather --sketch {SKETCHES / 'ndv2_x1.json'}", "solver"),
    ],
)
def test_what_an_extra_brings_is_asked_for_in_a_line(tmp_path: Path, arguments: str, extra: str) -> None:
    ended = bare(tmp_path, *arguments.split())
    assert ended.returncode == 2, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("note: ")]  # on the topology file
    assert len(lines) == 1
    assert lines[0].startswith("mycel: ") and lines[0].endswith(f"pip install 'mycel[{extra}]'")
    assert not ended.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        "--version",
        "--help",
        "bound two_boxes:ranks=4 -c all_gather",
        "bound ring:ranks=4 -c all_reduce",
        "bound star:ranks=3 -c all_to_all --json",
        "whatif star:ranks=3 -c all_gather --scale *->*=2",
        "draw star:ranks=3 -o fabric.dot -c all_gather",
        "synth two_boxes:ranks=4 -c all_gather -o made.json",
        "synth two_boxes:ranks=4 -c all_gather --summary",
        "select star:ranks=3 -c all_gather --sizes 1KB",
    ],
)
def test_planning_needs_no_extra(tmp_path: Path, arguments: str) -> None:
    ended = bare(tmp_path, *arguments.split())
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_help_needs_no_extra(tmp_path: Path, name: str) -> None:
    assert "Usage: mycel" in bare(tmp_path, name, "--help").stdout


@pytest.mark.parametrize("code", [f"import mycel.{name}" for name in RUN_SIDE] + ["import mycel; mycel.moe"])
def test_packages_of_the_run_side_say_what_they_need(code: str) -> None:
    ended = process(ROOT, BARE.replace("from mycel.cli import main\nmain()", code))
    package = re.split(r"\W", code)[-1]
    says = f"mycel: mycel.{package} needs torch, which is not installed: pip install 'mycel[run]'"
    assert (ended.returncode, ended.stderr.splitlines()) == (1, [says])


def test_who_asks_whether_an_extra_is_there_catches_what_is_said() -> None:
    with pytest.raises(UsageError) as caught:
        raise MissingExtraError("mycel.moe needs torch")
    assert isinstance(caught.value, MycelError) and caught.value.code == "mycel: mycel.moe needs torch"


def test_all_that_is_missing_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXTRAS, "no_such_package", "run")
    monkeypatch.setitem(EXTRAS, "nor_this", "plots")
    with pytest.raises(UsageError, match=r"^a page needs no_such_package and nor_this, which are not installed: "):
        needs("a page", "sys", "no_such_package", "nor_this")
    needs("a page", "sys")
    with pytest.raises(UsageError, match=r"a page needs no_such_package, .* pip install 'mycel\[run\]'$"):
        raise without(ModuleNotFoundError(name="no_such_package.part"), "a page")
    assert without(ModuleNotFoundError(name="something_of_the_users"), "a page") is None
