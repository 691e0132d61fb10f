"""``mycel verify``: says whether a schedule in a file, of ours or of others, is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mycel.collectives.imports import READERS, check_file, mycel_schedule, read_content
from mycel.collectives.schedule import Schedule
from mycel.errors import ScheduleError, VerificationError

__all__ = ["read_schedule", "register"]


def read_schedule(file: Path) -> Schedule:
    """The mycel schedule in a file, in JSON or text form.

    Raises:
        UsageError: the file cannot be read.
        ScheduleError: it holds no well-formed schedule; the message names the file.
    """
    content = read_content(file)
    try:
        return mycel_schedule.parse(content)
    except ScheduleError as error:
        raise ScheduleError(f"{file}: {error}") from None


def register(app: typer.Typer) -> None:
    """Add the subcommand."""

    @app.command(help="Check a schedule file: exit 0 if it is right, 1 if it is not.")
    def verify(
        schedule: Annotated[
            Path,
            typer.Argument(help=f"Schedule; its content says which of {', '.join(READERS)}.", show_default=False),
        ],
        json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    ) -> None:
        try:
            facts = check_file(schedule)
        except ScheduleError as error:
            if json_output:
                print(json.dumps({"ok": False, "error": str(error)}))
            else:
                print(f"wrong: {error}")
                if isinstance(error, VerificationError) and error.grid:
                    print(f"\n{error.grid}")
            raise typer.Exit(1) from None
        summary = facts.pop("summary")
        if json_output:
            print(json.dumps({"ok": True, **facts}))
        else:
            print("\n".join([f"right: {summary}", *facts.get("notes", ())]))
