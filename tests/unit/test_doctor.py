"""``mycel doctor``: what it finds here, what it says of what is missing or wrong, and its exit code."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mycel.doctor import Finding, examine
from mycel.doctor import examination as looking
from mycel.doctor.smoke import SmokeRun, run_two_ranks
from mycel.errors import EmulationError


def found(*, smoke: bool = False) -> dict[str, Finding]:
    return {finding.subject: finding for finding in examine(smoke=smoke)}


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MYCEL_TOPOLOGY", "MYCEL_TIMEOUT", "MYCEL_INTERFACE", "MYCEL_SECRET", "MASTER_ADDR", "RANK"):
        monkeypatch.delenv(name, raising=False)


def test_a_machine_that_runs_tests_is_well() -> None:
    findings = found()
    assert not [finding for finding in findings.values() if finding.state == "wrong"]
    assert {"mycel", "python", "core", "torch", "compiled code", "settings", "interfaces", "own address"} <= set(
        findings
    )
    assert findings["settings"].value == "no MYCEL_ variable is set"


def test_an_extra_that_is_missing_says_what_for_and_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "find_spec", lambda name: None)
    findings = found(smoke=True)
    assert findings["torch"].state == "absent"
    assert (findings["torch"].value, findings["torch"].remedy) == (
        "not installed; for running: the backend, compression, experts",
        "pip install 'mycel[run]'",
    )
    assert findings["two ranks"].state == "absent"


def test_settings_that_are_wrong_are_said_and_secrets_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MYCEL_TIMEOUT", "soon")
    monkeypatch.setenv("MYCEL_SECRET", "swordfish")
    finding = found()["settings"]
    assert finding.state == "wrong" and "MYCEL_TIMEOUT='soon'" in finding.remedy
    assert "MYCEL_SECRET" in finding.value and "swordfish" not in finding.value


@pytest.mark.parametrize(("topology", "state"), [("star:ranks=4", "ok"), ("nowhere.yaml", "wrong")])
def test_a_topology_that_is_named_is_read(topology: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MYCEL_TOPOLOGY", topology)
    assert found()["topology"].state == state


def test_an_address_that_nobody_has_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MYCEL_INTERFACE", "nowhere0")
    finding = found()["own address"]
    assert finding.state == "wrong" and "nowhere0" in finding.remedy


def test_a_machine_without_namespaces_plans_and_runs_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise EmulationError("no htb in this kernel")

    monkeypatch.setattr(looking, "check_support", refuse)
    monkeypatch.setattr(looking, "can_make_user_namespace", lambda: False)
    finding = found()["emulation"]
    assert (finding.state, finding.remedy) == ("absent", "no htb in this kernel")


def test_two_ranks_sum(tmp_path: Path) -> None:
    ended = run_two_ranks(240.0)
    assert ended.error == "" and ended.way == "shared memory"


def test_ranks_that_fail_or_hang_are_said_in_their_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mycel.doctor.smoke._RANK", "raise RuntimeError('the dog has eaten the socket')")
    assert run_two_ranks(240.0).error == "RuntimeError: the dog has eaten the socket"
    monkeypatch.setattr("mycel.doctor.smoke._RANK", "import time; time.sleep(600)")
    assert "the time was over" in run_two_ranks(0.5).error
    monkeypatch.setattr(looking, "run_two_ranks", lambda limit: SmokeRun(started_s=1.0, way="TCP", error="no"))
    assert found(smoke=True)["two ranks"] == Finding(
        subject="two ranks", state="wrong", value="did not come together", remedy="no"
    )


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mycel", "doctor", "--no-smoke", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


def test_the_command_prints_a_line_each_or_json_and_says_by_its_code_what_is_wrong() -> None:
    said = doctor()
    assert said.returncode == 0 and said.stdout.splitlines()[0].startswith("ok    mycel")
    assert len(said.stdout.splitlines()) < 25
    data = json.loads(doctor("--json").stdout)
    assert {finding["state"] for finding in data["findings"]} <= {"ok", "absent"}
    wrong = doctor(MYCEL_TIMEOUT="soon")
    assert wrong.returncode == 1 and "WRONG settings" in wrong.stdout


@pytest.mark.parametrize("arguments", [["-h"], ["bound", "-h"], ["-V"]])
def test_what_people_type_first_answers(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "mycel", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and ended.stdout


def test_a_shell_that_asks_for_completion_gets_it() -> None:
    # Which shell asks is taken from the processes above; one that ends with the command stays above it.
    line = shlex.join([sys.executable, "-m", "mycel", "--show-completion"]) + "; exit $?"
    ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and "complete" in ended.stdout
