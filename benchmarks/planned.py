"""Plans that search has found against uniform ones, measured on emulated clusters in the same run.

    python benchmarks/planned.py                  # all parts, eight minutes
    python benchmarks/planned.py --only odd       # one of odd, head, shares, order, scatter, hugging_face

Computation is paced (every stage sleeps until its modelled time is over), messages, orders and losses are real.

- ``odd``: the cluster of ``examples/clusters/odd.yaml``, 50 steps, losses against one process, and a picture of the
  planned and the measured timeline (``mycel report``).
- ``head``: four equal ranks and a model with a heavy head: the balanced cut against the uniform one.
- ``shares``: two ranks beside two that are half as fast: each with the whole model and as many micro-batches, the
  best of all plans whose replicas have equally many, and what the search finds without that limit.
- ``order``: four equal ranks behind slow links: 1F1B against the order that was searched for the same stages.
- ``scatter``: stages of two ranks each that share matrices, behind one slow link: boundaries whole and in shares,
  time, and bytes by the interfaces' counters.
- ``hugging_face``: a small Llama and a small Qwen3-MoE from configurations, unedited, on the odd cluster.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from mycel.planning.cluster import load_cluster
from mycel.planning.job import Job, Mesh
from mycel.planning.plan.build import plan_of
from mycel.planning.plan.orders import with_searched_order
from mycel.planning.search import Limits, search
from mycel.topology import parse_topology
from paced import ratio
from planned_ranks import Case, describe_model, measure, one_process, plan_by_hand
from record import CLUSTERS, RECORDED, ROOT, conclude, markdown

OUTPUT = RECORDED / "planned.jsonl"
PAGE = ROOT / "docs" / "guides" / "planned_training.md"
ODD = CLUSTERS / "odd.yaml"
BATCH, SEQ, ROUNDS, SEARCH_S = 8, 64, 10, 20.0
#: A head of three layers' products, as many large models have.
HEAVY = {"vocabulary": 3072}
FAST = "device: {name: fast, flops: 2e9, memory: 8GiB, memory_gbps: 8}"
EQUAL = f"""
{FAST}
boxes:
  - {{name: node, count: 4, ranks: 1, uplink: {{to: core, bandwidth: 100 Mbit/s, latency: 50us, per: rank}}}}
switches: [core]
"""
SLOW_LINKS = EQUAL.replace("100 Mbit/s", "6 Mbit/s")
BEHIND_A_LINK = f"""
{FAST}
boxes:
  - name: box
    count: 2
    ranks: 2
    inside: {{bandwidth: 400 Mbit/s, latency: 50us}}
    uplink: {{to: core, bandwidth: 2 Mbit/s, latency: 50us, per: box}}
switches: [core]
"""
UNLIKE = """
boxes:
  - name: left
    ranks: 2
    inside: {bandwidth: 400 Mbit/s, latency: 50us}
    uplink: {to: core, bandwidth: 400 Mbit/s, latency: 50us, per: box}
    device: {name: fast, flops: 2e9, memory: 8GiB, memory_gbps: 8}
  - name: right
    ranks: 2
    inside: {bandwidth: 400 Mbit/s, latency: 50us}
    uplink: {to: core, bandwidth: 400 Mbit/s, latency: 50us, per: box}
    device: {name: slow, flops: 1e9, memory: 8GiB, memory_gbps: 4}
switches: [core]
"""
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}
QWEN = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def compared(
    cluster_text: str, sizes: dict[str, Any], limits: Sequence[str] = (), *, name: str = "tiny"
) -> tuple[Any, list[Case]]:
    """The topology, and the plan found beside the uniform one: one stage a rank, equal layers, ranks in order."""
    topology = parse_topology(cluster_text, source="cluster.yaml")
    cluster = load_cluster(topology)
    model = describe_model(sizes, SEQ, name)
    found = search(cluster, model.shape, batch=BATCH, seq=SEQ, limits=Limits.from_text(*limits), limit_s=SEARCH_S)
    ranks = cluster.num_ranks
    job = Job(mesh=Mesh(pp=ranks), global_batch=BATCH, micro_batch=1, seq=SEQ)
    layers = model.shape.num_layers
    uniform = plan_by_hand(cluster, model, job, [layers // ranks] * ranks)
    best = plan_of(found, None, model, cluster)
    best.validate(model)
    more = {"mesh": str(best.job.mesh), "ranks": best.ranks, "cut": [len(stage) for stage in best.cut]}
    cases = [
        Case(name="uniform", plan=uniform.to_json(), sizes=sizes),
        Case(name="found", plan=best.to_json(), sizes=sizes, more=more),
    ]
    return topology, cases


def judged(part: str, lines: list[dict[str, Any]], cases: Sequence[Case], steps: int) -> list[dict[str, Any]]:
    """The lines with how far their losses are from one process's, and the ratio to the first case."""
    for line, case in zip(lines, cases, strict=True):
        right = one_process(case, steps)
        line["loss_off"] = max(abs(a - b) for a, b in zip(line["losses"], right, strict=True))
        line["ratio"] = ratio(lines[0]["seconds"], line["seconds"])
        line["part"] = part
        line["losses"] = line["losses"][:2] + line["losses"][-1:]
    return lines


