"""What plans of unequal sequences are worth for whole steps, modelled, and what planning takes, measured.

    python benchmarks/sequence_plans.py                # 10 batches a row, some minutes
    python benchmarks/sequence_plans.py --batches 3 --only "standard library"
    python benchmarks/sequence_plans.py --quick        # 3 batches a row, nothing recorded

Batches are drawn from the lengths of Wikipedia's articles or of the standard library's files, longer ones than a step
allows left out, until they fill four fifths of the ranks. A step's time is FlexSP's model with its authors' constants
(7B on A100; degrees from 16 on cross nodes at one rate): nothing runs. Beside our plan stand

- the one degree that the longest allowed length needs, for every batch;
- the best single degree of each batch;
- Megatron's rule: of each sequence the smallest power of two that holds it, distributed by our own greedy, which is
  better than its own.

``planning`` is measured: seconds of processor time of one plan, of which the greedy's and the search's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mycel.bench.measurement import describe_hardware
from mycel.planning.grouping import SequenceInstance, check_plan, greedy_plan, plan_sequences, static_plans
from mycel.planning.grouping.batch import Batch
from mycel.planning.grouping.greedy import dual_greedy, ready
from mycel.planning.grouping.split import splits
from record import RECORDED, ROOT, append, markdown, read, stamp, write_section

OUTPUT = RECORDED / "sequence_plans.jsonl"
PAGE = ROOT / "docs" / "concepts" / "sequence_plans.md"
DATA = Path(__file__).parent / "data"
LENGTHS = ROOT / "tests" / "data" / "planning" / "stdlib_lengths.json"

#: FlexSP's constants, in microseconds; tokens that a rank of an A100 holds.
COMPUTE = {"us_per_token2": 0.005128, "us_per_token": 183.9576, "us_per_step": 629356.3}
CAPACITY = 15870
COMM = {1: 0.0, 2: 6.493506, 4: 3.649635, 8: 2.066116, 16: 14.367816, 32: 7.183908, 64: 3.591954}
#: Ranks, and the longest sequence that a step allows.
CASES = ((16, 64 << 10), (16, 192 << 10), (32, 256 << 10), (64, 512 << 10))
#: Never reached by a real time: sequences are not to be on such groups.
FORBIDDEN = 1e18


def wikipedia(chance: np.random.Generator) -> int:
    """A length of an article."""
    quantiles = json.loads((DATA / "wikipedia_quantiles.json").read_text(encoding="utf-8"))
    at = np.interp(chance.uniform(0, 100), quantiles["percent"], np.log(quantiles["quantiles"]))
    return max(1, int(np.exp(at)))


def library(chance: np.random.Generator) -> int:
    """A length of a file."""
    return int(chance.choice(json.loads(LENGTHS.read_text(encoding="utf-8"))["lengths"]))


def batch_of(draw: Callable[[np.random.Generator], int], ranks: int, longest: int, seed: int) -> SequenceInstance:
    """One step's instance."""
    chance = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < 0.8 * ranks * CAPACITY:
        length = draw(chance)
        if length <= longest:
            lengths.append(length)
    return SequenceInstance.from_json(
        {
            "num_ranks": ranks,
            "capacity_tokens": CAPACITY,
            "compute": COMPUTE,
            "degrees": {str(size): cost for size, cost in COMM.items() if size <= ranks},
            "lengths": lengths,
            "max_micro_batches": 8,
        }
    )


def by_rule(instance: SequenceInstance) -> float:
    """Microseconds with the degree of each sequence given by its length alone."""
    best = float("inf")
    whole = Batch.of(instance)
    for many in range(1, instance.max_micro_batches + 1):
        for parts in splits(whole, many):
            total = 0.0
            for part in parts:
                batch = Batch.of(instance, part)
                needed = 2 ** np.ceil(np.log2(np.maximum(1, batch.tokens / instance.capacity_tokens)))
                work = np.where(batch.sizes == needed[:, None], batch.work, FORBIDDEN)
                ranked = np.argsort(work * batch.sizes, axis=1, kind="stable")
                found = dual_greedy(replace(batch, work=work, ranked=ranked))
                total += FORBIDDEN if found is None else found.time_us
            best = min(best, total)
    return best


