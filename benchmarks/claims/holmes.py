"""What Holmes claims: on networks of two speeds, data parallelism inside the fast ones and the pipeline across.

    python benchmarks/claims/holmes.py    # three minutes; 4 ranks; replaces its lines and the table in the page

Two boxes of two ranks, fast inside, with a slow link between them. Plans take turns in one run: replicas across the
slow link, replicas inside (Holmes' rule, written by hand), and what search finds; then the same search on a cluster
that is fast everywhere, in a second run. Computation is paced, messages and losses are real.

References:
    Yang et al., "Holmes: Towards Distributed Training Across Clusters with Heterogeneous NIC Environment", ICPP 2024
    (arXiv 2312.03549), section 3.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mycel.planning.cluster import load_cluster
from mycel.planning.job import Job, Mesh
from mycel.planning.plan.build import plan_of
from mycel.planning.search import search
from mycel.topology import parse_topology
from paced import ratio
from planned_ranks import Case, describe_model, measure, plan_by_hand
from record import RECORDED, ROOT, conclude, markdown

OUTPUT = RECORDED / "claims" / "holmes.jsonl"
PAGE = ROOT / "docs" / "concepts" / "planned_claims.md"
BATCH, SEQ, ROUNDS = 8, 64, 11
SIZES = {"num_layers": 8}
TEXT = """
device: {{name: fast, flops: 2e9, memory: 8GiB, memory_gbps: 8}}
boxes:
  - name: box
    count: 2
    ranks: 2
    inside: {{bandwidth: 200 Mbit/s, latency: 50us}}
    uplink: {{to: core, bandwidth: {between}, latency: 50us, per: box}}
switches: [core]
"""


def lines_of(between: str, *, by_hand: bool) -> list[dict[str, Any]]:
    """Measured steps on a cluster with such a link between the boxes."""
    topology = parse_topology(TEXT.format(between=between), source="cluster.yaml")
    cluster, model = load_cluster(topology), describe_model(SIZES, SEQ, "small")
    found = search(cluster, model.shape, batch=BATCH, seq=SEQ, limit_s=20.0)
    best = plan_of(found, None, model, cluster)
    plans = {"found": best}
    if by_hand:
        job = Job(mesh=Mesh(pp=2, dp=2), global_batch=BATCH, micro_batch=1, seq=SEQ)
        plans = {
            "replicas across the slow link": plan_by_hand(cluster, model, job, [4, 4], [0, 2, 1, 3]),
            "replicas inside, pipeline across": plan_by_hand(cluster, model, job, [4, 4], [0, 1, 2, 3]),
            **plans,
        }
    cases = [
        Case(name=name, plan=plan.to_json(), sizes=SIZES, more={"mesh": str(plan.job.mesh), "ranks": plan.ranks})
        for name, plan in plans.items()
    ]
    lines = measure(topology, cases, rounds=ROUNDS)
    for line in lines:
        line["between"] = between
        line["losses"] = line["losses"][-1:]
    return lines


def table(lines: list[dict[str, Any]]) -> str:
    first = lines[0]["seconds"]
    rows = [
        (
            line["case"],
            line["between"],
            line["more"]["mesh"],
            f"{1e3 * median(line['seconds']):.0f}",
            f"{1e3 * line['predicted_s']:.0f}",
            f"{ratio(first, line['seconds']):.2f}",
        )
        for line in lines
    ]
    headings = (
        "plan",
        "between boxes",
        "mesh",
        "measured with paced computation, ms",
        "modelled, ms",
        "to the first",
    )
    return markdown(headings, rows)


def main() -> int:
    lines = lines_of("10 Mbit/s", by_hand=True) + lines_of("200 Mbit/s", by_hand=False)
    conclude(OUTPUT, PAGE, "holmes", lines, table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
