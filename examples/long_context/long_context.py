"""Sequences of 8,192 bytes on ranks of 300 MiB: one that cannot, one with a plan of memory, four that share them.

    python examples/long_context/long_context.py            # most of an hour on two cores
    python examples/long_context/long_context.py --quick    # a few minutes: shows that it works, learns little

Four ranks are two nodes of two on an emulated cluster (needs root on Linux; on loopback otherwise). Every row runs
``one_rank.py``. Writes ``long_context.png`` and ``rows.json`` into the folder of ``--output`` and prints a table;
``--only`` runs some rows again and keeps the others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mycel.bench.measurement import describe_hardware, describe_versions
from mycel.bench.ranks import run_ranks
from mycel.bench.run import warm_up
from mycel.emulate import check_support
from mycel.errors import CommunicationError, EmulationError
from mycel.topology import load_topology
from mycel.topology.model import Topology

HERE = Path(__file__).resolve().parent
#: Bytes that one model sees at a time, and all others see more of.
SHORT = 512
#: Steps whose losses are compared, and after which rows of one rank stop.
COMPARED = 50
#: Rows, by what ``one_rank.py`` is told besides steps and context; and how many ranks they have.
ROWS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one process, no limit": (1, ("--until", str(COMPARED))),
    "one rank": (1, ("--until", str(COMPARED), "--limit", "LIMIT")),
    "one rank, a plan": (1, ("--until", str(COMPARED), "--limit", "LIMIT", "--plan")),
    "four ranks": (4, ("--limit", "LIMIT", "--held-out", "HELD_OUT")),
    "four ranks, no filtering": (4, ("--limit", "LIMIT", "--held-out", "HELD_OUT", "--no-filtering")),
    f"four ranks, {SHORT} bytes": (4, ("--limit", "LIMIT", "--held-out", "HELD_OUT", "--seen", str(SHORT))),
}
#: The rows that train the model of the first one.
SAME = ("one rank", "one rank, a plan", "four ranks")
#: The allocator gives memory back at once, so that a limit means what it says.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}
#: Steps, bytes of a sequence, MiB of a rank, and sequences of other files to predict in the end.
USUAL = {"steps": 300, "context": 8192, "limit": 300, "held_out": 16}
#: For a row.
TIMEOUT_S = 7200.0

Row = Mapping[str, Any]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 steps on 2,048 bytes with 80 MiB")
    parser.add_argument("--steps", type=int, help="of rows of four ranks; default: 300")
    parser.add_argument("--only", default=";".join(ROWS), help="rows, separated by semicolons; others stay")
    parser.add_argument("--output", type=Path, default=Path("long-context"))
    options = parser.parse_args(arguments)
    usual = {"steps": 4, "context": 2048, "limit": 80, "held_out": 1} if options.quick else USUAL
    for name, size in usual.items():
        setattr(options, name, getattr(options, name, None) or size)
    options.only = [name.strip() for name in options.only.split(";")]
    for name in options.only:
        if name not in ROWS:
            parser.error(f"--only: no row is called {name!r}; rows are {'; '.join(ROWS)}")
    return options


def run(name: str, cluster: Topology | int, options: argparse.Namespace) -> dict[str, Any]:
    """A row: what rank 0 said last, or why it ended."""
    ranks, more = ROWS[name]
    known = {"LIMIT": str(options.limit), "HELD_OUT": str(options.held_out)}
    command = [sys.executable, str(HERE / "one_rank.py"), *(known.get(word, word) for word in more)]
    command += ["--steps", str(options.steps), "--context", str(options.context)]
    said: list[dict[str, Any]] = [{"ranks": ranks}]

    def take(rank: int, record: dict[str, Any]) -> None:
        if record["event"] == "end":
            said.append(record)
        elif record["step"] % 10 == 0:
            print(f"{name}: step {record['step']}, {record['loss']:.4f} nats", flush=True)

    if ranks > 1:
        try:
            run_ranks(cluster, command, sink=take, env=ALLOCATOR, timeout_s=TIMEOUT_S, warm=warm_up)
        except CommunicationError as error:
            said.append({"refused": str(error)})
    else:
        env = {"OMP_NUM_THREADS": "1", **os.environ, **ALLOCATOR}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        for line in done.stdout.splitlines():
            take(0, json.loads(line))
        if done.returncode:
            said.append({"refused": done.stderr.strip().splitlines()[-1]})
    return said[0] | said[-1]


def beyond(row: Row, start: int) -> float | None:
    """Held-out nats of bytes that have as many before them."""
    parts = [part for part in row.get("held_out") or [] if part["start"] >= start]
    count = sum(part["bytes"] for part in parts)
    return sum(part["nats"] * part["bytes"] for part in parts) / count if count else None


def off(row: Row, reference: Row) -> float | None:
    """How far the first losses are from those of another row, at most."""
    pairs = list(zip(row.get("losses", ()), reference.get("losses", ()), strict=False))[:COMPARED]
    return max((abs(one - other) for one, other in pairs), default=None)


def table(rows: Mapping[str, Row]) -> str:
    """One line a row."""
    heads = ("", "taken at most, MiB a rank", "step, s", f"loss after {COMPARED} steps", "off by at most")
    heads += ("held-out nats", f"beyond {SHORT} bytes")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name, row in rows.items():
        fits = "refused" not in row
        figures = (
            (row.get("taken_mib"), ".0f"),
            (row.get("step_s"), ".2f"),
            (row["losses"][:COMPARED][-1] if fits else None, ".4f"),
            (off(row, rows.get("one process, no limit", {})) if name in SAME else None, ".1e"),
            (beyond(row, 0), ".4f"),
            (beyond(row, SHORT), ".4f"),
        )
        cells = ["" if value is None else format(value, form) for value, form in figures]
        why = "does not fit" if "does not fit" in row.get("refused", "") else "failed"
        lines.append("| " + " | ".join([name, *(cells if fits else [why, *cells[1:]])]) + " |")
    return "\n".join(lines)


def draw(rows: Mapping[str, Row], limit: float, file: Path) -> None:
    """Held-out loss against how much is before, and what each way to train one model takes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    learned, taken = figure.subplots(1, 2, width_ratios=(1.2, 1))
    for name, row in rows.items():
        if parts := row.get("held_out"):
            starts = [str(part["start"]) for part in parts]
            learned.plot(starts, [part["nats"] for part in parts], marker="o", markersize=4, label=name)
    learned.set_xlabel("bytes of the file before, at least")
    learned.set_ylabel("held-out loss, nats a byte")
    if learned.lines:
        learned.legend(frameon=False, fontsize=8)
    ways = [name for name in rows if name in SAME or rows[name]["ranks"] == 1]
    for place, name in enumerate(ways):
        row = rows[name]
        says = "does not fit" if "does not fit" in row.get("refused", "") else "failed"
        if "refused" not in row:
            taken.barh(place, row["taken_mib"], color="C7" if row["ranks"] == 1 else "C0", height=0.6, alpha=0.6)
            says = f"{row['taken_mib']:.0f} MiB, {row['step_s']:.2f} s a step"
        taken.text(4, place, says, va="center", fontsize=8)
    taken.axvline(limit, color="C3", linestyle="--", linewidth=1)
    taken.annotate(f"limit, {limit} MiB", (limit, -0.6), color="C3", fontsize=8, ha="center", annotation_clip=False)
    taken.set_yticks(range(len(ways)), ways, fontsize=8)
    taken.invert_yaxis()
    taken.set_xlabel("MiB that a rank takes at most")
    for axes in (learned, taken):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print, draw."""
    options = parse_arguments(arguments)
    cluster: Topology | int = 4
    try:
        check_support()
        cluster = load_topology(HERE / "two_pairs.yaml")
    except EmulationError as error:
        print(f"No cluster is emulated: {error}. On loopback, step times say nothing about links.")
    settings = {name: getattr(options, name) for name in USUAL} | {"emulated": isinstance(cluster, Topology)}
    file = options.output / "rows.json"
    before = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    rows: dict[str, dict[str, Any]] = before["rows"] if before.get("settings") == settings else {}
    options.output.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        rows[name] = run(name, cluster, options)
        print(f"{name}: {rows[name].get('refused', 'done')}", flush=True)
        rows = {each: rows[each] for each in ROWS if each in rows}
        stamp = {"settings": settings, "hardware": describe_hardware(), "versions": describe_versions()}
        file.write_text(json.dumps(stamp | {"rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(f"\n{table(rows)}\n\n{describe_hardware()}; medians of steps; one thread a process")
    draw(rows, options.limit, options.output / "long_context.png")
    print(f"Written to {options.output}: long_context.png, rows.json")


if __name__ == "__main__":
    main()
