"""``mycel export``: a schedule file in the form another tool reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mycel.cli.verify import read_schedule
from mycel.cli.write import FORMS, form_of, write_schedule
from mycel.collectives.verify import verify_schedule
from mycel.units import parse_size

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the subcommand."""

    @app.command("export", help="Verify a schedule file and write it in a form that another tool reads.")
    def command(
        schedule: Annotated[Path, typer.Argument(metavar="SCHEDULE", help="Schedule in JSON or text form.")],
        output: Annotated[
            Path, typer.Option("-o", "--output", help="File to write; chakra writes one a rank, NAME.0.et and so on.")
        ],
        form: Annotated[
            str | None,
            typer.Option("--format", help=f"One of {', '.join(FORMS)}; by the end of the file's name if not given."),
        ] = None,
        size: Annotated[str, typer.Option(help="Size of the whole array, for chrome_trace and chakra.")] = "16MB",
        piece: Annotated[
            str | None, typer.Option(help="Longest message, for chrome_trace and chakra; what fits if not given.")
        ] = None,
    ) -> None:
        wanted = form or form_of(output)
        made = read_schedule(schedule)
        verify_schedule(made)
        length = None if piece is None else parse_size(piece)
        print("\n".join(write_schedule(made, output, wanted, num_bytes=parse_size(size), piece_bytes=length)))
