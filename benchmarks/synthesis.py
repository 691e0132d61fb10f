"""Forest synthesis against size: time, peak memory, trees and depth, every forest checked.

Each case runs in a process of its own, so that peak memory and start-up are its own. numba's kernels are compiled
(or read from its cache) on a small fabric first, which is reported apart. JSON lines go to ``--output``, a table to
standard output.

    python benchmarks/synthesis.py                 # all cases, about a minute
    python benchmarks/synthesis.py --case dgx_a100:boxes=128
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

#: Fabric, and whether its symmetry may be used.
CASES = [
    ("dgx_a100:boxes=2", True),
    ("torus:dims=8x8", True),
    ("dgx_a100:boxes=16", True),
    ("dgx_h100:boxes=16", True),
    ("mi250:boxes=8", True),
    ("dgx_a100:boxes=16", False),
    ("dgx_a100:boxes=128", True),
    ("dgx_a100:boxes=128", False),
    ("dgx_h100:boxes=128", True),
    ("mi250:boxes=64", True),
    ("dgx_a100:boxes=512", True),
]
COLUMNS = ("topology", "ranks", "order", "compile_s", "bound_s", "forest_s", "check_s", "peak_mib", "trees", "depth")


def measure(spec: str, with_symmetry: bool) -> dict[str, Any]:
    """One case in this process."""
    started = time.perf_counter()
    from mycel.collectives.bound import find_optimum
    from mycel.collectives.synth.plan import plan_forest
    from mycel.topology.load import load_topology

    imported = time.perf_counter()
    for small in ("dgx_a100:boxes=2", "ring:ranks=4"):
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


def main() -> None:
    """Run the cases, each in a fresh process."""
    parser = argparse.ArgumentParser(description="Forest synthesis against size")
    parser.add_argument("--case", help="one fabric, measured in this process")
    parser.add_argument("--general", action="store_true", help="with --case: do not use its symmetry")
    parser.add_argument("--output", type=Path, help="append JSON lines here")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case, not options.general)))
        return
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for spec, with_symmetry in CASES:
        command = [sys.executable, __file__, "--case", spec, *([] if with_symmetry else ["--general"])]
        line = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        record = json.loads(line)
        cells = [
            f"{record[c]:.2f}" if c.endswith("_s") else str(round(record[c]) if c == "peak_mib" else record[c])
            for c in COLUMNS
        ]
        print("| " + " | ".join(cells) + " |", flush=True)
        if options.output:
            with options.output.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
