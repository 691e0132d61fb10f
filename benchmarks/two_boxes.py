"""How much faster than Gloo, and how near to the bound: two nodes, a star, small messages, a busy main thread.

    python benchmarks/two_boxes.py [--repeats 5] [--only nodes,star,latency,busy] [--output FILE.jsonl]

Prints a table a question and, at the end, each target beside what was measured. Every point is appended to the
output file as one JSON line: a ``Measurement`` with the question, the commit and the time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mycel.bench import Case, Measurement, bench_cases
from mycel.cli.bench import bench_table
from mycel.cli.consoles import output
from mycel.errors import MycelError
from mycel.topology import load_topology
from mycel.topology.model import Topology
from record import CLUSTERS, ROOT, append, stamp

LARGE = 16 << 20
BACKENDS = ("gloo", "mycel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A claim that a run confirms or not.

    Attributes:
        claim: in words.
        value: from the measurements of the question, by ``(world size, collective, mode, backend)``.
        least: the claim holds from here up.
    """

    claim: str
    value: Callable[[Points], float]
    least: float


Points = dict[tuple[int, str, str, str], Measurement]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is measured, where, and what should come out of it."""

    title: str
    places: tuple[Topology | int, ...]
    cases: tuple[Case, ...]
    targets: tuple[Target, ...]


def ratio(world_size: int, collective: str, mode: str = "blocking") -> Callable[[Points], float]:
    """Median of Gloo over median of mycel."""
    return lambda points: (
        points[world_size, collective, mode, "gloo"].median_s / points[world_size, collective, mode, "mycel"].median_s
    )


def of_bound(world_size: int, collective: str) -> Callable[[Points], float]:
    """Fraction of the bound that mycel reaches."""
    return lambda points: points[world_size, collective, "blocking", "mycel"].fraction_of_bound or 0.0


def slowdown_ratio(world_size: int, collective: str) -> Callable[[Points], float]:
    """How much more a busy main thread slows Gloo down than mycel."""

    def value(points: Points) -> float:
        slower = {
            backend: points[world_size, collective, "busy", backend].median_s
            / points[world_size, collective, "waiting", backend].median_s
            for backend in BACKENDS
        }
        return slower["gloo"] / slower["mycel"]

    return value


def questions(repeats: int) -> dict[str, Question]:
    """The questions by name."""
    large = tuple(
        Case(collective=c, num_bytes=LARGE, repeats=repeats) for c in ("all_reduce", "all_gather", "reduce_scatter")
    )
    small = Case(collective="all_reduce", num_bytes=1024, repeats=max(10, repeats), calls=100)
    idle, busy = (
        Case(collective="all_reduce", num_bytes=LARGE, repeats=3 * repeats, mode=mode) for mode in ("waiting", "busy")
    )
    return {
        "nodes": Question(
            title="Two nodes of 4, 400 Mbit/s inside, 50 per rank between, 16 MB",
            places=(load_topology(CLUSTERS / "two_boxes.yaml"),),
            cases=large,
            targets=(
                Target(claim="two nodes: all_reduce, times Gloo", value=ratio(8, "all_reduce"), least=5.0),
                Target(claim="two nodes: all_reduce, of the bound", value=of_bound(8, "all_reduce"), least=0.85),
                Target(claim="two nodes: all_gather, times Gloo", value=ratio(8, "all_gather"), least=5.0),
                Target(claim="two nodes: reduce_scatter, times Gloo", value=ratio(8, "reduce_scatter"), least=8.0),
            ),
        ),
        "star": Question(
            title="Star of 4 at 400 Mbit/s, 16 MB",
            places=(load_topology(CLUSTERS / "star4.yaml"),),
            cases=large,
            targets=tuple(
                Target(claim=f"star of 4: {case.collective}, times Gloo", value=ratio(4, case.collective), least=1.0)
                for case in large
            ),
        ),
        "latency": Question(
            title="1 KB all_reduce on loopback, calls back to back",
            places=(2, 4),
            cases=(small,),
            targets=tuple(
                Target(claim=f"1 KB all_reduce, {n} ranks, times Gloo", value=ratio(n, "all_reduce"), least=1.0)
                for n in (2, 4)
            ),
        ),
        "busy": Question(
            title="16 MB all_reduce on loopback, idle main thread and one that runs Python",
            places=(2, 4),
            cases=(idle, busy),
            targets=tuple(
                Target(claim=f"busy main thread, {n} ranks: {claim}", value=value, least=1.0)
                for n in (2, 4)
                for claim, value in (
                    ("all_reduce, times Gloo", ratio(n, "all_reduce", "busy")),
                    ("slow-down of Gloo over that of mycel", slowdown_ratio(n, "all_reduce")),
                )
            ),
        ),
    }


def ask(name: str, question: Question, console: Console, output: Path) -> list[tuple[Target, float]]:
    """Measures one question; returns its targets with what came out."""
    console.rule(question.title, align="left")
    marks = {"question": name, **stamp()}
    points: Points = {}
    for place in question.places:
        rows = bench_cases(place, question.cases, backends=BACKENDS)
        console.print(bench_table(rows, baseline=BACKENDS[0]))
        append(output, [{**m.to_json(), **marks} for m in rows])
        points |= {(m.world_size, m.collective, m.mode, m.backend): m for m in rows}
    return [(target, target.value(points)) for target in question.targets]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the chosen questions; exit code 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="nodes,star,latency,busy")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "benchmarks.jsonl")
    options = parser.parse_args(arguments)
    known = questions(options.repeats)
    chosen = options.only.split(",")
    if unknown := sorted(set(chosen) - set(known)):
        parser.error(f"no question is called {unknown[0]!r}; there are {', '.join(known)}")
    console = output(wide=True)
    results = [result for name in chosen for result in ask(name, known[name], console, options.output)]
    table = Table(title="Targets", title_justify="left", header_style="bold")
    for heading in ("claim", "at least", "measured", "met"):
        table.add_column(heading, justify="left" if heading == "claim" else "right")
    for target, value in results:
        met = "yes" if value >= target.least else "[red]NO[/]"
        table.add_row(target.claim, f"{target.least:g}", f"{value:.2f}", met)
    console.print(table)
    console.print(f"lines appended to {options.output}", soft_wrap=True)
    return 0 if all(value >= target.least for target, value in results) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MycelError as error:
        sys.exit(f"two_boxes: {error}")
