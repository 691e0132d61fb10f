"""What CoCoNet claims, for plans: an all_reduce split in two, and something moved between the halves.

    python benchmarks/claims/coconet_plans.py    # four minutes; 4 ranks; replaces its lines and the table in the page
    python benchmarks/claims/coconet_plans.py --quick    # one timed step of each plan; keeps nothing

Two rewrites, each before and after in one run: boundaries of stages in shares (scatter/gather), behind a slow link
between two boxes; and the optimizer between the halves of the gradients' sum (ZeRO-1) on a star. Bytes are those of
the interfaces' counters in one step; optimizer state is what a rank holds. Computation is paced, messages and losses
are real.

References:
    Jangda et al., "Breaking the Computation and Communication Abstraction Barrier in Distributed Machine Learning
    Workloads", ASPLOS 2022, section 3; Narayanan et al., SC 2021, section 4.1.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mycel.planning.cluster import load_cluster
from mycel.planning.job import Job, Mesh
from mycel.topology import parse_topology
from paced import ratio
from planned_ranks import Case, describe_model, measure, plan_by_hand
from record import RECORDED, ROOT, conclude, markdown

OUTPUT = RECORDED / "claims" / "coconet_plans.jsonl"
PAGE = ROOT / "docs" / "concepts" / "planned_claims.md"
BATCH, SEQ, ROUNDS = 8, 64, 11
SIZES = {"num_layers": 4}
DEVICE = "device: {name: fast, flops: 2e9, memory: 8GiB, memory_gbps: 8}"
BOXES = f"""
{DEVICE}
boxes:
  - name: box
    count: 2
    ranks: 2
    inside: {{bandwidth: 400 Mbit/s, latency: 50us}}
    uplink: {{to: core, bandwidth: 2 Mbit/s, latency: 50us, per: box}}
switches: [core]
"""
STAR = f"""
{DEVICE}
boxes:
  - {{name: node, count: 4, ranks: 1, uplink: {{to: core, bandwidth: 20 Mbit/s, latency: 50us, per: rank}}}}
switches: [core]
"""


def compared(
    text: str, rewrite: str, before: Job, after: Job, counts: list[int], *, rounds: int
) -> list[dict[str, Any]]:
    topology = parse_topology(text, source="cluster.yaml")
    cluster, model = load_cluster(topology), describe_model(SIZES, SEQ, "small")
    cases = [
        Case(name=f"{rewrite}, {when}", plan=plan_by_hand(cluster, model, job, counts).to_json(), sizes=SIZES)
        for when, job in (("before", before), ("after", after))
    ]
    lines = measure(topology, cases, rounds=rounds, counted=True)
    first = lines[0]["losses"]
    for line in lines:
        line["ratio"] = ratio(lines[0]["seconds"], line["seconds"])
        line["off"] = max(abs(a - b) for a, b in zip(first, line["losses"], strict=True))
        line["losses"] = line["losses"][-1:]
    return lines


def table(lines: list[dict[str, Any]]) -> str:
    rows = [
        (
            line["case"],
            f"{1e3 * median(line['seconds']):.0f}",
            f"{1e3 * line['predicted_s']:.0f}",
            f"{line['ratio']:.2f}",
            f"{line['crossed']:,}",
            f"{line['state_bytes']:,}",
            f"{line['off']:.0e}",
        )
        for line in lines
    ]
    headings = (
        "plan",
        "measured with paced computation, ms",
        "modelled, ms",
        "times as fast",
        "bytes between nodes in a step, counted",
        "bytes of optimizer state on rank 0",
        "losses apart",
    )
    return markdown(headings, rows)


def main() -> int:
    tensor = Job(mesh=Mesh(pp=2, tp=2), global_batch=BATCH, micro_batch=1, seq=SEQ)
    data = Job(mesh=Mesh(dp=4), global_batch=BATCH, micro_batch=1, seq=SEQ)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one timed step of each plan; keeps nothing")
    is_quick = parser.parse_args().quick
    rounds = 3 if is_quick else ROUNDS  # the first warms up, and the last is counted
    scattered, split = replace(tensor, is_scattered=True), replace(data, zero=1)
    lines = compared(BOXES, "boundaries in shares", tensor, scattered, [2, 2], rounds=rounds)
    lines += compared(STAR, "optimizer between the halves", data, split, [4], rounds=rounds)
    if is_quick:
        print(table(lines))
        return 0
    conclude(OUTPUT, PAGE, "coconet_plans", lines, table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
