"""Whether the quadratic synchronization rule beats meetings of constant distance at equal communication.

    python benchmarks/claims/qsr.py            # five seeds on four ranks, about two minutes on two quiet cores
    python benchmarks/claims/qsr.py --quick    # one seed, fewer steps

Four ranks train a small network on digits with SGD and a cosine schedule. For each rule the steps of all meetings
are compared with a count made here from the schedule alone. Constant distances are chosen so that they meet at least
as often as the rule they are compared with. Rows replace those of the last run in
``benchmarks/recorded/claims/qsr.jsonl``, and the table in docs/concepts/local_updates.md.

References:
    X. Gu et al., "A Quadratic Synchronization Rule for Distributed Deep Learning", ICLR 2024, arXiv 2310.14423.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from digits import Digits, network, run_ranks, spread

from mycel.data_parallel.local import QSR, Periodic, Synchronizer, local_updates
from record import RECORDED, ROOT, append, markdown, stamp, write_section

OUTPUT = RECORDED / "claims" / "qsr.jsonl"
PAGE = ROOT / "docs" / "concepts" / "local_updates.md"
RANKS, BATCH = 4, 16
PEAK, FLOOR = 0.4, 0.004
ALPHAS = (0.3, 0.6)


def rate(step: int, steps: int) -> float:
    """Cosine from the peak to the floor."""
    return FLOOR + 0.5 * (PEAK - FLOOR) * (1 + math.cos(math.pi * step / steps))


def expected(alpha: float, base: int, steps: int) -> list[int]:
    """Steps after which the rule meets, counted here."""
    found, step = [], 0
    while step < steps:
        step = min(steps, step + max(base, int((alpha / rate(step, steps)) ** 2)))
        found.append(step)
    return found


def rules(steps: int) -> dict[str, tuple[Synchronizer, list[int] | None]]:
    """Rules by name, in pairs of equal communication, with meetings where these are claimed."""
    found: dict[str, tuple[Synchronizer, list[int] | None]] = {"every step": (Periodic(1), None)}
    for alpha in ALPHAS:
        meetings = expected(alpha, 2, steps)
        found[f"QSR alpha={alpha} base=2"] = (QSR(alpha=alpha, base=2), meetings)
        distance = steps // len(meetings)
        found[f"constant {distance}"] = (Periodic(distance), [*list(range(distance, steps, distance)), steps])
    return found


def train(synchronizer: Synchronizer, seed: int, steps: int) -> dict[str, Any]:
    """One run of this rank."""
    digits, model, rank = Digits(seed), network(seed), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=PEAK, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps) / PEAK)
    updates = local_updates(optimizer, synchronizer, model=model, total_steps=steps)
    meetings = []
    for step in range(steps):
        x, y = digits.batch(seed, rank, step, BATCH)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
        if updates.in_step:
            meetings.append(step + 1)
    accuracy, loss = digits.judge(model)
    updates.close()
    return {"meetings": meetings, "accuracy": 100 * accuracy, "loss": loss, "bytes": updates.num_bytes}


def be_rank(seeds: int, steps: int) -> None:
    """What every rank does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, (synchronizer, meetings) in rules(steps).items():
        for seed in range(seeds):
            result = train(synchronizer, seed, steps)
            met = result.pop("meetings")
            result |= {"rule": name, "seed": seed, "num_meetings": len(met)}
            result["as_claimed"] = meetings is None or met == meetings
            if dist.get_rank() == 0:
                print(json.dumps(result), flush=True)
    dist.destroy_process_group()


def table(lines: list[dict[str, Any]], steps: int) -> str:
    """A row a rule."""
    rows = []
    for name in dict.fromkeys(line["rule"] for line in lines):
        of_rule = [line for line in lines if line["rule"] == name]
        meetings = of_rule[0]["num_meetings"]
        rows.append(
            (
                name,
                f"{meetings} ({100 * meetings / steps:.1f} %)",
                "yes" if all(line["as_claimed"] for line in of_rule) else "NO",
                spread([line["accuracy"] for line in of_rule]),
                f"{statistics.mean(line['loss'] for line in of_rule):.4f}",
            )
        )
    return markdown(("rule", "meetings", "when the rule says", "accuracy, %", "held-out loss"), rows)


def main() -> None:
    """Run and print; also what ranks call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, 120 steps; records nothing")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps = 1, 120
    if options.rank:
        be_rank(options.seeds, options.steps)
        return
    sizes = ["--seeds", str(options.seeds), "--steps", str(options.steps)]
    lines = run_ranks(
        RANKS, __file__, sizes, lambda line: print(f"{line['rule']:24} seed {line['seed']}", flush=True)
    )
    found = table(lines, options.steps)
    print(found)
    if not options.quick:
        OUTPUT.unlink(missing_ok=True)
        append(OUTPUT, [{**line, "steps": options.steps, **stamp()} for line in lines])
        write_section(PAGE, "qsr", found)


if __name__ == "__main__":
    main()