def odd(folder: Path) -> list[dict[str, Any]]:
    topology, cases = compared(ODD.read_text(encoding="utf-8"), {})
    lines = measure(topology, cases, rounds=50, flights=folder)
    return judged("odd", lines, cases, 50)


def head(_: Path) -> list[dict[str, Any]]:
    limits = ("pp=4", "chunks=1", "recompute=none")
    topology, cases = compared(EQUAL, HEAVY, limits, name="heavy head")
    return judged("head", measure(topology, cases, rounds=ROUNDS), cases, ROUNDS)


def shares(_: Path) -> list[dict[str, Any]]:
    topology = parse_topology(UNLIKE, source="cluster.yaml")
    cluster, model = load_cluster(topology), describe_model({}, SEQ, "tiny")
    cases = []
    equal = "shares=equal"
    for name, limits in (("four equal replicas", ("dp=4", equal)), ("best of equal shares", (equal,)), ("found", ())):
        kept = Limits.from_text(*limits)
        found = search(cluster, model.shape, batch=12, seq=SEQ, limits=kept, limit_s=SEARCH_S)
        plan = plan_of(found, None, model, cluster, limits=limits)
        plan.validate(model)
        more = {"mesh": str(plan.job.mesh), "ranks": plan.ranks, "shares": plan.job.shares}
        cases.append(Case(name=name, plan=plan.to_json(), sizes={}, more=more))
    return judged("shares", measure(topology, cases, rounds=ROUNDS + 1), cases, ROUNDS + 1)


def order(_: Path) -> list[dict[str, Any]]:
    topology = parse_topology(SLOW_LINKS, source="cluster.yaml")
    cluster, model = load_cluster(topology), describe_model({}, SEQ, "tiny")
    limits = ("pp=4", "chunks=1", "recompute=none")
    kept = Limits.from_text(*limits)
    found = search(cluster, model.shape, batch=BATCH, seq=SEQ, limits=kept, limit_s=SEARCH_S)
    known = plan_of(found, None, model, cluster, limits=limits)
    cases = [
        Case(name=plan.order.name, plan=plan.to_json(), sizes={}, more={"held": max(plan.memory)})
        for plan in (known, with_searched_order(known, cluster))
    ]
    return judged("order", measure(topology, cases, rounds=ROUNDS + 1), cases, ROUNDS + 1)


def scatter(_: Path) -> list[dict[str, Any]]:
    topology = parse_topology(BEHIND_A_LINK, source="cluster.yaml")
    small = {"num_layers": 4}  # shared matrices cost this machine much more than the modelled device
    cluster, model = load_cluster(topology), describe_model(small, SEQ, "small")
    whole = Job(mesh=Mesh(pp=2, tp=2), global_batch=BATCH, micro_batch=1, seq=SEQ)
    cases = [
        Case(name=name, plan=plan_by_hand(cluster, model, job, [2, 2]).to_json(), sizes=small)
        for name, job in (("whole", whole), ("in shares", replace(whole, is_scattered=True)))
    ]
    lines = measure(topology, cases, rounds=ROUNDS + 1, counted=True)
    return judged("scatter", lines, cases, ROUNDS + 1)


def hugging_face(_: Path) -> list[dict[str, Any]]:
    lines = []
    for config in (LLAMA, QWEN):
        sizes, name = {"config": config}, str(config["model_type"])
        topology, cases = compared(ODD.read_text(encoding="utf-8"), sizes, name=name)
        lines += judged(name, measure(topology, cases, rounds=ROUNDS), cases, ROUNDS)
    return lines


PARTS: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    "odd": odd,
    "head": head,
    "shares": shares,
    "order": order,
    "scatter": scatter,
    "hugging_face": hugging_face,
}


def table(lines: list[dict[str, Any]]) -> str:
    """Measured medians beside what was predicted."""
    rows = [
        (
            line["part"],
            line["case"],
            f"{1e3 * median(line['seconds']):.0f}",
            f"{1e3 * line['predicted_s']:.0f}",
            f"{line['ratio']:.2f}",
            f"{line['loss_off']:.1e}",
            f"{line['crossed']:,}" if "crossed" in line else "",
        )
        for line in lines
    ]
    headings = (
        "part",
        "plan",
        "step, measured with paced computation, ms",
        "step, modelled, ms",
        "times as fast as the first",
        "losses off one process's",
        "bytes between boxes in a step",
    )
    return markdown(headings, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(PARTS), action="append")
    parser.add_argument("--flights", type=Path, default=Path("planned-flights"), help="for mycel report")
    parser.add_argument("--dry", action="store_true", help="print, and record nothing")
    options = parser.parse_args(arguments)
    lines = [line for part in options.only or PARTS for line in PARTS[part](options.flights)]
    if options.dry:
        sys.stdout.write(table(lines))
    else:
        kept = set(options.only or PARTS)
        _conclude(lines, kept)
    return 0


def _conclude(lines: list[dict[str, Any]], parts: set[str]) -> None:
    from record import read

    names = parts | ({"llama", "qwen3_moe"} if "hugging_face" in parts else set())
    others = [line for line in read(OUTPUT) if line["part"] not in names]
    conclude(OUTPUT, PAGE, "planned", [*others, *lines], table)


if __name__ == "__main__":
    raise SystemExit(main())
