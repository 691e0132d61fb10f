"""``mycel bench``: collectives on an emulated cluster, every backend in the same run, beside the bound."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from mycel.errors import UsageError
from mycel.units import format_seconds, format_size, parse_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from mycel.bench.measurement import Measurement
    from mycel.topology.model import Topology

__all__ = ["bench_table", "register", "wide_console"]


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    app.command("bench")(bench)


def bench(
    cluster: Annotated[str | None, typer.Argument(help="Topology file of the cluster to emulate.")] = None,
    collective: Annotated[
        str,
        typer.Option(help="all_reduce, all_gather, reduce_scatter, broadcast, all_to_all; several by commas; 'all'."),
    ] = "all_reduce",
    sizes: Annotated[str, typer.Option(help="Sizes of the whole array, powers of 1024.")] = "64KB,1MB,16MB",
    baseline: Annotated[str, typer.Option(help="torch.distributed backend to compare with.")] = "gloo",
    repeats: Annotated[int, typer.Option(help="Timed rounds of each backend.", min=1)] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    loopback: Annotated[
        int | None, typer.Option(help="Run this many ranks on 127.0.0.1, without emulation and without a bound.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds the whole run may take.")] = 1800.0,
) -> None:
    """Time collectives on an emulated cluster: baseline and mycel in the same run, beside the bound."""
    from rich.console import Console

    from mycel.bench.measurement import describe_versions
    from mycel.bench.run import LOOPBACK_NAME, LOOPBACK_UNIT, run_bench
    from mycel.emulate import acquire_privileges

    fabric = _fabric(cluster, loopback)
    if not isinstance(fabric, int):
        acquire_privileges()
    names = _collectives(collective)
    byte_sizes = [parse_size(text) for text in sizes.split(",")]
    backends = list(dict.fromkeys([baseline, "mycel"]))
    notes = Console(file=sys.stderr)
    with notes.status("starting the ranks") as status:
        rows = run_bench(
            fabric,
            names,
            byte_sizes,
            backends=backends,
            repeats=repeats,
            timeout_s=timeout,
            progress=lambda m: status.update(
                f"{m.collective} {format_size(m.bytes)} over {m.backend}: {format_seconds(m.median_s)}"
            ),
        )
    if as_json:
        document = {
            "topology": LOOPBACK_NAME if isinstance(fabric, int) else fabric.name,
            "emulated": not isinstance(fabric, int),
            "unit": LOOPBACK_UNIT if isinstance(fabric, int) else fabric.unit,
            "world_size": fabric if isinstance(fabric, int) else fabric.num_ranks,
            "baseline": baseline,
            "versions": describe_versions(),
            "rows": [m.to_json() for m in rows],
        }
        print(json.dumps(document))
    else:
        wide_console().print(bench_table(rows, baseline=baseline))
    wrong = [m for m in rows if not m.correct]
    if wrong:
        first = wrong[0]
        print(
            f"mycel: {first.collective} of {format_size(first.bytes)} over {first.backend} gave wrong results",
            file=sys.stderr,
        )
        raise typer.Exit(1)


def wide_console() -> Console:
    """Standard output; where it is no terminal, wide enough for a table instead of 80 columns."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=132)


def bench_table(rows: Sequence[Measurement], *, baseline: str) -> Table:
    """Columns as nccl-tests prints them, with the fraction of the bound and the ratio to the baseline."""
    from rich.table import Table

    first = rows[0]
    where = "emulated" if first.emulated else "not emulated: figures are of this machine alone"
    table = Table(
        title=f"{first.topology}, {first.world_size} ranks ({where})",
        caption=f"{first.hardware}; bandwidths in {first.unit}; a time is that of the slowest rank",
        title_justify="left",
        caption_justify="left",
        header_style="bold",
    )
    table.add_column("collective", no_wrap=True)
    for heading in ("size", "backend", "median", "p10", "p90", "algbw", "busbw", "of bound", f"vs {baseline}"):
        table.add_column(heading, justify="left" if heading == "backend" else "right", no_wrap=True)
    table.add_column("right", justify="center")
    reference = {(m.collective, m.bytes, m.mode): m.median_s for m in rows if m.backend == baseline}
    previous = None
    for m in rows:
        key = (m.collective, m.bytes, m.mode)
        if previous is not None and key != previous:
            table.add_section()
        base = reference.get(key)
        table.add_row(
            m.collective if key != previous else "",
            format_size(m.bytes) if key != previous else "",
            m.backend if m.mode == "blocking" else f"{m.backend} ({m.mode})",
            *(format_seconds(t) for t in (m.median_s, m.p10_s, m.p90_s)),
            f"{m.algbw:.4g}",
            f"{m.busbw:.4g}",
            "" if m.fraction_of_bound is None else f"{m.fraction_of_bound:.2f}",
            "" if base is None or m.backend == baseline else f"{base / m.median_s:.2f}x",
            "yes" if m.correct else "[red]NO[/]",
        )
        previous = key
    return table


def _fabric(cluster: str | None, loopback: int | None) -> Topology | int:
    from mycel.topology.load import load_topology

    if (cluster is None) == (loopback is None):
        raise UsageError("give either a topology file or --loopback N")
    if loopback is not None:
        return loopback
    assert cluster is not None
    return load_topology(cluster)


def _collectives(text: str) -> list[str]:
    from mycel.bench.case import BENCH_COLLECTIVES

    names = list(BENCH_COLLECTIVES) if text == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in BENCH_COLLECTIVES:
            raise UsageError(f"cannot bench {name!r}; known: {', '.join(BENCH_COLLECTIVES)}")
    return names
