"""``mycel doctor``: what is installed, what this machine can do, and whether two ranks come together."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from mycel.cli.bound import JsonOption
from mycel.errors import UsageError

if TYPE_CHECKING:
    from mycel.doctor import Finding

__all__ = ["register"]

_MARKS = {"ok": "ok", "absent": "--", "wrong": "WRONG"}


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    app.command("doctor")(doctor)


def doctor(
    smoke: Annotated[bool, typer.Option(help="Start two ranks on this machine that sum an array.")] = True,
    timeout: Annotated[float, typer.Option(help="Seconds that the two ranks may take.")] = 180.0,
    json_output: JsonOption = False,
) -> None:
    """What is installed, what is missing and what for, and whether two ranks come together here.

    Exit 1 if something is wrong; what not everybody needs may be missing.
    """
    from mycel.doctor import examine

    if not timeout > 0:
        raise UsageError(f"--timeout {timeout:g} must be positive")
    findings = []
    for finding in examine(smoke=smoke, timeout_s=timeout):
        findings.append(finding)
        if not json_output:
            print(_line(finding), flush=True)
    if json_output:
        print(json.dumps({"findings": [asdict(finding) for finding in findings]}))
    if any(finding.state == "wrong" for finding in findings):
        raise typer.Exit(1)


def _line(finding: Finding) -> str:
    remedy = f"; {finding.remedy}" if finding.remedy else ""
    return f"{_MARKS[finding.state]:5} {finding.subject:14} {finding.value}{remedy}"
