"""Routing of a real training run, and how even each placement policy would have made it.

    python benchmarks/moe_placement.py                     # train, record, replay: 400 steps, some minutes
    python benchmarks/moe_placement.py --quick             # 60 steps
    python benchmarks/moe_placement.py --trace FILE.npz    # replay only

A byte-level language model (``moe_text.py``) is trained without balancing loss; every router's choices are recorded.
In the replay, 16 experts lie on 4 ranks, with one spare slot a rank for the policies that use some. A policy sees
batches up to ``t`` (a moving average that keeps 0.7 of the past) and is judged by batch ``t + 1``: largest over mean
load of a rank. These are counted loads, not times. ``--save FILE`` keeps the trace.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_text import LAYERS, ByteMoE, train
from mycel.bench.measurement import describe_hardware
from mycel.demo.corpus import load_corpus
from mycel.moe.placement import RoutingTrace, TraceRecorder, replay
from mycel.planning.placement import ExpertPlacement, Policy, eplb, flex, shadow, static
from record import RECORDED, ROOT, append, markdown, read, stamp, write_section

RANKS = 4
OUTPUT = RECORDED / "moe_placement.jsonl"
PAGE = ROOT / "docs" / "concepts" / "moe_placement.md"

#: Name, policy, spare slots a rank, batches between two uses.
POLICIES: tuple[tuple[str, Policy, int, int], ...] = (
    ("static", static, 0, 1),
    ("shadowing, 1 spare slot a rank", shadow, 1, 1),
    ("FlexMoE, at most 2 moves, no spare slot", partial(flex, max_moves=2), 0, 1),
    ("FlexMoE, at most 2 moves, 1 spare slot a rank", partial(flex, max_moves=2), 1, 1),
    ("EPLB, no spare slot", eplb, 0, 1),
    ("EPLB, 1 spare slot a rank", eplb, 1, 1),
    ("EPLB, 1 spare slot a rank, every 10th batch", eplb, 1, 10),
)


def record(steps: int, seed: int) -> RoutingTrace:
    """Tokens of each expert in every training step."""
    torch.manual_seed(seed)
    model = ByteMoE(balance=0.0)
    begin = time.perf_counter()

    def tell(step: int, loss: float) -> None:
        if step % 50 == 49:
            print(f"step {step + 1}: {loss:.3f} nats, {time.perf_counter() - begin:.0f} s", flush=True)

    with TraceRecorder(model) as recorder:
        train(model, load_corpus(max_bytes=3 << 20), steps, seed=seed, after=tell)
    return recorder.trace()


def rows(trace: RoutingTrace, *, skip: int, memory: float = 0.7) -> list[dict[str, Any]]:
    """A row a policy, over all layers and the batches after the first ``skip``."""
    experts = trace.counts.shape[2]
    made = []
    for name, policy, spare, every in POLICIES:
        start = ExpertPlacement.contiguous(experts, RANKS, spare=spare)
        seen = [s for s in replay(trace, policy, start, memory=memory, every=every) if s.batch >= skip]
        values = np.array([s.imbalance for s in seen])
        made.append(
            {
                "policy": name,
                "spare": spare,
                "mean": float(values.mean()),
                "p95": float(np.percentile(values, 95)),
                "moved": sum(s.moved for s in seen) / len(seen),
                "batches": int(trace.counts.shape[0]) - skip,
                "layers": int(trace.counts.shape[1]),
            }
        )
    return made


def table(made: list[dict[str, Any]]) -> str:
    """For the page."""
    headings = ("policy", "max/mean load of the next batch", "95th percentile", "experts moved a step and layer")
    base = made[0]["mean"]
    lines = [
        (r["policy"], f"{r['mean']:.3f} ({r['mean'] / base:.2f} of static)", f"{r['p95']:.2f}", f"{r['moved']:.2f}")
        for r in made
    ]
    return markdown(headings, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--skip", type=int, help="batches that are not judged; by default a quarter")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--save", type=Path)
    parser.add_argument(
        "--record", action="store_true", help="keep the rows, and renew the table in the documentation"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps = 60 if options.quick else options.steps
    trace = RoutingTrace.load(options.trace) if options.trace else record(steps, options.seed)
    if options.save:
        trace.save(options.save)
    skip = len(trace.counts) // 4 if options.skip is None else options.skip
    made = rows(trace, skip=skip)
    print(f"{len(trace.counts)} batches, the first {skip} not judged, {len(trace.layers)} of {LAYERS} layers")
    print(table(made))
    if options.record:
        common = {**stamp(), "hardware": describe_hardware(), "steps": len(trace.counts), "skip": skip}
        OUTPUT.unlink(missing_ok=True)
        append(OUTPUT, [row | common for row in made])
        write_section(PAGE, "moe_placement", table(read(OUTPUT)))


if __name__ == "__main__":
    main()
