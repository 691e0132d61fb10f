"""``mycel plan known``: writes the order of a published schedule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mycel.errors import UsageError
from mycel.pipeline.known import KNOWN, known_order
from mycel.pipeline.lower import lower
from mycel.pipeline.order import Order

__all__ = ["register", "write_order"]


def write_order(order: Order, output: Path) -> None:
    """Write an order to a file: JSON where its name ends in ``.json``, CSV otherwise.

    Args:
        order: to be written.
        output: the file.

    Raises:
        UsageError: it cannot be written.
    """
    text = json.dumps(order.to_json()) + "\n" if output.suffix == ".json" else order.to_csv()
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{output}: cannot be written: {error.strerror}") from None


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("known", help="Write the order of a published schedule, as torch's CSV or as JSON.")
    def known(
        name: Annotated[str, typer.Argument(help=f"One of {', '.join(KNOWN)}.", show_default=False)],
        ranks: Annotated[int, typer.Option(help="Ranks of the pipeline.", show_default=False)],
        micro_batches: Annotated[int, typer.Option(help="Micro-batches of the batch.", show_default=False)],
        chunks: Annotated[int | None, typer.Option(help="Stages a rank, where a schedule has several.")] = None,
        communication: Annotated[
            bool, typer.Option("--communication", help="With messages, gathers and reductions among the actions.")
        ] = False,
        output: Annotated[
            Path | None, typer.Option("--output", "-o", help="File; .json for JSON. Printed if not given.")
        ] = None,
        json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    ) -> None:
        order = known_order(name, ranks, micro_batches, chunks)
        if communication:
            order = lower(order)
        if output is not None:
            write_order(order, output)
        if json_output:
            print(json.dumps(order.to_json()))
        elif output is None:
            print(order.to_csv(), end="")
