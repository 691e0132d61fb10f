"""``mycel bench``: collectives on an emulated cluster, every backend in the same run, beside the bound."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from mycel.errors import UsageError
from mycel.extras import needs
from mycel.names import spelled
from mycel.units import format_seconds, format_size, parse_size

if TYPE_CHECKING:
    from rich.table import Table

    from mycel.bench.case import Case
    from mycel.bench.measurement import Measurement
    from mycel.topology.model import Topology

__all__ = ["bench_table", "register"]

#: Calls back to back in a round of a small size, as many as nccl-tests makes.
_SMALL_CALLS = 20


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    app.command("bench")(bench)


def bench(
    cluster: Annotated[str | None, typer.Argument(help="Topology file of the cluster to emulate.")] = None,
    collective: Annotated[
        str,
        typer.Option(
            help="all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, reduce, gather, scatter; several by "
            "commas; 'all'."
        ),
    ] = "all_reduce",
    sizes: Annotated[str, typer.Option(help="Sizes of the whole array, powers of 1024.")] = "64KB,1MB,16MB",
    begin: Annotated[
        str | None, typer.Option("-b", "--begin", help="Smallest size of a sweep, in place of --sizes.")
    ] = None,
    end: Annotated[str, typer.Option("-e", "--end", help="Largest size of the sweep.")] = "16MB",
    factor: Annotated[int, typer.Option("-f", "--factor", help="From a size of the sweep to the next.", min=2)] = 2,
    baseline: Annotated[str, typer.Option(help="torch.distributed backend to compare with.")] = "gloo",
    repeats: Annotated[int, typer.Option("-n", "--repeats", help="Timed rounds of each backend.", min=1)] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    loopback: Annotated[
        int | None, typer.Option(help="Run this many ranks on 127.0.0.1, without emulation and without a bound.")
    ] = None,
    here: Annotated[
        bool,
        typer.Option("--here", help="This process is a rank of a job that torchrun, mpirun or srun started."),
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds the whole run may take.")] = 1800.0,
) -> None:
    """Time collectives: baseline and mycel in the same run, beside the bound, in the columns of nccl-tests."""
    needs("mycel bench", "torch")
    from mycel.bench.nccl_table import nccl_tables
    from mycel.bench.run import bench_cases, make_cases
    from mycel.cli import consoles
    from mycel.emulate import acquire_privileges

    fabric = _fabric(cluster, loopback, here=here)
    names = _collectives(collective)
    byte_sizes = _sweep(begin, end, factor) if begin is not None else [parse_size(text) for text in sizes.split(",")]
    backends = list(dict.fromkeys([baseline, "mycel"]))
    cases = make_cases(names, byte_sizes, repeats=repeats, both_ways=True, small_calls=_SMALL_CALLS)
    if fabric is None:
        found = _measure_here(cases, backends, timeout)
        if found is None:  # another rank than the first
            return
        rows = found
    else:
        if not isinstance(fabric, int):
            acquire_privileges()
        with consoles.notes().status("starting the ranks") as status:
            rows = bench_cases(
                fabric,
                cases,
                backends=backends,
                timeout_s=timeout,
                progress=lambda m: status.update(
                    f"{m.collective} {format_size(m.bytes)} over {m.backend}: {format_seconds(m.median_s)}"
                ),
            )
    if as_json:
        first = rows[0]
        document = {
            "topology": first.topology,
            "emulated": first.emulated,
            "unit": first.unit,
            "world_size": first.world_size,
            "baseline": baseline,
            "versions": first.versions,
            "rows": [m.to_json() for m in rows],
        }
        print(json.dumps(document))
    else:
        print(nccl_tables(rows, baseline=baseline), end="")
        print(_absent(backends))
    wrong = [m for m in rows if not m.correct]
    if wrong:
        first = wrong[0]
        print(
            f"mycel: {first.collective} of {format_size(first.bytes)} over {first.backend} gave {first.wrong} wrong "
            "elements",
            file=sys.stderr,
        )
        raise typer.Exit(1)


def _sweep(begin: str, end: str, factor: int) -> list[int]:
    """Sizes from the first to the last, each a multiple of the one before."""
    size, last = parse_size(begin), parse_size(end)
    if size > last:
        raise UsageError(f"a sweep from {begin} to {end} has no sizes")
    found = []
    while size <= last:
        found.append(size)
        size *= factor
    return found


def _measure_here(cases: Sequence[Case], backends: Sequence[str], timeout_s: float) -> list[Measurement] | None:
    """Measurements as one rank of a running job; ``None`` on all ranks but the first."""
    import torch.distributed as dist

    from mycel.bench.run import measurement_of
    from mycel.bench.worker import measure
    from mycel.settings import read_settings
    from mycel.topology.load import load_topology

    described = read_settings().topology
    fabric = None if described is None else load_topology(described)
    rows: list[Measurement] = []

    def take(record: dict[str, object]) -> None:
        rows.append(measurement_of(dist.get_world_size() if fabric is None else fabric, record, emulated=False))

    measure(cases, backends, timeout_s, take)
    return rows or None


def _absent(backends: Sequence[str]) -> str:
    """What users may look for and do not find in the table, and why."""
    from torch.distributed import is_mpi_available

    absent = []
    if "nccl" not in backends:
        absent.append("nccl (moves memory of GPUs only; these tensors are on CPUs)")
    if "mpi" not in backends:
        why = "not asked for: --baseline mpi" if is_mpi_available() else "this torch was built without it"
        absent.append(f"mpi ({why})")
    return "# Not measured: " + "; ".join(absent)


def bench_table(rows: Sequence[Measurement], *, baseline: str) -> Table:
    """A row a measurement: quantiles, bandwidths, fraction of the bound, ratio to the baseline, processor time."""
    from rich.table import Table
    from rich.text import Text

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
    for heading in (
        "size",
        "backend",
        "median",
        "p10",
        "p90",
        "algbw",
        "busbw",
        "of bound",
        f"vs {baseline}",
        "cpu s/GB",
    ):
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
            "" if m.cpu_s_per_gb is None else f"{m.cpu_s_per_gb:.3g}",
            "yes" if m.correct else Text("NO", style="red"),
        )
        previous = key
    return table


def _fabric(cluster: str | None, loopback: int | None, *, here: bool) -> Topology | int | None:
    from mycel.cli.fabric import load_fabric

    if (cluster is not None) + (loopback is not None) + here != 1:
        raise UsageError("give either a topology file, or --loopback N, or --here under torchrun")
    if here:
        return None
    return loopback if cluster is None else load_fabric(cluster)


def _collectives(text: str) -> list[str]:
    from mycel.bench.case import BENCH_COLLECTIVES

    names = list(BENCH_COLLECTIVES) if text == "all" else [name.strip() for name in text.split(",")]
    return [spelled(name, BENCH_COLLECTIVES, "collective to bench") for name in names]
