"""``mycel report``: flight records of all ranks, merged: where time went, who was late, which link is slow."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mycel.errors import UsageError

if TYPE_CHECKING:
    from mycel.report.flight.findings import Findings
    from mycel.report.flight.links import Suspect

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    app.command("report")(report)


def report(
    places: Annotated[list[Path], typer.Argument(help="Folders or files of flight records, of all ranks.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Page (.html) or timeline for trace viewers (.json).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Say what the flight records of a job's ranks tell together."""
    from mycel.report.flight.findings import examine
    from mycel.report.flight.links import carried, suspect
    from mycel.report.flight.records import read_dumps

    if output is not None and output.suffix not in (".html", ".json"):
        raise UsageError(f"{output}: the name must end in .html (a page) or .json (a timeline)")
    findings = examine(read_dumps(places))
    connections = carried(findings.dumps)
    slow = suspect(connections)
    if output is not None:
        if output.suffix == ".html":
            from mycel.report.flight.page import render_page

            text = render_page(findings, connections, slow)
        else:
            from mycel.report.flight.trace import render_trace

            text = render_trace(findings)
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{output}: cannot be written: {error.strerror}") from None
        print(f"written to {output}", file=sys.stderr)
    if as_json:
        from mycel.report.flight.words import summary

        print(json.dumps(summary(findings, connections, slow)))
    elif output is None:
        _print(findings, slow)


def _print(findings: Findings, slow: Suspect | None) -> None:
    from rich.table import Table

    from mycel.cli import consoles
    from mycel.report.flight.words import (
        KIND_HEADS,
        headline,
        kind_row,
        late_sentence,
        suspect_sentence,
        unfinished_sentence,
    )

    console = consoles.output(wide=True)
    first = headline(findings, slow)
    console.print(first, style="bold")
    table = Table(
        title="where time went: seconds of an average rank",
        caption=f"{findings.clocks.how}; {len(findings.dumps)} of {findings.dumps[0].world_size} ranks",
        title_justify="left",
        caption_justify="left",
        header_style="bold",
    )
    for position, head in enumerate(KIND_HEADS):
        table.add_column(head, justify="left" if position < 2 else "right", overflow="fold")
    for kind in findings.kinds:
        table.add_row(*kind_row(kind))
    if findings.kinds:
        console.print(table)
    sentences = [late_sentence(findings)]
    sentences += [f"{suspect_sentence(slow)}."] if slow is not None else []
    sentences += [f"{unfinished_sentence(u)}." for u in findings.unfinished]
    if findings.silent:
        which = "ranks" if len(findings.silent) > 1 else "rank"
        sentences.append(f"No records of {which} {', '.join(map(str, findings.silent))}.")
    for sentence in sentences:
        if sentence.rstrip(".") != first:
            console.print(sentence)
