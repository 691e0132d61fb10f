"""Runs the demo: train over the baseline, train over mycel, measure bandwidths, write the report."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mycel.bench.measurement import Measurement, describe_hardware, describe_versions
from mycel.bench.ranks import run_ranks
from mycel.bench.run import bench_cases, bound_algbw, make_cases, warm_up
from mycel.brief import brief
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import Collective
from mycel.emulate import check_support
from mycel.errors import EmulationError, SynthesisError
from mycel.report.data import Report, TrainingRun
from mycel.topology.model import Topology

__all__ = ["BACKENDS", "MEASURED", "DemoOptions", "Progress", "run_demo", "write_report"]

#: The baseline, then ours.
BACKENDS = ("gloo", "mycel")

#: Collectives that data-parallel training uses.
MEASURED = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")

#: Receives the stage (a backend, or ``bandwidth``) and what happened in it; may run in another thread.
Progress = Callable[[str, Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What to run.

    Attributes:
        topology: the cluster.
        steps: optimizer steps of each run.
        bandwidth_bytes: size of the arrays whose bandwidth is measured; 0 measures none.
        bandwidth_repeats: timed rounds of each collective and backend.
        train_arguments: passed on to ``mycel.demo.train``.
        timeout_s: for each of the three runs.
    """

    topology: Topology
    steps: int = 60
    bandwidth_bytes: int = 16 << 20
    bandwidth_repeats: int = 2
    train_arguments: tuple[str, ...] = ()
    timeout_s: float = 1800.0

    __repr__ = brief


def run_demo(options: DemoOptions, *, progress: Progress | None = None) -> Report:
    """Everything that is measured; ``write_report`` makes files of it.

    Where this machine cannot emulate the cluster, the ranks run over loopback, and the report says so.

    Raises:
        CommunicationError: a rank failed.
    """
    tell: Progress = progress or (lambda stage, record: None)
    where, why_not = _place(options.topology)
    runs = {backend: _train(backend, where, options, tell) for backend in BACKENDS}
    measurements = _bandwidths(where, options, tell)
    emulated = not why_not
    return Report(
        topology=options.topology,
        emulated=emulated,
        why_not_emulated=why_not,
        schedule=_schedule(options.topology),
        baseline=runs[BACKENDS[0]],
        ours=runs[BACKENDS[1]],
        measurements=tuple(measurements),
        bounds={c: float(bound_algbw(options.topology, c)) for c in MEASURED} if emulated else {},
        hardware=describe_hardware(),
        versions=describe_versions(),
    )


def write_report(report: Report, folder: Path) -> dict[str, Path]:
    """Writes ``report.html``, ``report.png`` and ``report.json`` and returns where they are, by their ending."""
    from mycel.report.figures import write_png
    from mycel.report.html import write_html

    folder.mkdir(parents=True, exist_ok=True)
    files = {ending: folder / f"report.{ending}" for ending in ("html", "png", "json")}
    write_html(report, files["html"])
    write_png(report, files["png"])
    files["json"].write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")
    return files


def _place(topology: Topology) -> tuple[Topology | int, str]:
    """Where to run: the topology, or its number of ranks on loopback and why."""
    try:
        check_support()
    except EmulationError as error:
        return topology.num_ranks, f"{error}."
    return topology, ""


def _train(backend: str, where: Topology | int, options: DemoOptions, tell: Progress) -> TrainingRun:
    records: list[Mapping[str, Any]] = []

    def take(rank: int, record: dict[str, Any]) -> None:
        if rank == 0 and "event" in record:
            records.append(record)
            tell(backend, record)

    command = [sys.executable, "-m", "mycel.demo.train", "--backend", backend, "--steps", str(options.steps)]
    tell(backend, {"event": "launch"})
    run_ranks(
        where,
        [*command, *options.train_arguments],
        sink=take,
        timeout_s=options.timeout_s,
        warm=warm_up if backend == "mycel" else None,
    )
    return TrainingRun.from_records(records)


def _bandwidths(where: Topology | int, options: DemoOptions, tell: Progress) -> Sequence[Measurement]:
    if not options.bandwidth_bytes:
        return []
    tell("bandwidth", {"event": "launch"})
    cases = make_cases(MEASURED, [options.bandwidth_bytes], repeats=options.bandwidth_repeats)
    return bench_cases(
        where,
        cases,
        backends=BACKENDS,
        timeout_s=options.timeout_s,
        progress=lambda m: tell("bandwidth", {"event": "measured", "measurement": m}),
    )


def _schedule(topology: Topology) -> Schedule | None:
    """The forest that all-gather runs on; one of its trees is drawn."""
    from mycel.collectives.synth import synthesize

    try:
        return synthesize(topology, Collective(name="all_gather", num_ranks=topology.num_ranks))
    except SynthesisError:
        return None
