"""Forest synthesis against size: time, peak memory, trees and depth, every forest checked.

Each case runs in a process of its own, so that peak memory and start-up are its own. numba's kernels are compiled
(or read from its cache) on a small fabric first, which is reported apart. JSON lines go to ``--output``, a table to
standard output.

    python benchmarks/synthesis.py                 # all_gather's forests as arrays, about two minutes
    python benchmarks/synthesis.py --schedules     # whole schedules of the other collectives, about two minutes
    python benchmarks/synthesis.py --draw          # picture and table in the docs, from what is recorded
    python benchmarks/synthesis.py --case dgx_a100:nodes=128
    python benchmarks/synthesis.py --case torus:dims=8x8 --schedules --collective all_reduce
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mycel.collectives.spec import CollectiveName
from record import RECORDED, ROOT, append, markdown, read, write_section

#: Fabric, and whether its symmetry may be used.
CASES = [
    ("dgx_a100:nodes=2", True),
    ("torus:dims=8x8", True),
    ("dgx_a100:nodes=16", True),
    ("dgx_h100:nodes=16", True),
    ("mi250:nodes=8", True),
    ("dgx_a100:nodes=16", False),
    ("dgx_a100:nodes=128", True),
    ("dgx_a100:nodes=128", False),
    ("dgx_h100:nodes=128", True),
    ("mi250:nodes=64", True),
    ("dgx_a100:nodes=512", True),
    ("dragonfly:groups=9,routers=4,ranks_per_router=2", True),
    ("fat_tree:k=8", True),
    ("fat_tree:k=16", True),
]
#: Fabrics whose whole schedules are made, and of which collectives.
SCHEDULE_CASES = (
    "dgx_a100:nodes=2",
    "torus:dims=4x4",
    "dgx_a100:nodes=4",
    "dgx_a100:nodes=8",
    "mi250:nodes=4",
    "torus:dims=8x8",
    "dgx_a100:nodes=16",
)
COLLECTIVES: tuple[CollectiveName, ...] = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")
#: A flow between all pairs is a linear programme whose size grows with the square of the ranks.
LARGEST_FLOW = 64
RECORDED_FORESTS = RECORDED / "synthesis" / "allgather.jsonl"
RECORDED_SCHEDULES = RECORDED / "synthesis" / "schedules.jsonl"
PAGE = ROOT / "docs" / "guides" / "benchmarks.md"
PICTURE = ROOT / "docs" / "images" / "synthesis.png"
SCHEDULE_COLUMNS = ("topology", "ranks", "collective", "compile_s", "bound_s", "synthesis_s", "verify_s")
SCHEDULE_COLUMNS += ("peak_mib", "transfers", "of_bound")
COLUMNS = ("topology", "ranks", "order", "compile_s", "bound_s", "forest_s", "check_s", "peak_mib", "trees", "depth")


def measure(spec: str, with_symmetry: bool) -> dict[str, Any]:
    """One case in this process."""
    started = time.perf_counter()
    from mycel.collectives.bound import find_optimum
    from mycel.collectives.synth.plan import plan_forest
    from mycel.topology.load import load_topology

    imported = time.perf_counter()
    for small in ("dgx_a100:nodes=2", "ring:ranks=4"):
        fabric = load_topology(small)
        plan_forest(fabric, (1,) * fabric.num_ranks, is_reversed=False).check()
    compiled = time.perf_counter()
    fabric = load_topology(spec)
    weights = (1,) * fabric.num_ranks
    loaded = time.perf_counter()
    best = find_optimum(fabric, weights, is_reversed=False)
    bounded = time.perf_counter()
    forest = plan_forest(fabric, weights, is_reversed=False, with_symmetry=with_symmetry)
    grown = time.perf_counter()
    inverse_x, depth = forest.check()
    checked = time.perf_counter()
    if inverse_x != best.inverse_x:
        raise SystemExit(f"{spec}: the forest takes {inverse_x}, the bound is {best.inverse_x}")
    return {
        "topology": spec,
        "ranks": fabric.num_ranks,
        "with_symmetry": with_symmetry,
        "order": forest.order,
        "import_s": imported - started,
        "compile_s": compiled - imported,
        "load_s": loaded - compiled,
        "bound_s": bounded - loaded,
        "forest_s": grown - bounded,
        "check_s": checked - grown,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "trees": forest.num_trees,
        "units": forest.units,
        "depth": depth,
        "inverse_x": str(inverse_x),
    }


def measure_schedule(spec: str, name: CollectiveName) -> dict[str, Any]:
    """A whole schedule, made and verified in this process."""
    from mycel.collectives.bound import bound
    from mycel.collectives.spec import Collective
    from mycel.collectives.synth import synthesize
    from mycel.collectives.verify import verify_schedule
    from mycel.topology.load import load_topology

    def collective(ranks: int) -> Collective:
        return Collective(name=name, num_ranks=ranks, root=0 if name == "broadcast" else None)

    begin = time.perf_counter()
    for small in ("dgx_a100:nodes=1", "ring:ranks=4"):
        fabric = load_topology(small)
        verify_schedule(synthesize(fabric, collective(fabric.num_ranks)))
    compiled = time.perf_counter()
    fabric = load_topology(spec)
    loaded = time.perf_counter()
    best = bound(fabric, collective(fabric.num_ranks))
    bounded = time.perf_counter()
    schedule = synthesize(fabric, collective(fabric.num_ranks))
    made = time.perf_counter()
    verify_schedule(schedule)
    return {
        "topology": spec,
        "ranks": fabric.num_ranks,
        "collective": name,
        "method": schedule.method,
        "compile_s": compiled - begin,
        "bound_s": bounded - loaded,
        "synthesis_s": made - bounded,
        "verify_s": time.perf_counter() - made,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "transfers": len(schedule.transfers),
        "of_bound": float(schedule.algbw / best.algbw),
    }


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row a fabric, seconds of synthesis and of verification by collective."""
    rows = []
    for spec in dict.fromkeys(line["topology"] for line in lines):
        mine = {line["collective"]: line for line in lines if line["topology"] == spec}
        cells = [
            f"{mine[name]['synthesis_s']:.2f} + {mine[name]['verify_s']:.2f}" if name in mine else ""
            for name in COLLECTIVES
        ]
        largest = max(line["peak_mib"] for line in mine.values())
        rows.append((f"`{spec}`", next(iter(mine.values()))["ranks"], *cells, f"{largest:.0f} MiB"))
    return markdown(("fabric", "ranks", *COLLECTIVES, "largest process"), rows)


