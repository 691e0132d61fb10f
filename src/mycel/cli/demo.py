"""``mycel demo``: train a model over an emulated cluster, first over Gloo, then over mycel, and report."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mycel.errors import UsageError
from mycel.extras import needs
from mycel.units import format_seconds, format_size, parse_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from mycel.report.data import Report

__all__ = ["register"]

_TITLES = {"gloo": "train over Gloo", "mycel": "train over mycel", "bandwidth": "bandwidth of both"}


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    app.command("demo")(demo)


def demo(
    ranks: Annotated[int | None, typer.Option(help="Ranks in two nodes (default 8).", min=2)] = None,
    cluster: Annotated[str | None, typer.Option(help="Topology file or builder instead of the two nodes.")] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.", min=1)] = 60,
    output: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("mycel-report"),
    size: Annotated[str, typer.Option(help="Size whose bandwidth is measured; '0' measures none.")] = "16MB",
    width: Annotated[int | None, typer.Option(help="Width of the model.", min=8)] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the model.", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Train a small language model over an emulated cluster: the same training over Gloo and over mycel."""
    needs("mycel demo", "torch", "matplotlib")
    from mycel.cli import consoles
    from mycel.cli.fabric import load_fabric
    from mycel.demo.run import BACKENDS, MEASURED, DemoOptions, run_demo, write_report
    from mycel.emulate import acquire_privileges
    from mycel.errors import EmulationError
    from mycel.topology.builders import two_boxes

    if ranks is not None and cluster is not None:
        raise UsageError("give either --ranks or --cluster: a cluster file says how many ranks there are")
    options = DemoOptions(
        topology=load_fabric(cluster) if cluster is not None else two_boxes(num_ranks=ranks or 8),
        steps=steps,
        bandwidth_bytes=0 if size == "0" else parse_size(size),
        train_arguments=_train_arguments(width, layers),
    )
    console = consoles.notes()
    try:
        acquire_privileges()
    except EmulationError as error:
        console.print("no emulation:", style="bold", end=" ")
        console.print(f"{error}\nThe demo goes on over loopback, which shows no fabric.", soft_wrap=True)
    topology = options.topology
    console.print(f"{topology.num_ranks} ranks on {topology.name}, {steps} steps a run; report in {output}/")
    with _View(console, steps=steps, num_measurements=len(MEASURED) * len(BACKENDS)) as view:
        report = run_demo(options, progress=view.take)
    files = write_report(report, output)
    if as_json:
        print(json.dumps({**report.to_json(), "files": {ending: str(file) for ending, file in files.items()}}))
    else:
        _print_summary(report, files)


def _train_arguments(width: int | None, layers: int | None) -> tuple[str, ...]:
    chosen = {"--width": width, "--layers": layers}
    return tuple(text for name, value in chosen.items() if value is not None for text in (name, str(value)))


class _View:
    """Live progress: a bar a stage, with loss and step time; on a pipe, a line every ten steps."""

    def __init__(self, console: Console, *, steps: int, num_measurements: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = console
        self._totals = {"gloo": steps, "mycel": steps, "bandwidth": num_measurements}
        self._progress: Progress = Progress(
            TextColumn("{task.description:<18}", markup=False),
            BarColumn(bar_width=28, complete_style="green", finished_style="green"),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._bits = ""
        self._lock = threading.Lock()

    def __enter__(self) -> _View:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def take(self, stage: str, record: Mapping[str, Any]) -> None:
        """Shows one record; called from reader threads."""
        with self._lock:
            self._take(stage, record)

    def _take(self, stage: str, record: Mapping[str, Any]) -> None:
        event = record["event"]
        if event == "launch":
            self._bits = ""
            self._tasks[stage] = self._progress.add_task(
                _TITLES[stage], total=self._totals[stage], note="starting the ranks"
            )
            self._say(f"{_TITLES[stage]}: starting the ranks")
        elif event == "eval":
            self._bits = f"{record['bits_per_byte']:.3f} bits a byte held out"
        elif event == "step":
            note = f"loss {record['loss']:.4f}  step {format_seconds(record['step_s'])}  {self._bits}"
            self._progress.update(self._tasks[stage], completed=record["step"], note=note)
            if record["step"] % 10 == 0:
                self._say(f"{_TITLES[stage]}: step {record['step']}  {note}")
        elif event == "measured":
            m = record["measurement"]
            note = f"{m.collective} over {m.backend}: {m.algbw:.3g} {m.unit}"
            self._progress.update(self._tasks[stage], advance=1, note=note)
            self._say(f"{_TITLES[stage]}: {format_size(m.bytes)} {note}")

    def _say(self, line: str) -> None:
        if not self._console.is_terminal:
            self._console.print(line, soft_wrap=True)


def _print_summary(report: Report, files: Mapping[str, Path]) -> None:
    from rich.table import Table

    from mycel.cli import consoles
    from mycel.cli.bench import bench_table

    console = consoles.output(wide=True)
    console.print(f"\n{report.headline}", style="bold")
    if not report.emulated:
        console.print(
            f"{report.why_not_emulated} The speed figures are of loopback and show no fabric.", soft_wrap=True
        )
    table = Table(header_style="bold")
    table.add_column("backend", overflow="fold")
    for heading in ("median step", "compute alone", "training", "held-out bits a byte"):
        table.add_column(heading, justify="right", overflow="fold")
    for run in (report.baseline, report.ours):
        table.add_row(
            run.backend,
            format_seconds(run.median_step_s),
            format_seconds(run.alone_step_s),
            format_seconds(run.total_s),
            f"{run.evaluations[-1].bits_per_byte:.6f}",
        )
    console.print(table)
    console.print(f"ratio of the median steps {report.speedup:.2f}; {report.loss_sentence}")
    if report.measurements:
        console.print(bench_table(report.measurements, baseline=report.baseline.backend))
    for file in files.values():
        console.print(str(file), soft_wrap=True)
