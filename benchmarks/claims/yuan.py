"""What YUAN 2.0 claims: stages of unequal sizes and no tensor parallelism, where nodes are slow inside.

    python benchmarks/claims/yuan.py            # three minutes; 4 ranks; replaces its lines and the table in the page
    python benchmarks/claims/yuan.py --quick    # two steps of each plan; keeps nothing

Two boxes of two ranks that are joined slowly, inside as well, and a model with a heavy head. Plans take turns in one
run: tensor parallelism in each box, as everybody's rule has it; a pipeline of equal stages; and what search finds
under YUAN's limits (no tensor parallelism). Computation is paced, messages and losses are real; tensor parallelism
pays for this machine's collectives besides, so that its ratio says less than its bytes do.

References:
    Wu et al., "YUAN 2.0: A Large Language Model with Localized Filtering-based Attention", 2023 (arXiv 2311.15786),
    section 4 (non-uniform pipeline parallelism).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mycel.planning.cluster import load_cluster
from mycel.planning.job import Job, Mesh
from mycel.planning.plan.build import plan_of
from mycel.planning.search import Limits, search
from mycel.topology import parse_topology
from paced import ratio
from planned_ranks import Case, describe_model, measure, plan_by_hand
from record import RECORDED, ROOT, conclude, markdown

OUTPUT = RECORDED / "claims" / "yuan.jsonl"
PAGE = ROOT / "docs" / "concepts" / "planned_claims.md"
BATCH, SEQ, ROUNDS = 8, 64, 10
SIZES = {"num_layers": 8, "vocabulary": 2048}
TEXT = """
device: {name: fast, flops: 2e9, memory: 8GiB, memory_gbps: 8}
boxes:
  - name: box
    count: 2
    ranks: 2
    inside: {bandwidth: 20 Mbit/s, latency: 50us}
    uplink: {to: core, bandwidth: 20 Mbit/s, latency: 50us, per: rank}
switches: [core]
"""


def measured(rounds: int) -> list[dict[str, Any]]:
    topology = parse_topology(TEXT, source="cluster.yaml")
    cluster, model = load_cluster(topology), describe_model(SIZES, SEQ, "heavy head")
    found = search(cluster, model.shape, batch=BATCH, seq=SEQ, limits=Limits.from_text("tp=1", "dp=1"), limit_s=20.0)
    tensor = Job(mesh=Mesh(pp=2, tp=2), global_batch=BATCH, micro_batch=1, seq=SEQ)
    chain = Job(mesh=Mesh(pp=4), global_batch=BATCH, micro_batch=1, seq=SEQ)
    plans = {
        "tensor parallelism in boxes": plan_by_hand(cluster, model, tensor, [4, 4]),
        "equal stages": plan_by_hand(cluster, model, chain, [2, 2, 2, 2]),
        "found, no tensor parallelism": plan_of(found, None, model, cluster),
    }
    layers = set(next(iter(plans.values())).model.layers)
    cases = [
        Case(
            name=name,
            plan=plan.to_json(),
            sizes=SIZES,
            more={"mesh": str(plan.job.mesh), "cut": [len(layers & set(stage)) for stage in plan.cut]},
        )
        for name, plan in plans.items()
    ]
    lines = measure(topology, cases, rounds=rounds)
    for line in lines:
        line["losses"] = line["losses"][-1:]
    return lines


def table(lines: list[dict[str, Any]]) -> str:
    even = lines[1]["seconds"]
    rows = [
        (
            line["case"],
            ", ".join(map(str, line["more"]["cut"])),
            f"{1e3 * median(line['seconds']):.0f}",
            f"{1e3 * line['predicted_s']:.0f}",
            f"{ratio(even, line['seconds']):.2f}",
        )
        for line in lines
    ]
    headings = ("plan", "layers of stages", "measured with paced computation, ms", "modelled, ms", "to equal stages")
    return markdown(headings, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two steps of each plan; keeps nothing")
    if parser.parse_args().quick:
        print(table(measured(3)))
        return 0
    conclude(OUTPUT, PAGE, "yuan", measured(ROUNDS), table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