def draw(file: Path) -> None:
    """Time and memory against ranks, from the recorded lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    colours = {
        "dgx_a100": "#1b6e5a",
        "dgx_h100": "#d98a2b",
        "mi250": "#5b4b8a",
        "torus": "#9a9a9a",
        "dragonfly": "#b0413e",
        "fat_tree": "#3b6ea5",
    }
    marks = dict(zip(COLLECTIVES, "osD^v", strict=True))
    figure, (seconds, memory, others) = plt.subplots(1, 3, figsize=(15, 4.4), layout="constrained")
    series: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for line in read(RECORDED_FORESTS):
        series.setdefault((line["topology"].partition(":")[0], line["with_symmetry"]), []).append(line)
    for (family, symmetric), lines in series.items():
        lines.sort(key=lambda line: int(line["ranks"]))
        style = {
            "color": colours[family],
            "marker": "o" if symmetric else "s",
            "linestyle": "-" if symmetric else "--",
            "label": family if symmetric else f"{family}, symmetry not used",
        }
        ranks = [line["ranks"] for line in lines]
        seconds.plot(ranks, [line["bound_s"] + line["forest_s"] for line in lines], **style)
        memory.plot(ranks, [line["peak_mib"] for line in lines], **style)
    whole = read(RECORDED_SCHEDULES)
    for family in dict.fromkeys(line["topology"].partition(":")[0] for line in whole):
        for name in COLLECTIVES:
            found = [x for x in whole if x["collective"] == name and x["topology"].partition(":")[0] == family]
            found.sort(key=lambda line: int(line["ranks"]))
            others.plot(
                [line["ranks"] for line in found],
                [line["synthesis_s"] for line in found],
                color=colours[family],
                marker=marks[name],
                linewidth=0.8,
                label=f"{family}: {name}" if family == "dgx_a100" else None,
            )
    titles = ("all_gather: bound and forest, as arrays", "its process at its largest", "whole schedules")
    for panel, title, label in zip((seconds, memory, others), titles, ("seconds", "MiB", "seconds"), strict=True):
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlabel("ranks")
        panel.set_ylabel(label)
        panel.set_title(title, loc="left", fontsize=11)
        panel.grid(color="#e5e5e5", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.legend(fontsize=8, frameon=False)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def main() -> None:
    """Run the cases, each in a fresh process."""
    parser = argparse.ArgumentParser(description="Forest synthesis against size")
    parser.add_argument("--case", help="one fabric, measured in this process")
    parser.add_argument("--general", action="store_true", help="with --case: do not use its symmetry")
    parser.add_argument("--schedules", action="store_true", help="whole schedules of every collective instead")
    parser.add_argument("--collective", default="all_reduce", choices=COLLECTIVES, help="with --case --schedules")
    parser.add_argument("--draw", action="store_true", help="make picture and table from recorded lines, and end")
    parser.add_argument("--output", type=Path, help="append JSON lines here")
    options = parser.parse_args()
    if options.draw:
        draw(PICTURE)
        write_section(PAGE, "schedules", table(read(RECORDED_SCHEDULES)))
        return
    if options.case and options.schedules:
        print(json.dumps(measure_schedule(options.case, options.collective)))
        return
    if options.case:
        print(json.dumps(measure(options.case, not options.general)))
        return
    columns, arguments = COLUMNS, [[spec, *([] if symmetry else ["--general"])] for spec, symmetry in CASES]
    if options.schedules:
        columns, arguments = SCHEDULE_COLUMNS, schedule_arguments()
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for case in arguments:
        command = [sys.executable, __file__, "--case", *case]
        line = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        record = json.loads(line)
        cells = [f"{record[c]:.2f}" if isinstance(record[c], float) else str(record[c]) for c in columns]
        print("| " + " | ".join(cells) + " |", flush=True)
        if options.output:
            append(options.output, [record])


def schedule_arguments() -> list[list[str]]:
    """Of ``--case``, for every fabric and collective of which whole schedules are made."""
    from mycel.topology.load import load_topology

    return [
        [spec, "--schedules", "--collective", name]
        for spec in SCHEDULE_CASES
        for name in COLLECTIVES
        if name != "all_to_all" or load_topology(spec).num_ranks <= LARGEST_FLOW
    ]


if __name__ == "__main__":
    main()
