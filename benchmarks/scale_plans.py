"""Plans against size and kind of fabric: bounds, what is reached, how deep, in which time; each in a cold process.

Unlike boxes, DGX A100 and H100, rails oversubscribed 2:1, dragonflies, tori and racks of 72, of 64 to 1,024 ranks,
whole and with 1 % of the network's cables failed (``+``), without names and in an order drawn by chance. For each and
each collective the command that a person would type is run on a file: ``mycel synth FILE -c NAME --summary``, and for
all_to_all ``mycel synth FILE -c all_to_all``, whose whole schedule is verified. What is printed comes from its JSON
object; processor seconds are user and system time of that process, start-up and reading the file included. One that
had to compile something first is run again.

Lines go to ``--output``, where they take the place of earlier ones of the same fabric, collective and order.

    python benchmarks/scale_plans.py                                        # all, some forty minutes on a core
    python benchmarks/scale_plans.py --ranks 64 --collectives all_gather
    python benchmarks/scale_plans.py --fabrics rails_256 rails_256+ --seeds 1 2 3 4 5
    python benchmarks/scale_plans.py --table                                # the page's table, of what is recorded
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from large_fabrics import FABRICS, fabric
from mycel.bench.measurement import describe_hardware
from mycel.topology.json_format import to_json
from record import RECORDED, ROOT, markdown, read, stamp, write_section

COLLECTIVES = ("all_gather", "all_to_all", "all_reduce")
NAMES = tuple(name + failed for name in FABRICS for failed in ("", "+"))
LIMIT_S = 300
#: What a process says that had to compile first: it is run again.
COMPILED = "compiling for this machine"
OUTPUT = RECORDED / "scale_plans.jsonl"
PAGE = ROOT / "docs" / "guides" / "benchmarks.md"
#: What of the command's JSON object is kept.
KEPT = ("num_ranks", "bound_algbw", "reached_algbw", "exact", "algbw", "optimal", "k", "num_trees", "depth", "unit")


def measure(name: str, collective: str, seed: int, limit_s: int) -> dict[str, Any]:
    """One case: the command in a process of its own."""
    line: dict[str, Any] = {"fabric": name, "ranks": FABRICS[name.removesuffix("+")][1], "collective": collective}
    line["seed"] = seed
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fabric.json"
        file.write_text(json.dumps(to_json(fabric(name, seed))), encoding="utf-8")
        words = [sys.executable, "-m", "mycel", "synth", str(file), "-c", collective, "--json"]
        words += [] if collective == "all_to_all" else ["--summary"]
        returned, seconds, mib, said = _run(words, Path(folder), limit_s)
        if COMPILED in said[1]:
            returned, seconds, mib, said = _run(words, Path(folder), limit_s)
    line |= {"cpu_s": seconds, "peak_mib": mib}
    if returned == -signal.SIGXCPU:
        return line | {"failure": f"more than {limit_s} s"}
    if returned:
        return line | {"failure": said[1].strip().splitlines()[-1][:300]}
    record = json.loads(said[0])
    return line | {key: record[key] for key in KEPT}


def _run(words: list[str], folder: Path, limit_s: int) -> tuple[int, float, float, tuple[str, str]]:
    """Its exit status, processor seconds, MiB at most, and both outputs."""
    out, err = folder / "out", folder / "err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(words, stdout=stdout, stderr=stderr)
        resource.prlimit(process.pid, resource.RLIMIT_CPU, (limit_s, limit_s + 10))
        _, status, usage = os.wait4(process.pid, 0)  # which alone says what this one child took
    process.returncode = os.waitstatus_to_exitcode(status)
    said = out.read_text(encoding="utf-8"), err.read_text(encoding="utf-8")
    return process.returncode, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, said


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row a fabric, a cell a collective."""
    rows = []
    for name in NAMES:
        of = {c: [x for x in lines if x["fabric"] == name and x["collective"] == c] for c in COLLECTIVES}
        if any(of.values()):
            ranks = FABRICS[name.removesuffix("+")][1]
            rows.append((f"`{name}`", ranks, *(_cell(of[collective]) for collective in COLLECTIVES)))
    return markdown(("fabric", "ranks", *COLLECTIVES), rows)


def _cell(lines: Sequence[dict[str, Any]]) -> str:
    """Of one fabric and collective: bound, what is reached of it, k, depth, seconds; the worst of several orders."""
    if not lines:
        return "not run"
    failures = [line["failure"] for line in lines if "failure" in line]
    if failures:
        return str(failures[0])
    worst = min(lines, key=lambda line: line["algbw"] / line["bound_algbw"])
    bounds = {f"{line['bound_algbw']:.6g}" for line in lines}
    depths = sorted({line["depth"] for line in lines})
    deep = f"{depths[0]} to {depths[-1]}" if len(depths) > 1 else str(depths[0])
    k = {line["k"] for line in lines}
    trees = f"k={k.pop()}, " if len(k) == 1 and worst["k"] is not None and worst["collective"] != "all_to_all" else ""
    reached = "all" if all(line["optimal"] for line in lines) else f"{worst['algbw'] / worst['bound_algbw']:.4f}"
    seconds = max(line["cpu_s"] for line in lines)
    return f"{' or '.join(sorted(bounds))}: {reached}, {trees}{deep} deep, {seconds:.1f} s"


def keep(file: Path, line: dict[str, Any]) -> None:
    """Put a line in the place of earlier ones of its kind."""

    def kind(other: dict[str, Any]) -> tuple[Any, ...]:
        return NAMES.index(other["fabric"]), COLLECTIVES.index(other["collective"]), other["seed"]

    lines = [other for other in read(file) if kind(other) != kind(line)] + [line]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(one) + "\n" for one in sorted(lines, key=kind)), encoding="utf-8")


def main() -> None:
    """Run the cases, smallest fabrics first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fabrics", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--ranks", type=int, nargs="+", help="only fabrics of so many ranks")
    parser.add_argument("--collectives", nargs="+", choices=COLLECTIVES, default=COLLECTIVES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="orders of vertices and links")
    parser.add_argument("--limit", type=int, default=LIMIT_S, help="processor seconds a case may take")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--table", action="store_true", help="write the page's table from recorded lines, and end")
    asked = parser.parse_args()
    if asked.table:
        write_section(PAGE, "scale_plans", table(read(asked.output)))
        return
    chosen = [name for name in asked.fabrics if not asked.ranks or FABRICS[name.removesuffix("+")][1] in asked.ranks]
    shared = {"hardware": describe_hardware(), **stamp()}
    made = []
    for collective in asked.collectives:
        for name in chosen:
            for seed in asked.seeds:
                made.append(measure(name, collective, seed, asked.limit))
                keep(asked.output, made[-1] | shared)
                print(f"{name}, {collective}, order {seed}: {_cell(made[-1:])}", flush=True)
    print(table(made))


if __name__ == "__main__":
    main()
