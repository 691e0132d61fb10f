"""How near plans of sequences come to their bounds on instances that nobody tuned for.

    python benchmarks/sequence_unseen.py               # 34 instances, at most half an hour
    python benchmarks/sequence_unseen.py --limit 10 --only 64
    python benchmarks/sequence_unseen.py --quick       # every fourth, 10 seconds each, nothing recorded

Lengths of five forms (Wikipedia, the standard library's files, log-normal, uniform, Pareto, all from a seed) on 8 to
64 ranks, with what tokens exchange on four fabrics: FlexSP's constants, one flat switch, slow wires between nodes,
and the groups of two boxes, named by their ranks. Capacities are raised until five sixths of the ranks hold all, or
four fifths of all micro-batches where there are several. Steps are modelled; gaps are to bounds that hold for every
plan; times are measured.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mycel.bench.measurement import describe_hardware
from mycel.planning.grouping import SequenceInstance, candidates_of, check_plan, greedy_plan, plan_sequences
from mycel.planning.grouping.greedy import ready
from mycel.topology import load_topology
from record import RECORDED, ROOT, append, markdown, read, stamp, write_section
from sequence_plans import CAPACITY, COMM, COMPUTE, library, wikipedia

OUTPUT = RECORDED / "sequence_unseen.jsonl"
PAGE = ROOT / "docs" / "concepts" / "sequence_plans.md"

#: Microseconds a token by size.
FABRICS = {
    "FlexSP's": COMM,
    "flat": {1: 0.0, **{size: 40.0 / size * (1 - 1 / size) for size in (2, 4, 8, 16, 32, 64)}},
    "slow": {1: 0.0, 2: 50.0, 4: 27.777778, 8: 15.625, 16: 104.166667, 32: 56.818182, 64: 29.7},
}
#: Computation and bytes of a token of a smaller model, for the groups of two boxes.
BOXES = {"us_per_token2": 0.0011, "us_per_token": 26.0, "us_per_step": 90_000.0}
BYTES_A_TOKEN = 8e4

LENGTHS: dict[str, Callable[[np.random.Generator], int]] = {
    "Wikipedia": wikipedia,
    "standard library": library,
    "log-normal": lambda chance: max(16, int(chance.lognormal(8.2, 1.2))),
    "uniform": lambda chance: int(chance.integers(500, 14_001)),
    "Pareto": lambda chance: max(64, int(500 * (1 + chance.pareto(0.9)))),
}

#: Form, ranks, sequences, fabric, micro-batches.
CASES = (
    ("Wikipedia", 16, 64, "FlexSP's", 1),
    ("Wikipedia", 32, 128, "FlexSP's", 1),
    ("Wikipedia", 64, 256, "FlexSP's", 1),
    ("Wikipedia", 64, 512, "FlexSP's", 1),
    ("standard library", 16, 40, "FlexSP's", 1),
    ("standard library", 32, 64, "FlexSP's", 1),
    ("standard library", 64, 128, "FlexSP's", 1),
    ("standard library", 64, 300, "FlexSP's", 1),
    ("log-normal", 16, 32, "FlexSP's", 1),
    ("log-normal", 32, 48, "FlexSP's", 1),
    ("log-normal", 32, 100, "flat", 1),
    ("log-normal", 64, 64, "slow", 1),
    ("log-normal", 64, 200, "FlexSP's", 1),
    ("uniform", 16, 32, "FlexSP's", 1),
    ("uniform", 32, 48, "slow", 1),
    ("uniform", 64, 100, "FlexSP's", 1),
    ("uniform", 64, 64, "slow", 1),
    ("uniform", 8, 32, "flat", 1),
    ("Pareto", 16, 50, "FlexSP's", 1),
    ("Pareto", 32, 64, "slow", 1),
    ("Pareto", 64, 128, "flat", 1),
    ("Pareto", 64, 500, "FlexSP's", 1),
    ("standard library", 8, 32, "slow", 1),
    ("Wikipedia", 8, 40, "slow", 1),
    ("standard library", 16, 32, "two boxes", 1),
    ("log-normal", 16, 40, "two boxes", 1),
    ("uniform", 32, 64, "two boxes", 1),
    ("Wikipedia", 8, 32, "two boxes", 1),
    ("standard library", 8, 16, "FlexSP's", 2),
    ("log-normal", 8, 14, "FlexSP's", 3),
    ("uniform", 16, 32, "FlexSP's", 2),
    ("Wikipedia", 16, 60, "FlexSP's", 4),
    ("Pareto", 16, 24, "slow", 2),
    ("standard library", 32, 64, "FlexSP's", 4),
)


def instance_of(form: str, ranks: int, many: int, fabric: str, micro_batches: int, seed: int) -> SequenceInstance:
    """One instance; the same arguments give the same."""
    chance = np.random.default_rng(random.Random(f"{form} {ranks} {many} {fabric} {seed}").randrange(1 << 32))
    capacity = CAPACITY
    lengths: list[int] = []
    while len(lengths) < many:
        length = LENGTHS[form](chance)
        if length <= 0.6 * ranks * capacity:
            lengths.append(length)
    filled = 5 / 6 if micro_batches == 1 else 0.8 * micro_batches
    while sum(lengths) > filled * ranks * capacity:
        capacity = capacity * 5 // 4
    data: dict[str, Any] = {
        "num_ranks": ranks,
        "capacity_tokens": capacity,
        "lengths": lengths,
        "max_micro_batches": micro_batches,
    }
    if fabric == "two boxes":
        groups = candidates_of(load_topology(f"two_boxes:ranks={ranks}"), BYTES_A_TOKEN)
        named = [{"ranks": list(c.ranks or ()), "comm_us_per_token": c.comm_us_per_token} for c in groups]
        return SequenceInstance.from_json(data | {"compute": BOXES, "groups": named})
    degrees = {str(size): cost for size, cost in FABRICS[fabric].items() if size <= ranks}
    return SequenceInstance.from_json(data | {"compute": COMPUTE, "degrees": degrees})


def measure(case: tuple[str, int, int, str, int], limit_s: float, seed: int) -> dict[str, Any]:
    """One line."""
    form, ranks, many, fabric, micro_batches = case
    instance = instance_of(*case, seed)
    greedy_plan(instance)  # divisions of the ranks are counted once
    begin = time.process_time()
    fast = greedy_plan(instance)
    greedy_s = time.process_time() - begin
    begin, begin_cpu = time.monotonic(), time.process_time()
    plan = plan_sequences(instance, limit_s=limit_s)
    search_s, search_cpu_s = time.monotonic() - begin, time.process_time() - begin_cpu
    check_plan(instance, plan)
    return {
        "lengths": form,
        "ranks": ranks,
        "sequences": many,
        "fabric": fabric,
        "micro_batches": micro_batches,
        "seed": seed,
        "modelled": {"total_us": plan.total_us, "bound_us": plan.lower_bound_us, "greedy_us": fast.total_us},
        "gap": plan.gap,
        "proved": plan.proved,
        "measured": {"limit_s": limit_s, "search_s": search_s, "search_cpu_s": search_cpu_s, "greedy_s": greedy_s},
    }


def table(lines: list[dict[str, Any]]) -> str:
    """Rows of the page, of the latest line of each case, and what they come to."""
    keys = ("lengths", "ranks", "sequences", "fabric", "micro_batches")
    latest = {tuple(line[key] for key in keys): line for line in lines}
    rows = [
        (
            *case,
            f"{line['modelled']['total_us'] / 1e6:.3f} s",
            "proved" if line["proved"] else f"{line['gap']:.3%}",
            f"{line['modelled']['greedy_us'] / line['modelled']['total_us'] - 1:.2%}",
            f"{line['measured']['search_s']:.1f} s",
            f"{line['measured']['greedy_s'] * 1e3:.0f} ms",
        )
        for case, line in latest.items()
    ]
    headings = (
        "lengths",
        "ranks",
        "sequences",
        "fabric",
        "micro-batches, at most",
        "step, modelled",
        "gap to the bound",
        "greedy above the plan",
        "search, measured",
        "greedy, measured",
    )
    gaps = [line["gap"] for line in latest.values()]
    met = sum(gap <= 5e-4 for gap in gaps)
    limits = ", ".join(f"{limit:g}" for limit in sorted({line["measured"]["limit_s"] for line in latest.values()}))
    summary = (
        f"Within 0.05 % of the bound: {met} of {len(gaps)}, the median {statistics.median(gaps):.3%}, "
        f"the widest {max(gaps):.2%}; at most {limits} seconds each."
    )
    return f"{markdown(headings, rows)}\n{summary}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="every fourth instance, 10 seconds each")
    parser.add_argument("--only", default="", help="instances whose form, ranks or fabric is this, such as 64")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of search for each")
    parser.add_argument("--seed", type=int, default=1, help="of the lengths")
    arguments = parser.parse_args()
    ready()
    cases = [case for case in CASES if arguments.only in ("", case[0], str(case[1]), case[3])]
    lines = []
    for case in cases[::4] if arguments.quick else cases:
        lines.append(
            measure(case, min(arguments.limit, 10.0) if arguments.quick else arguments.limit, arguments.seed)
        )
        print(table(lines[-1:]), flush=True)
        if not arguments.quick:
            append(OUTPUT, [{**lines[-1], **stamp(), "hardware": describe_hardware()}])
    print(table(lines))
    if not arguments.quick:
        write_section(PAGE, "sequence_unseen", table(read(OUTPUT)))


if __name__ == "__main__":
    main()
