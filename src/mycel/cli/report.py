"""``mycel report``: flight records of all ranks, merged: where time went, who was late, which link is slow."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mycel.errors import UsageError

if TYPE_CHECKING:
    from mycel.report.flight.findings import Findings
    from mycel.report.flight.links import Suspect
    from mycel.report.pipeline import PipelineFlight

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
    """Say what the flight records of a job's ranks tell together.

    Where they are of pipelines: of every action, when it was planned and when it was measured.
    """
    from mycel.report.flight.findings import examine
    from mycel.report.flight.links import carried, suspect
    from mycel.report.flight.records import read_dumps
    from mycel.report.pipeline import read_pipelines

    if pipelines := read_pipelines(places):
        _print_pipelines(pipelines, output, as_json=as_json)
        return
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


def _print_pipelines(flights: Sequence[PipelineFlight], output: Path | None, *, as_json: bool) -> None:
    from rich.table import Table

    from mycel.cli import consoles
    from mycel.report.pipeline import compare, sentences

    if output is not None:
        _write_pipelines(flights, output)
    rows = compare(flights)
    said = sentences(flights)
    if as_json:
        actions = [
            {
                "rank": row.rank,
                "action": row.action,
                "planned_s": row.planned,
                "measured_s": row.measured,
                "waited_s": row.waited_s,
                "late_s": row.late_s,
            }
            for row in rows
        ]
        print(json.dumps({"findings": said, "actions": actions}))
        return
    if output is not None:
        return
    console = consoles.output(wide=True)
    for number, sentence in enumerate(said):
        console.print(sentence, style="bold" if number == 0 else None, highlight=False)
    table = Table()
    for head in ("rank", "action", "planned ms", "measured ms", "of that waited", "late by"):
        table.add_column(head, justify="left" if head == "action" else "right")
    for row in rows:
        planned = "" if row.planned is None else f"{1e3 * row.planned[0]:.1f} - {1e3 * row.planned[1]:.1f}"
        late = "" if row.late_s is None else f"{1e3 * row.late_s:+.1f}"
        measured = f"{1e3 * row.measured[0]:.1f} - {1e3 * row.measured[1]:.1f}"
        table.add_row(str(row.rank), row.action, planned, measured, f"{1e3 * row.waited_s:.1f}", late)
    console.print(table)


def _write_pipelines(flights: Sequence[PipelineFlight], output: Path) -> None:
    from mycel.report.pipeline_page import render_pipelines

    if output.suffix != ".html":
        raise UsageError(f"{output}: of pipelines there is a page: the name must end in .html; or --json")
    try:
        output.write_text(render_pipelines(flights), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{output}: cannot be written: {error.strerror}") from None
    print(f"written to {output}", file=sys.stderr)


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
