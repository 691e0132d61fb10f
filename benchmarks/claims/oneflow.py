"""What OneFlow claims of credits: few buffers between actors keep a pipeline busy; throughput against memory.

    python benchmarks/claims/oneflow.py    # three minutes; 4 ranks; replaces its lines and the table in the page

A credit is a micro-batch that a stage may have in flight, as a register of OneFlow's actors is; a stage without
credit waits. Orders are searched for each number of credits, over links that take as long as four fifths of a
forward, and measured; receive buffers are counted by their memory.

References:
    Yuan et al., "OneFlow: Redesign the Distributed Deep Learning Framework from Scratch", 2021 (arXiv 2110.15032),
    section 4.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tessel import BANDWIDTH_BITS, RANKS, chain

from mycel.pipeline.bounds import makespan_bound
from mycel.pipeline.search import find_batch
from mycel.pipeline.stages import order_of
from mycel.topology.builders import star
from paced import Case, measure
from record import RECORDED, ROOT, conclude, markdown

OUTPUT = RECORDED / "claims" / "oneflow.jsonl"
PAGE = ROOT / "docs" / "concepts" / "pipeline_claims.md"
UNIT_S, MICRO_BATCHES, ROUNDS, SEARCH_S = 0.006, 16, 5, 15.0
CREDITS = (1, 2, 3, 4, 6, 8, 16)


def cases() -> list[Case]:
    made = []
    for credits in CREDITS:
        placement = chain(f"{credits} credits", (5, 10), credits, delay=4)
        found = find_batch(placement, MICRO_BATCHES, time_limit_s=SEARCH_S)
        made.append(
            Case(
                name=str(credits),
                order=order_of(found.timed).to_json(),
                times={"F": 5 * UNIT_S, "B": 10 * UNIT_S},
                num_bytes=int(4 * UNIT_S * BANDWIDTH_BITS / 8),
                more={
                    "units": found.timed.makespan,
                    "bound": float(makespan_bound(placement, MICRO_BATCHES).value),
                    "peak": found.timed.peak,
                },
            )
        )
    return made


def table(lines: list[dict[str, Any]]) -> str:
    best = median(lines[-1]["seconds"])
    rows = [
        (
            line["case"],
            max(line["more"]["peak"]),
            max(line["received"]),
            f"{line['more']['bound'] * UNIT_S:.2f}",
            f"{line['more']['units'] * UNIT_S:.2f}",
            f"{median(line['seconds']):.2f}",
            f"{best / median(line['seconds']):.2f}",
        )
        for line in lines
    ]
    heads = ("credits", "micro-batches held", "receive buffers", "bound s", "planned s", "measured s", "throughput")
    return markdown(heads, rows)


def main() -> None:
    heard = measure(star(num_ranks=RANKS, bandwidth=f"{BANDWIDTH_BITS / 1e6:g} Mbit/s"), cases(), rounds=ROUNDS)
    if any(line["losses"] != heard[0]["losses"] for line in heard):
        raise SystemExit("losses differ")
    conclude(OUTPUT, PAGE, "oneflow", heard, table)


if __name__ == "__main__":
    main()
