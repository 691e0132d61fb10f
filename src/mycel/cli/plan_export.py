"""``mycel plan export``: a plan as torchtitan, Megatron-LM, accelerate, DeepSpeed or torch read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mycel.cli.plan_files import write_text
from mycel.errors import UsageError
from mycel.planning.plan import read_plan
from mycel.planning.plan.export import FORMS

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("export", help=f"A plan as others read it: {', '.join(FORMS)}.")
    def plan_export(
        file: Annotated[Path, typer.Argument(help="Plan, as 'mycel plan search' writes it.", show_default=False)],
        to: Annotated[str, typer.Option(help=f"Form: {', '.join(FORMS)}.", show_default=False)],
        output: Annotated[
            Path | None, typer.Option("-o", "--output", help="Folder that gets the files. Printed if not given.")
        ] = None,
        json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object: files by name.")] = False,
    ) -> None:
        plan = read_plan(file)
        plan.validate()
        files = plan.export(to)
        if output is not None:
            try:
                output.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"{output}: no folder can be made there: {error.strerror}") from None
            for name, text in files.items():
                write_text(text, output / name)
        if json_output:
            print(json.dumps(files))
        elif output is not None:
            print("\n".join(f"{output / name}: written" for name in files))
        else:
            for place, (name, text) in enumerate(files.items()):
                # The first is what people asked for; what else it needs is told apart by its name.
                print((f"# {name}\n" if place else "") + text, end="")
