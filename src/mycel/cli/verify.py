"""``mycel verify``: says whether a schedule in a file is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from mycel.collectives.schedule import Schedule
from mycel.collectives.verify import verify_schedule
from mycel.errors import MycelError, ScheduleError, UsageError, VerificationError

__all__ = ["read_schedule", "register"]


def read_schedule(file: Path) -> Schedule:
    """The schedule in a file, in JSON or text form (whichever the first character says).

    Raises:
        UsageError: the file cannot be read.
        ScheduleError: it holds no well-formed schedule; the message names the file.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from None
    try:
        text = data.decode("utf-8")
        if text.lstrip().startswith("{"):
            return Schedule.from_json(json.loads(text))
        return Schedule.from_text(text)
    except MycelError as error:
        raise ScheduleError(f"{file}: {error}") from None
    except UnicodeDecodeError:
        raise ScheduleError(f"{file}: not a schedule: neither JSON nor text in UTF-8") from None
    except json.JSONDecodeError as error:
        raise ScheduleError(f"{file}: line {error.lineno}, column {error.colno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists in lists without end
        raise ScheduleError(f"{file}: not a schedule: {error}") from None


def register(app: typer.Typer) -> None:
    """Add the subcommand."""

    @app.command(help="Check a schedule file: exit 0 if it is right, 1 if it is not.")
    def verify(
        schedule: Annotated[Path, typer.Argument(help="Schedule in JSON or text form.", show_default=False)],
        json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    ) -> None:
        try:
            subject = read_schedule(schedule)
            verify_schedule(subject)
        except ScheduleError as error:
            if json_output:
                print(json.dumps({"ok": False, "error": str(error)}))
            else:
                print(f"wrong: {error}")
                if isinstance(error, VerificationError) and error.grid:
                    print(f"\n{error.grid}")
            raise typer.Exit(1) from None
        facts = _facts(subject)
        if json_output:
            print(json.dumps({"ok": True, **facts}))
        else:
            print(
                f"right: {facts['collective']} over {facts['num_ranks']} ranks on {subject.topology.name}, "
                f"{facts['num_transfers']} transfers, depth {facts['depth']}, "
                f"algbw {facts['algbw']:.6g} {facts['unit']}"
            )


def _facts(schedule: Schedule) -> dict[str, Any]:
    return {
        "collective": schedule.collective.name,
        "num_ranks": schedule.collective.num_ranks,
        "method": schedule.method,
        "num_chunks": len(schedule.chunks),
        "num_transfers": len(schedule.transfers),
        "depth": schedule.depth,
        "algbw": float(schedule.algbw),
        "unit": schedule.topology.unit,
    }
