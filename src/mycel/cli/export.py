"""``mycel export``: a schedule file in the form another tool reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mycel.cli.verify import read_schedule
from mycel.collectives.export import FORMATS, SUFFIXES, export, files_of, format_of
from mycel.collectives.verify import verify_schedule
from mycel.errors import UsageError
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
            typer.Option(
                "--format", help=f"One of {', '.join(FORMATS)}; by the end of the file's name if not given."
            ),
        ] = None,
        size: Annotated[str, typer.Option(help="Size of the whole array, for chrome_trace and chakra.")] = "16MB",
    ) -> None:
        wanted = form or format_of(output.name)
        if wanted is None:
            raise UsageError(f"{output}: give --format, or a name that ends in {', '.join(SUFFIXES)}")
        made = read_schedule(schedule)
        verify_schedule(made)
        exported = export(made, wanted, num_bytes=parse_size(size))
        for file, data in files_of(exported, output).items():
            try:
                file.write_bytes(data)
            except OSError as error:
                raise UsageError(f"{file}: cannot be written: {error.strerror}") from None
