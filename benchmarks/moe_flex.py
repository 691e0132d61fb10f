"""Exchanges and adaptive choice of the MoE layer, on two emulated nodes with slow links between.

    python benchmarks/moe_flex.py                    # two nodes of 4; some minutes
    python benchmarks/moe_flex.py --quick            # two nodes of 2, fewer steps
    python benchmarks/moe_flex.py --only bytes

``bytes``: what flat and hierarchical exchanges send between the nodes in a forward and backward pass, by the meter
(rows and slots) and by the interfaces' counters (headers, acknowledgements and barriers included), and the step's
time. ``adapt``: a trace of three loads, walked twice by the layer with ``tuner=Tuner(...)``, which chooses:
the first time with its trials, then with what it remembers. Every fourth step all fixed plans take a step each beside
it. Times are of the slowest rank. Lines are appended to ``--output``, and tables of the last ones replace those in
the page; ``--quick`` only prints.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_ranks import forward_backward, is_rank, join, mark, middle, on_cluster, say, step_s, total
from mycel.bench.measurement import describe_hardware, describe_versions
from mycel.moe import ExpertParallel, MoE, Tuner, node_mesh, nodes_of
from mycel.runtime import tensor_group
from mycel.topology.builders import two_boxes
from record import RECORDED, ROOT, append, markdown, read, stamp, write_section

PAGE = ROOT / "docs" / "concepts" / "flex.md"
DIM, HIDDEN = 256, 256
#: Of the experts that the trace goes through, and how often it is walked.
ADAPT_HIDDEN, WALKS = 128, 2
#: Tokens a rank and experts a token whose bytes are counted.
LOADS = ((256, 2), (1024, 2), (256, 8))
#: The same of each phase.
PHASES = ((16, 2), (512, 8), (128, 2))


def exchanges(steps: int) -> None:
    """Bytes and time of flat and hierarchical exchanges."""
    topology = tensor_group().communicator.topology
    nodes, mesh = nodes_of(topology), node_mesh(topology)
    for tokens, top_k in LOADS:
        torch.manual_seed(0)
        layer = MoE(DIM, HIDDEN, 16, top_k, parallel=mesh)
        torch.manual_seed(dist.get_rank())
        x = torch.randn(tokens, DIM, requires_grad=True)
        for algorithm in ("all_to_all", "hierarchical"):
            forward_backward(layer, x, algorithm=algorithm)
            layer.dispatcher.meter.reset()
            mark(f"{tokens} {top_k} {algorithm} begin")
            for _ in range(steps):
                forward_backward(layer, x, algorithm=algorithm)
            mark(f"{tokens} {top_k} {algorithm} end")
            metered = total(layer.dispatcher.meter, nodes) // steps
            say(question="bytes", top_k=top_k, algorithm=algorithm, tokens=tokens, metered=metered)
        times: dict[str, list[float]] = {"all_to_all": [], "hierarchical": []}
        for _ in range(steps):
            for algorithm, found in times.items():
                found.append(step_s(partial(forward_backward, layer, x, algorithm=algorithm)))
        for algorithm, found in times.items():
            say(question="time", tokens=tokens, top_k=top_k, algorithm=algorithm, median_s=middle(found))


def adaptive(phase_steps: int, every: int) -> None:
    """A layer that chooses walks the trace twice; every few steps all fixed plans take one step each beside it."""
    topology = tensor_group().communicator.topology
    mesh = node_mesh(topology)
    size = dist.get_world_size()
    tuner = Tuner(degrees=(1, 2), algorithms=("all_to_all", "hierarchical"), trials=3, same_load=True)
    torch.manual_seed(0)
    # Few and narrow experts, so that their weights and a phase's tokens are of one order.
    layer = MoE(DIM, ADAPT_HIDDEN, size, 2, parallel=ExpertParallel(mesh, tensor_shards=2, tuner=tuner))
    plans = layer.chooser.plans
    names = ["r 0" if p.r == 0 else f"r {p.r}, {p.algorithm}, degree {p.degree}" for p in plans]
    chosen: list[list[list[float]]] = []
    fixed: dict[str, list[list[float]]] = {name: [[] for _ in PHASES] for name in names}
    beside: list[list[float]] = [[] for _ in PHASES]
    for walk in range(WALKS):
        chosen.append([])
        for number, (tokens, top_k) in enumerate(PHASES):
            x = torch.randn(tokens, DIM, requires_grad=True)
            times: list[float] = []
            for step in range(phase_steps):
                times.append(step_s(partial(forward_backward, layer, x, top_k=top_k)))
                if step % every != every - 1:
                    continue
                turn = (walk * phase_steps + step) // every  # nobody always goes first
                for k in range(len(plans)):
                    plan, name = (of[(k + turn) % len(plans)] for of in (plans, names))
                    asked = {"r": plan.r, "degree": plan.degree, "algorithm": plan.algorithm, "top_k": top_k}
                    fixed[name][number].append(step_s(partial(forward_backward, layer, x, **asked)))
                if walk:  # the choice is made: a pair of steps, close together
                    beside[number].append(step_s(partial(forward_backward, layer, x, top_k=top_k)))
            chosen[-1].append(times)
    say(question="adapt", fixed=fixed, chosen=chosen, beside=beside, phase_steps=phase_steps, table=layer.explain())


def rows_of(said: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """What was said, a row a question, with what the cables carried."""
    crossed = {heard["mark"]: heard["crossed"] for heard in said if "mark" in heard}
    times = {(s["tokens"], s["top_k"], s["algorithm"]): s["median_s"] for s in said if s.get("question") == "time"}
    rows = []
    for heard in said:
        if heard.get("question") == "bytes":
            key = f"{heard['tokens']} {heard['top_k']} {heard['algorithm']}"
            carried = (crossed[f"{key} end"] - crossed[f"{key} begin"]) // steps
            rows.append(
                {**heard, "carried": carried, "median_s": times[heard["tokens"], heard["top_k"], heard["algorithm"]]}
            )
        elif heard.get("question") == "adapt":
            rows.append(heard)
    return rows


def latest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last row of each question."""
    return list(
        {(row["question"], row.get("tokens"), row.get("top_k"), row.get("algorithm")): row for row in rows}.values()
    )