def measure(name: str, ranks: int, longest: int, batches: int, limit_s: float) -> dict[str, Any]:
    """One row: medians over batches."""
    draw = {"Wikipedia": wikipedia, "standard library": library}[name]
    over: dict[str, list[float]] = {key: [] for key in ("needed", "best", "rule", "greedy")}
    planning: dict[str, list[float]] = {"greedy": [], "search": []}
    steps, gaps, counts = [], [], []
    needed = next(size for size in sorted(COMM) if size * CAPACITY >= longest)
    for seed in range(batches):
        instance = batch_of(draw, ranks, longest, seed)
        begin = time.process_time()
        fast = greedy_plan(instance)
        planning["greedy"].append(time.process_time() - begin)
        begin = time.process_time()
        plan = plan_sequences(instance, limit_s=limit_s)
        planning["search"].append(time.process_time() - begin)
        check_plan(instance, plan)
        static = static_plans(instance)
        over["needed"].append(static[needed].total_us / plan.total_us)
        over["best"].append(min(each.total_us for each in static.values()) / plan.total_us)
        over["rule"].append(by_rule(instance) / plan.total_us)
        over["greedy"].append(fast.total_us / plan.total_us)
        steps.append(plan.total_us / 1e6)
        gaps.append(plan.gap)
        counts.append(len(instance.lengths))
    return {
        "lengths": name,
        "ranks": ranks,
        "longest": longest,
        "batches": batches,
        "sequences": statistics.median(counts),
        "needed_degree": needed,
        "modelled": {
            "step_s": statistics.median(steps),
            **{key: [statistics.median(values), min(values), max(values)] for key, values in over.items()},
            "gap": max(gaps),
        },
        "measured": {
            "greedy_s": statistics.median(planning["greedy"]),
            "search_s": statistics.median(planning["search"]),
            "limit_s": limit_s,
        },
    }


def table(lines: list[dict[str, Any]]) -> str:
    """Rows of the page, of the latest line of each case."""
    latest = {(line["lengths"], line["ranks"], line["longest"]): line for line in lines}
    rows = []
    for line in latest.values():
        modelled, measured = line["modelled"], line["measured"]

        def ratio(key: str, modelled: dict[str, Any] = modelled) -> str:
            middle, low, high = modelled[key]
            return f"{middle:.2f} ({low:.2f} to {high:.2f})"

        rows.append(
            (
                line["lengths"],
                line["ranks"],
                f"{line['longest'] >> 10} Ki",
                line["batches"],
                f"{modelled['step_s']:.1f} s",
                f"{ratio('needed')}, degree {line['needed_degree']}",
                ratio("best"),
                ratio("rule"),
                f"{modelled['gap']:.1%}",
                f"{measured['greedy_s'] * 1e3:.0f} ms",
                f"{measured['search_s']:.1f} s",
            )
        )
    headings = (
        "lengths",
        "ranks",
        "longest",
        "batches",
        "step, modelled",
        "over the needed degree",
        "over each batch's best degree",
        "over Megatron's rule",
        "widest gap to the bound",
        "greedy, measured",
        "search, measured",
    )
    return markdown(headings, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 batches a row")
    parser.add_argument("--batches", type=int, default=10, help="batches a row")
    parser.add_argument("--only", default="", help="rows whose lengths or ranks are these, such as 64")
    parser.add_argument("--limit", type=float, default=2.0, help="seconds of search a batch")
    arguments = parser.parse_args()
    ready()
    for name in ("Wikipedia", "standard library"):
        for ranks, longest in CASES:
            if arguments.only not in ("", name, str(ranks)):
                continue
            line = measure(name, ranks, longest, 3 if arguments.quick else arguments.batches, arguments.limit)
            print(table([line]))
            if not arguments.quick:
                append(OUTPUT, [{**line, **stamp(), "hardware": describe_hardware()}])
    if not arguments.quick:
        write_section(PAGE, "sequence_plans", table(read(OUTPUT)))


if __name__ == "__main__":
    main()
