"""Pre-gated MoE: latency near that of a model whose experts are all near, with few of them there; and the quality.

    python benchmarks/claims/pregated_moe.py             # minutes; replaces its lines and tables in the guide
    python benchmarks/claims/pregated_moe.py --quick     # one link speed, no training
    python benchmarks/claims/pregated_moe.py --only latency|quality [--seeds 2]

*Latency* (``moe_offload.py``): 12 blocks of 16 experts, 2 of them active, one token a pass after 4096 others, an
emulated link at three speeds: a block's active experts take 0.5, 1 and 2 times as long as a block computes.

*Quality*: a byte-level language model (``moe_text.py``) is trained with its own gates; then its gates move one block
ahead and it is trained further, beside a copy that keeps them and sees the same text for as many steps.

The paper measures A100 GPUs and Switch transformers; here everything runs on a CPU, and the link is emulated.

References:
    Hwang et al., "Pre-gated MoE: An Algorithm-System Co-Design for Fast and Scalable Mixture-of-Expert Inference",
    ISCA 2024 (arXiv 2308.12066).
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from moe_offload import measure, stack
from moe_text import ByteMoE, held_out_loss, train
from mycel.bench.measurement import describe_hardware
from mycel.demo.corpus import load_corpus
from mycel.moe.memory import make_fetch_policy, pre_gate
from record import RECORDED, ROOT, append, markdown, read, stamp, write_section

LATENCY = RECORDED / "claims" / "pregated_moe_latency.jsonl"
QUALITY = RECORDED / "claims" / "pregated_moe_quality.jsonl"
PAGE = ROOT / "docs" / "guides" / "moe_memory.md"


def latency(*, quick: bool, steps: int, context: int) -> list[dict[str, Any]]:
    """A row a link speed and policy."""

    def make() -> nn.Module:
        return stack(blocks=12, dim=512, hidden=256, experts=16, top_k=2, context=context)

    made = []
    for ratio in (0.5,) if quick else (0.5, 1.0, 2.0):
        # Bringing everything takes eight times as long as the active experts: at one speed it is seen well enough.
        names = (
            "resident",
            "pre_gated",
            "pre_gated_keep_first",
            "on_demand",
            *(("prefetch_all",) if ratio == 0.5 else ()),
        )
        policies = {name: make_fetch_policy(name) for name in names}
        rows = measure(make, policies, ratio=ratio, steps=5 if quick else steps, width=512)
        made += [row | {"context": context} for row in rows]
        print(latency_table(made), flush=True)
    return made


def quality(seed: int, *, steps: int, further: int) -> dict[str, Any]:
    """Held-out losses of one seed."""
    corpus = load_corpus(max_bytes=3 << 20)
    torch.manual_seed(seed)
    model = ByteMoE(balance=0.01)
    train(model, corpus, steps, seed=seed)
    row: dict[str, Any] = {"seed": seed, "steps": steps, "further": further, "own": held_out_loss(model, corpus)}
    moved = copy.deepcopy(model)
    pre_gate(moved)
    row["moved"] = held_out_loss(moved, corpus)
    for name, some in (("own_further", model), ("moved_further", moved)):
        train(some, corpus, further, seed=seed, first=steps, peak=1e-3)
        row[name] = held_out_loss(some, corpus)
    return row


def latency_table(rows: Sequence[dict[str, Any]]) -> str:
    """For the guide."""
    lines = [
        (
            r["ratio"],
            r["context"],
            r["policy"],
            f"{r['of_first']:.2f}x",
            f"{r['peak']} of {r['experts']} ({100 * r['peak'] / r['experts']:.1f} %)",
            "" if r["policy"] == "resident" else f"{r['fetched_a_pass']:.0f}",
        )
        for r in rows
        if r["policy"] != "layer as it is"
    ]
    headings = (
        "link / compute",
        "past tokens",
        "policy",
        "time of resident",
        "experts near at most",
        "experts brought a token",
    )
    return markdown(headings, lines)


def quality_table(rows: Sequence[dict[str, Any]]) -> str:
    """For the guide."""
    headings = ("seed", "own gates", "gates moved, not trained", "own gates, trained on", "gates moved, trained on")
    keys = ("own", "moved", "own_further", "moved_further")
    return markdown(headings, [(r["seed"], *(f"{r[key]:.4f}" for key in keys)) for r in rows])


def main() -> None:
    """Measure, record, and renew the guide's tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="nothing is kept")
    parser.add_argument("--only", choices=("latency", "quality"))
    parser.add_argument("--passes", type=int, default=20, help="measured tokens a link speed")
    parser.add_argument("--context", type=int, default=4096, help="tokens before the one that is decoded")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200, help="with own gates")
    parser.add_argument("--further", type=int, default=70, help="after the gates have moved")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-3)  # the link is a thread beside the one that computes
    common = {**stamp(), "hardware": describe_hardware()}
    if options.only != "quality":
        rows = latency(quick=options.quick, steps=options.passes, context=options.context)
        if not options.quick:
            LATENCY.unlink(missing_ok=True)
            append(LATENCY, [row | common for row in rows])
            write_section(PAGE, "pregated_latency", latency_table(read(LATENCY)))
    if options.only != "latency" and not options.quick:
        QUALITY.unlink(missing_ok=True)
        for seed in range(options.seeds):
            row = quality(seed, steps=options.steps, further=options.further)
            append(QUALITY, [row | common])
            write_section(PAGE, "pregated_quality", quality_table(read(QUALITY)))
            print(quality_table([row]), flush=True)


if __name__ == "__main__":
    main()