def tables(rows: list[dict[str, Any]]) -> str:
    """For the page."""
    counted = [
        (
            row["tokens"],
            row["top_k"],
            row["algorithm"],
            *(f"{row[which] / 1e3:.0f}" for which in ("metered", "carried")),
            f"{1e3 * row['median_s']:.0f}",
        )
        for row in rows
        if row["question"] == "bytes"
    ]
    page = markdown(
        ("tokens a rank", "K", "exchange", "KB between nodes, meter", "KB, interfaces", "ms a step"), counted
    )
    for row in rows:
        if row["question"] != "adapt":
            continue
        steps = row["phase_steps"]
        lines = [
            (name, *(f"{1e3 * middle(times):.0f}" for times in phases), f"{_trace_s(phases, steps):.1f}")
            for name, phases in sorted(row["fixed"].items())
        ]
        wholes = [sum(map(sum, walk)) for walk in row["chosen"]]
        for which, walk, whole in zip(
            ("first walk, with its trials", "second walk"), row["chosen"], wholes, strict=True
        ):
            middles = (f"{1e3 * middle(times):.0f}" for times in walk)
            lines.append((f"chosen, {which}", *middles, f"{whole:.1f} of it"))
        lines.append(("chosen, both walks", *[""] * len(PHASES), f"{sum(wholes):.1f}"))
        headings = [f"{tokens} tokens x {top_k}, ms" for tokens, top_k in PHASES]
        whole_trace = f"trace of {WALKS} walks, {steps} steps a phase, s"
        page += "\n" + markdown(("plan", *headings, whole_trace), lines)
        page += f"\nChosen over the best fixed plan of each phase, steps beside each other: {_over_best(row)}.\n"
    return page


def _trace_s(phases: list[list[float]], steps: int) -> float:
    """A fixed plan's seconds for the whole trace, from the steps that were taken of it."""
    return WALKS * steps * sum(sum(times) / len(times) for times in phases)


def _over_best(row: dict[str, Any]) -> str:
    """Medians of ratios in the second walk, where nothing is tried any more."""
    found = []
    for number, mine in enumerate(row["beside"]):
        best = min(row["fixed"].values(), key=lambda phases, at=number: middle(phases[at]))[number][-len(mine) :]
        found.append(f"{middle([a / b for a, b in zip(mine, best, strict=True)]):.2f}")
    return ", ".join(found)


def main() -> None:
    """Starts itself on the ranks and writes what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 ranks, fewer steps")
    parser.add_argument("--only", choices=["bytes", "adapt"])
    parser.add_argument("--output", type=Path, default=RECORDED / "moe_flex.jsonl")
    options = parser.parse_args()
    steps, phase_steps, every = (2, 14, 7) if options.quick else (5, 24, 4)
    if is_rank():
        join()
        if options.only != "adapt":
            exchanges(steps)
        if options.only != "bytes":
            adaptive(phase_steps, every)
        dist.destroy_process_group()
        return
    ranks = 4 if options.quick else 8
    arguments = ["--quick"] * options.quick + (["--only", options.only] if options.only else [])
    print(f"two nodes of {ranks // 2}, 400 Mbit/s inside, 50 Mbit/s a rank between; {describe_hardware()}")
    said = on_cluster(two_boxes(num_ranks=ranks), Path(__file__), arguments)
    rows = rows_of(said, steps)
    print(tables(rows))
    for row in rows:
        if "table" in row:
            print(row["table"])
    common = {"ranks": ranks, "hardware": describe_hardware(), "versions": describe_versions(), **stamp()}
    if not options.quick:
        append(options.output, [{**row, **common} for row in rows])
        write_section(PAGE, "moe_flex", tables(latest(read(options.output))))


if __name__ == "__main__":
    main()
