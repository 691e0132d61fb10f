"""``mycel probe``: started once a rank, measures the cluster and writes its topology file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mycel.errors import UsageError
from mycel.extras import needs

if TYPE_CHECKING:
    from mycel.probe import Found
    from mycel.topology.model import Topology

__all__ = ["register"]

#: With --expect, a capacity may be so far off.
_TOLERANCE = 0.1


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    app.command("probe")(probe)


def probe(
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Topology file that rank 0 writes: .yaml, .yml or .json.")
    ],
    picture: Annotated[
        str | None,
        typer.Option(help="Picture, .svg or .png; beside the topology file if not given; 'none' for none."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time the measurements may take.")] = 60.0,
    max_bytes: Annotated[str, typer.Option(help="Traffic of all ranks together, at most.")] = "8GB",
    join: Annotated[float, typer.Option(help="Seconds to wait for all ranks to come.")] = 60.0,
    window: Annotated[float, typer.Option(help="Seconds that are counted of each pattern of traffic.")] = 0.2,
    no_hops: Annotated[bool, typer.Option("--no-hops", help="Do not ask routers; go by bandwidth alone.")] = False,
    expect: Annotated[
        str | None,
        typer.Option(help="Topology file or builder to compare with; exit code 1 where the cluster differs."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Rank 0 prints one JSON object.")] = False,
) -> None:
    """Measure the cluster this runs on and write its topology: start it once a rank, as a training program.

    Works under torchrun (-m mycel probe), mpirun, srun and mycel emulate.
    """
    needs("mycel probe", "torch")
    from mycel.cli.fabric import load_fabric
    from mycel.probe import Limits
    from mycel.probe import probe as take_part
    from mycel.settings import read_launched, read_settings
    from mycel.units import parse_size

    if output.suffix.lower() not in (".yaml", ".yml", ".json"):
        raise UsageError(f"{output}: the name must end in .yaml, .yml or .json")
    drawing = None if picture == "none" else Path(picture) if picture else output.with_suffix(".svg")
    if drawing is not None and drawing.suffix.lower() not in (".svg", ".png"):
        raise UsageError(f"{drawing}: the name must end in .svg or .png")
    limits = Limits(seconds=seconds, max_bytes=parse_size(max_bytes), join_s=join, window_s=window, hops=not no_hops)
    wanted = None if expect is None else load_fabric(expect)
    found = take_part(
        read_launched(), read_settings(), limits, name=output.stem, progress=_show if sys.stderr.isatty() else _hide
    )
    if found is None:
        return
    _write(found, output)
    try:
        notes = [] if drawing is None else _draw(found, drawing)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{output} was written, its picture was not") from None
    _report(found, output, notes, as_json=as_json)
    if wanted is not None:
        _compare(found, wanted)


def _show(text: str) -> None:
    print(f"\r\033[Kprobe: {text}", end="", file=sys.stderr, flush=True)


def _hide(text: str) -> None:
    """Where nobody looks at a terminal, progress would fill a log."""


def _write(found: Found, output: Path) -> None:
    from mycel.probe import found_yaml
    from mycel.topology.json_format import to_json

    as_json = output.suffix.lower() == ".json"
    text = json.dumps(to_json(found.topology)) + "\n" if as_json else found_yaml(found)
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{output}: cannot be written: {error.strerror}") from None


def _draw(found: Found, file: Path) -> list[str]:
    try:
        needs("a picture", "matplotlib")
    except UsageError as error:
        return [str(error)]
    from mycel.report.picture import write_picture

    title = f"{found.topology.name}, as found (confidence: {found.confidence})"
    caption = f"{found.topology.num_ranks} ranks, {len(found.topology.switches)} switches"
    try:
        write_picture(found.topology, file, title=title, caption="; ".join([caption, *found.findings[:1]]))
    except OSError as error:
        raise UsageError(f"{file}: cannot be written: {error.strerror}") from None
    return [f"drawn in {file}"]


def _compare(found: Found, wanted: Topology) -> None:
    """Says what differs from the expected fabric, on standard error.

    Raises:
        typer.Exit: something does.
    """
    from mycel.probe.compare import compare

    differences = compare(found.topology, wanted)
    if differences is None:
        print(
            f"mycel: the cluster is not built as {wanted.name}: other cables or switches were found", file=sys.stderr
        )
        raise typer.Exit(1)
    off = [d for d in differences if abs(d.ratio - 1) > _TOLERANCE]
    for d in off:
        print(
            f"mycel: {d.src} -> {d.dst}: {d.found:.4g} {wanted.unit} found, {d.expected:g} expected", file=sys.stderr
        )
    if off:
        raise typer.Exit(1)


def _report(found: Found, output: Path, notes: list[str], *, as_json: bool) -> None:
    from mycel.probe import summary_lines
    from mycel.units import RATE_UNITS

    topology = found.topology
    scale = float(RATE_UNITS[topology.unit])
    rows = [
        (topology.label(note.src), topology.label(note.dst), topology.capacity[note.src, note.dst], note)
        for note in found.links
    ]
    if as_json:
        document = {
            "file": str(output),
            "num_ranks": topology.num_ranks,
            "unit": topology.unit,
            "links": [
                {
                    "from": src,
                    "to": dst,
                    "capacity": capacity,
                    "measured": note.measured / scale,
                    "times": note.num_evidence,
                    "spread": note.spread,
                    "in_series": note.series,
                }
                for src, dst, capacity, note in rows
            ],
            "confidence": found.confidence,
            "explained": found.explained,
            "checked": list(found.foretold),
            "findings": list(found.findings),
            "structure": found.reason,
            "notes": list(found.notes),
            "seconds": found.seconds,
            "bytes": found.num_bytes,
        }
        print(json.dumps(document))
        return
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    width = max(len(f"{src} -> {dst}") for src, dst, _, _ in rows)
    for src, dst, capacity, note in rows:
        print(f"{f'{src} -> {dst}':{width}}  {capacity:>8} {topology.unit}  {note.text()}")
    for line in (*summary_lines(found), f"written to {output}", *notes):
        print(line)
