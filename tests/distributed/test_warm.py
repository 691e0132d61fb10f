"""Ranks that tests fork from the launcher see what ranks see that are started: the same program prints the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mycel.emulate import launch, start
from mycel.topology.builders import star
from mycel.topology.model import Topology

#: Prints what it sees, and ends as it is told. What imports have left is not asked for: that is the difference.
PROGRAM = """
import atexit, json, os, signal, sys, threading, warnings

sees = {
    "arguments": sys.argv[1:], "name": __name__, "file": __file__, "path": sys.path[0], "folder": os.getcwd(),
    "environment": dict(sorted(os.environ.items())), "input": sys.stdin.read(), "parent": os.getppid(),
    "leads": os.getsid(0) == os.getpid(), "hosts": open("/etc/hosts").read(), "interrupt": str(signal.getsignal(2)),
    "broken pipe": str(signal.getsignal(13)), "interfaces": sorted(os.listdir("/proc/self/net/dev_snmp6")),
    "threads": threading.active_count(), "open": len(os.listdir("/proc/self/fd")),
}
print(json.dumps(sees), flush=True)
atexit.register(print, "at its end")
warnings.warn("as it is told")
if sys.argv[1] == "fail":
    sys.exit(3 + int(os.environ["RANK"]))
"""
#: Of an environment, what is named anew for each run.
PASSING = ("MASTER_PORT", "MYCEL_TOPOLOGY", "MYCEL_WIRING", "TORCHELASTIC_RUN_ID", "LINES", "COLUMNS")


def seen(where: Topology | int, folder: Path, *arguments: str) -> tuple[int, list[Any]]:
    """Exit code, and what each rank has printed."""
    said: dict[int, list[str]] = {}
    command = [sys.executable, "-W", "ignore", str(folder / "program.py"), *arguments]
    code = launch(where, command, output=lambda rank, line: said.setdefault(rank, []).append(line), timeout_s=60)
    found: list[Any] = []
    for _, (first, *rest) in sorted(said.items()):
        sees = json.loads(first)
        sees["environment"] = {k: v for k, v in sees["environment"].items() if k not in PASSING}
        found.append((sees, rest))
    return code, found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    return tmp_path


@pytest.mark.namespaces
def test_they_see_the_same(folder: Path, request: pytest.FixtureRequest) -> None:
    cases = [(2, "end"), (star(num_ranks=2), "end"), (star(num_ranks=2), "fail")]
    fresh = [seen(where, folder, how) for where, how in cases]
    request.getfixturevalue("warm_ranks")
    warm = [seen(where, folder, how) for where, how in cases]
    assert [ranks for _, ranks in warm] == [ranks for _, ranks in fresh]
    for codes in ([code for code, _ in fresh], [code for code, _ in warm]):
        assert codes[:2] == [0, 0] and codes[2] in (3, 4)  # of the rank that is seen to have ended first
    assert all(rest == ["at its end"] for _, ranks in fresh for _, rest in ranks)


@pytest.mark.usefixtures("warm_ranks")
def test_they_end_with_their_run(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import signal\nsignal.pause()\n", encoding="utf-8")
    with start(2, [sys.executable, str(tmp_path / "program.py")]) as run:
        assert all(Path(f"/proc/{pid}").exists() for pid in run.pids)
    assert run.exit_codes == (137, 137)
    assert not any(Path(f"/proc/{pid}").exists() for pid in run.pids)
