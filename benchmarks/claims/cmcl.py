"""Confident multiple choice learning: whether members that share examples err less together, and how sure they are.

    python benchmarks/claims/cmcl.py            # one process, then five ranks on loopback; about two minutes
    python benchmarks/claims/cmcl.py --quick

Five members, small networks on 500 images of digits. Top-1 error is that of the mean of their probabilities, oracle
error the share of images that all of them are wrong about. All members are in one process, where they learn what they
would on five ranks, bit for bit (tests/unit/test_ensemble.py). Bytes are what each of five ranks sends in a step,
counted in a short run on loopback, beside what data parallelism of the same network would.

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
from torch import Tensor, nn

from mycel.data_parallel import Ensemble, EnsembleScores, MultipleChoice
from record import RECORDED, ROOT, conclude, markdown

OUTPUT = RECORDED / "claims" / "cmcl.jsonl"
PAGE = ROOT / "docs" / "guides" / "tasks_and_ensembles.md"
MEMBERS, COUNTED_STEPS, TRAINED, BATCH, WIDTH, RATE = 5, 5, 500, 50, 24, 1e-2
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
    """Scores on held-out images, and bytes that a rank has sent a step; members are divided over the ranks."""
    here = MEMBERS // dist.get_world_size()
    digits, ensemble = Digits(seed), Ensemble(choice, per_rank=here, seed=seed)
    x, y = digits.train[0][:TRAINED], digits.train[1][:TRAINED]
    members = []
    for number in range(ensemble.member, ensemble.member + here):
        torch.manual_seed(1000 * seed + number)
        members.append((nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU()), nn.Linear(WIDTH, 10)))
    optimizer = torch.optim.Adam([p for own in members for part in own for p in part.parameters()], lr=RATE)
    order = torch.Generator().manual_seed(seed)  # the same on all members

    def logits(images: Tensor, *, training: bool) -> list[Tensor]:
        hidden = [early(images) for early, _ in members]
        mixed = ensemble.share(hidden, training=training) if shares else hidden
        return [late(h) for h, (_, late) in zip(mixed, members, strict=True)]

    for _ in range(steps):
        which = torch.randint(0, TRAINED, (BATCH,), generator=order)
        loss = ensemble.loss(logits(x[which], training=True), y[which])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    sent = ensemble.meter.total() / steps
    with torch.no_grad():
        return ensemble.evaluate(logits(digits.test[0], training=False), digits.test[1]), sent


def be_rank() -> None:
    """What every rank does: a few steps of each way, for their bytes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, (choice, shares) in WAYS.items():
        _, sent = train(choice, 0, COUNTED_STEPS, shares=shares)
        if dist.get_rank() == 0:
            print(json.dumps({"way": name, "bytes_per_step": sent}), flush=True)
    dist.destroy_process_group()


def judged(seed: int, steps: int) -> list[dict[str, Any]]:
    """A line a way, all members in this process."""
    lines = []
    for name, (choice, shares) in WAYS.items():
        scores, _ = train(choice, seed, steps, shares=shares)
        lines.append({"way": name, "seed": seed, **asdict(scores)})
    return lines


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
    seeds = len({line["seed"] for line in lines})
    headings = (
        f"%, {seeds} seeds",
        "top-1 error",
        "oracle error",
        "calibration error",
        "a member's error",
        "bytes a step and rank",
    )
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
        be_rank()
        return
    counted = run_ranks(MEMBERS, __file__, [], lambda line: print(line, flush=True))
    sent = {line["way"]: line["bytes_per_step"] for line in counted}
    parameters = 64 * WIDTH + WIDTH + 10 * WIDTH + 10
    shared = {"data_parallel_bytes": 2 * (MEMBERS - 1) / MEMBERS * 4 * parameters}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    lines: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        found = judged(seed, options.steps)
        lines += [{**line, "bytes_per_step": sent[line["way"]], **shared} for line in found]
        if options.quick:
            print(table(lines))
        else:
            conclude(OUTPUT, PAGE, "cmcl", lines, table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
