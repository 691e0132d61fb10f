"""Confident multiple choice learning: whether members that share examples err less together, and how sure they are.

    python benchmarks/claims/cmcl.py            # five ranks on loopback, five seeds; about four minutes
    python benchmarks/claims/cmcl.py --quick

Five members, one a rank, small networks on 500 images of digits. Top-1 error is that of the mean of their
probabilities, oracle error the share of images that all of them are wrong about. Bytes are what a rank sends in a
step, beside what data parallelism of the same network would.

Rows replace those of the last run in ``benchmarks/recorded/claims/cmcl.jsonl``, and the table in
docs/guides/tasks_and_ensembles.md.

References:
    K. Lee et al., "Confident Multiple Choice Learning", ICML 2017, arXiv 1706.03475, section 4 (claimed: 14 % less
    top-1 error than independent members on CIFAR-10, 6.6 % on SVHN).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from digits import Digits, run_ranks, spread
from torch import nn

from mycel.data_parallel import Ensemble, EnsembleScores, MultipleChoice
from record import RECORDED, ROOT, conclude, markdown

OUTPUT = RECORDED / "claims" / "cmcl.jsonl"
PAGE = ROOT / "docs" / "guides" / "tasks_and_ensembles.md"
MEMBERS, TRAINED, BATCH, WIDTH, RATE = 5, 500, 50, 24, 1e-2
WAYS: dict[str, tuple[MultipleChoice | None, bool]] = {
    "independent": (None, False),
    "MCL, K = 1": (MultipleChoice(beta=0.0), False),
    "CMCL, K = 1": (MultipleChoice(), False),
    "CMCL, K = 3": (MultipleChoice(overlap=3), False),
    "CMCL, K = 4": (MultipleChoice(overlap=4), False),
    "CMCL, K = 4, drawn labels": (MultipleChoice(overlap=4, labels="stochastic"), False),
    "CMCL, K = 4, shared features": (MultipleChoice(overlap=4), True),
}


def train(choice: MultipleChoice | None, seed: int, steps: int, *, shares: bool) -> tuple[EnsembleScores, float]:
    """Scores on held-out images, and bytes that a rank has sent a step."""
    digits, ensemble = Digits(seed), Ensemble(choice, seed=seed)
    x, y = digits.train[0][:TRAINED], digits.train[1][:TRAINED]
    torch.manual_seed(1000 * seed + ensemble.member)
    early, late = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU()), nn.Linear(WIDTH, 10)
    optimizer = torch.optim.Adam([*early.parameters(), *late.parameters()], lr=RATE)
    order = torch.Generator().manual_seed(seed)  # the same on all members
    for _ in range(steps):
        which = torch.randint(0, TRAINED, (BATCH,), generator=order)
        hidden = early(x[which])
        loss = ensemble.loss(late(ensemble.share(hidden) if shares else hidden), y[which])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    sent = ensemble.meter.total() / steps
    with torch.no_grad():
        hidden = early(digits.test[0])
        logits = late(ensemble.share(hidden, training=False) if shares else hidden)
    return ensemble.evaluate(logits, digits.test[1]), sent


def be_rank(seeds: int, steps: int) -> None:
    """What every rank does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parameters = 64 * WIDTH + WIDTH + 10 * WIDTH + 10
    for name, (choice, shares) in WAYS.items():
        for seed in range(seeds):
            scores, sent = train(choice, seed, steps, shares=shares)
            line = {"way": name, "seed": seed, **asdict(scores), "bytes_per_step": sent}
            line["data_parallel_bytes"] = 2 * (MEMBERS - 1) / MEMBERS * 4 * parameters
            if dist.get_rank() == 0:
                print(json.dumps(line), flush=True)
    dist.destroy_process_group()


def table(lines: list[dict[str, Any]]) -> str:
    """A row a way."""
    rows = []
    for name in dict.fromkeys(line["way"] for line in lines):
        mine = [line for line in lines if line["way"] == name]
        rows.append(
            (
                name,
                spread([100 * line["top1_error"] for line in mine]),
                spread([100 * line["oracle_error"] for line in mine]),
                spread([100 * line["calibration_error"] for line in mine]),
                spread([100 * statistics.mean(line["member_errors"]) for line in mine]),
                f"{mine[0]['bytes_per_step']:,.0f}",
            )
        )
    rows.append(
        ("data parallelism of one member's network", "", "", "", "", f"{lines[0]['data_parallel_bytes']:,.0f}")
    )
    headings = ("%", "top-1 error", "oracle error", "calibration error", "a member's error", "bytes a step and rank")
    return markdown(headings, rows)


def main() -> None:
    """Run and print; also what ranks call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, few steps; records nothing")
    parser.add_argument("--seeds", type=int, default=None)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.seeds = options.seeds or (1 if options.quick else 5)
    options.steps = options.steps or (100 if options.quick else 500)
    if options.rank:
        be_rank(options.seeds, options.steps)
        return
    sizes = ["--seeds", str(options.seeds), "--steps", str(options.steps)]
    lines = run_ranks(MEMBERS, __file__, sizes, lambda line: print(line["way"], line["seed"], flush=True))
    if options.quick:
        print(table(lines))
    else:
        conclude(OUTPUT, PAGE, "cmcl", lines, table)


if __name__ == "__main__":
    main()
