"""``mycel bench``: collectives on an emulated cluster, every backend in the same run, beside the bound."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mycel.bench.case import BENCH_COLLECTIVES, DTYPES, FROM_OR_TO_ROOT, OPERATIONS, REDUCING, WHOLE_NUMBERS
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
            help="all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, reduce, gather, scatter, sendrecv "
            "(each rank to the next); several by commas; 'all'."
        ),
    ] = "all_reduce",
    sizes: Annotated[str, typer.Option(help="Sizes of the whole array, powers of 1024.")] = "64KB,1MB,16MB",
    begin: Annotated[
        str | None, typer.Option("-b", "--begin", help="Smallest size of a sweep, in place of --sizes.")
    ] = None,
    end: Annotated[str, typer.Option("-e", "--end", help="Largest size of the sweep.")] = "16MB",
    factor: Annotated[
        int | None,
        typer.Option("-f", "--factor", help="From a size of the sweep to the next; 2 if not given.", min=2),
    ] = None,
    step: Annotated[
        str | None, typer.Option("-i", "--stepbytes", help="From a size of the sweep to the next, in place of -f.")
    ] = None,
    datatype: Annotated[
        str,
        typer.Option(
            "-d",
            "--datatype",
            help="float, double, half, bfloat16, int8, uint8, int32, int64, or as torch has them; several by commas; "
            "'all'.",
        ),
    ] = "float",
    op: Annotated[
        str,
        typer.Option("-o", "--op", help="sum, prod, min, max, avg, for what reduces; several by commas; 'all'."),
    ] = "sum",
    root: Annotated[
        str, typer.Option("-r", "--root", help="Rank, for what has a root; 'all' or -1: every rank in turn.")
    ] = "0",
    baseline: Annotated[str, typer.Option(help="torch.distributed backend to compare with.")] = "gloo",
    repeats: Annotated[int, typer.Option("-n", "--repeats", help="Timed rounds of each backend.", min=1)] = 5,
    warm_up: Annotated[
        int | None,
        typer.Option(
            "-w",
            "--warmup-iters",
            help="Calls of full size before the timed ones; if not given, as many as plans and connections need.",
            min=0,
        ),
    ] = None,
    check: Annotated[int, typer.Option("-c", "--check", help="1: check every result; 0: none.", min=0, max=1)] = 1,
    csv: Annotated[
        str | None, typer.Option("-F", "--csv", help="Also write a CSV file; '-': to standard output, alone.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    loopback: Annotated[
        int | None, typer.Option(help="Run this many ranks on 127.0.0.1, without emulation and without a bound.")
    ] = None,
    here: Annotated[
        bool,
        typer.Option("--here", help="This process is a rank of a job that torchrun, mpirun or srun started."),
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds the whole run may take.")] = 1800.0,
    own: Annotated[
        list[str] | None,
        typer.Option(
            "--schedule",
            help="Schedule of one's own, which serves mycel's calls of its collective: its file, or FILE.py[:NAME]; "
            "may be repeated.",
        ),
    ] = None,
) -> None:
    """Time collectives: baseline and mycel in the same run, beside the bound, in the columns of nccl-tests."""
    needs("mycel bench", "torch")
    from mycel.bench.run import bench_cases, make_cases
    from mycel.cli import consoles
    from mycel.emulate import acquire_privileges

    fabric = _fabric(cluster, loopback, here=here)
    names = _collectives(collective)
    byte_sizes = _sizes(sizes, begin, end, factor, step)
    dtypes, ops = _dtypes(datatype), _ops(op, names)
    if "avg" in ops and all(dtype in WHOLE_NUMBERS for dtype in dtypes) and op != "all":
        raise UsageError(f"-o avg has no exact answer in -d {datatype}; take a floating-point type")
    table = _table_file(csv, as_json=as_json)
    roots = _roots(root, names, _num_ranks(fabric))
    backends = list(dict.fromkeys([baseline, "mycel"]))
    cases = make_cases(
        names,
        byte_sizes,
        repeats=repeats,
        both_ways=True,
        small_calls=_SMALL_CALLS,
        dtypes=dtypes,
        ops=ops,
        roots=roots,
        check=bool(check),
        warm_up=warm_up,
    )
    rows: list[Measurement] = []
    interrupted = False
    expected = len(cases) * len(backends)
    with consoles.doing("starting the ranks" if fabric is not None else "measuring") as say:

        def note(m: Measurement) -> None:
            rows.append(m)
            say(
                f"{len(rows)} of {expected}: {m.collective} {format_size(m.bytes)} over {m.backend}: "
                f"{format_seconds(m.median_s)}"
            )

        try:
            if fabric is None:
                _measure_here(cases, backends, timeout, note, own or ())
            else:
                if not isinstance(fabric, int):
                    acquire_privileges()
                bench_cases(fabric, cases, backends=backends, timeout_s=timeout, progress=note, schedules=own or ())
        except KeyboardInterrupt:
            interrupted = True
    if rows:  # not so on other ranks than the first
        _show(rows, baseline=baseline, backends=backends, table=table, as_json=as_json)
    if interrupted:
        kept = f"{len(rows)} of {expected} rows were measured" if rows else "nothing was measured"
        raise KeyboardInterrupt(kept + (f" and written to {csv}" if rows and isinstance(table, Path) else ""))
    wrong = [m for m in rows if not m.correct]
    if wrong:
        first = wrong[0]
        print(
            f"mycel: {first.collective} of {format_size(first.bytes)} over {first.backend} gave {first.wrong} wrong "
            "elements",
            file=sys.stderr,
        )
        raise typer.Exit(1)


def _show(
    rows: Sequence[Measurement], *, baseline: str, backends: Sequence[str], table: Path | str | None, as_json: bool
) -> None:
    """What was measured: tables, or one JSON object, or CSV; and the CSV file."""
    from mycel.bench.nccl_table import nccl_csv, nccl_tables

    if isinstance(table, Path):
        try:
            table.write_text(nccl_csv(rows, baseline=baseline), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{table}: cannot be written: {error.strerror}") from None
        print(f"written to {table}", file=sys.stderr)
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
    elif table == "-":
        print(nccl_csv(rows, baseline=baseline), end="")
    else:
        print(nccl_tables(rows, baseline=baseline), end="")
        print(_absent(backends))


def _table_file(csv: str | None, *, as_json: bool) -> Path | str | None:
    """Where the CSV goes; refused before anything is measured where it cannot go there."""
    if csv is None:
        return None
    if csv == "-":
        if as_json:
            raise UsageError("--csv - and --json both want standard output: give one of them, or a file")
        return csv
    file = Path(csv)
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise UsageError(f"--csv {csv}: " + ("that is a folder" if file.is_dir() else "there is no such folder"))
    return file


def _sizes(sizes: str, begin: str | None, end: str, factor: int | None, step: str | None) -> list[int]:
    if begin is None:
        if factor is not None or step is not None:
            raise UsageError(f"{'-f' if step is None else '-i'} is for a sweep: say where it begins, with -b")
        return [parse_size(text) for text in sizes.split(",")]
    if factor is not None and step is not None:
        raise UsageError("-f multiplies and -i adds: give one of them")
    return _sweep(begin, end, factor or 2, None if step is None else parse_size(step))


def _sweep(begin: str, end: str, factor: int, step: int | None) -> list[int]:
    """Sizes from the first to the last, each a multiple of the one before, or so much more."""
    size, last = parse_size(begin), parse_size(end)
    if size > last:
        raise UsageError(f"a sweep from {begin} to {end} has no sizes")
    if size < 1 or (step is not None and step < 1):
        raise UsageError("a sweep begins at 1 byte or more and goes up")
    found = []
    while size <= last:
        found.append(size)
        size = size * factor if step is None else size + step
    return found


def _dtypes(text: str) -> list[str]:
    from mycel.bench.nccl_table import NCCL_TYPES

    if text == "all":
        return list(DTYPES)
    by_nccl = {name: dtype for dtype, name in NCCL_TYPES.items()}
    found = [spelled(name.strip().removeprefix("torch."), [*by_nccl, *DTYPES], "type") for name in text.split(",")]
    return list(dict.fromkeys(by_nccl.get(name, name) for name in found))


def _ops(text: str, collectives: Sequence[str]) -> list[str]:
    found = list(OPERATIONS) if text == "all" else [spelled(o.strip(), OPERATIONS, "op") for o in text.split(",")]
    if found != ["sum"] and not set(collectives) & set(REDUCING):
        raise UsageError(f"-o {text}: {', '.join(collectives)} adds nothing up; {', '.join(REDUCING)} do")
    return list(dict.fromkeys(found))


def _roots(text: str, collectives: Sequence[str], num_ranks: int) -> list[int]:
    if text in ("all", "-1"):
        found = list(range(num_ranks))
    elif text.isdecimal() and int(text) < num_ranks:
        found = [int(text)]
    else:
        raise UsageError(f"-r {text}: expected a rank, 0 to {num_ranks - 1}, or 'all'")
    if found != [0] and not set(collectives) & set(FROM_OR_TO_ROOT):
        raise UsageError(f"-r {text}: {', '.join(collectives)} has no root; {', '.join(FROM_OR_TO_ROOT)} have")
    return found


def _num_ranks(fabric: Topology | int | None) -> int:
    if fabric is None:
        from mycel.settings import read_launched

        return read_launched().world_size
    return fabric if isinstance(fabric, int) else fabric.num_ranks


def _measure_here(
    cases: Sequence[Case],
    backends: Sequence[str],
    timeout_s: float,
    note: Callable[[Measurement], None],
    own: Sequence[str],
) -> None:
    """Measurements as one rank of a running job; ``note`` receives them on the first rank."""
    import torch.distributed as dist

    from mycel.bench.run import measurement_of
    from mycel.bench.worker import measure
    from mycel.settings import read_settings
    from mycel.topology.load import load_topology

    described = read_settings().topology
    fabric = None if described is None else load_topology(described)

    def take(record: dict[str, object]) -> None:
        note(measurement_of(dist.get_world_size() if fabric is None else fabric, record, emulated=False))

    measure(cases, backends, timeout_s, take, own)


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
    table.add_column("collective", overflow="fold")
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
        table.add_column(heading, justify="left" if heading == "backend" else "right", overflow="fold")
    table.add_column("right", justify="center", overflow="fold")
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
    names = list(BENCH_COLLECTIVES) if text == "all" else [name.strip() for name in text.split(",")]
    return [spelled(name, BENCH_COLLECTIVES, "collective to bench") for name in names]
