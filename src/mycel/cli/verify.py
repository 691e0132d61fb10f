"""``mycel verify``: says whether a schedule in a file, of ours or of others, is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from mycel.collectives.imports import READERS, check_file, mycel_schedule, read_content
from mycel.collectives.proof import prove_lowering, prove_size
from mycel.collectives.schedule import Schedule
from mycel.errors import ScheduleError, UsageError, VerificationError
from mycel.units import format_size, parse_size

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


def _prove_programs(file: Path, facts: dict[str, Any], size: str | None, piece: str | None) -> dict[str, Any]:
    """The facts, with those of the programs of a right schedule; ``summary`` says which they are."""
    if facts["format"] != "mycel":
        raise UsageError(f"{file}: is {facts['format']}, a program already, and was verified as it is: no --programs")
    schedule = read_schedule(file)
    if size is None:
        proved = {"num_instructions": prove_lowering(schedule)}
        what = "at every size"
    else:
        num_bytes = parse_size(size)
        proved = prove_size(schedule, num_bytes, None if piece is None else parse_size(piece))
        what = f"of {format_size(num_bytes)} in pieces of {format_size(proved['piece_bytes'])}"
    summary = f"{facts['summary']}; programs {what} are right, {proved['num_instructions']:,} instructions seen"
    return {**facts, "summary": summary, "programs": proved}


def register(app: typer.Typer) -> None:
    """Add the subcommand."""

    @app.command(help="Check a schedule file: exit 0 if it is right, 1 if it is not.")
    def verify(
        schedule: Annotated[
            Path,
            typer.Argument(help=f"Schedule; its content says which of {', '.join(READERS)}.", show_default=False),
        ],
        programs: Annotated[
            bool, typer.Option("--programs", help="Check the programs of all ranks, too; for every size.")
        ] = False,
        size: Annotated[
            str | None,
            typer.Option(help="With --programs: exactly those of this size of the whole array, such as 64MB."),
        ] = None,
        piece: Annotated[
            str | None, typer.Option(help="With --size: longest message; the cost model's choice if not given.")
        ] = None,
        json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    ) -> None:
        if (size is not None and not programs) or (piece is not None and size is None):
            raise UsageError("--size needs --programs, and --piece needs --size")
        try:
            facts = check_file(schedule)
            if programs:
                facts = _prove_programs(schedule, facts, size, piece)
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
