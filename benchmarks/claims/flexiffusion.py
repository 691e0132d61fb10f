"""Whether a searched schedule of full, partial and null steps does with less work what uniform steps do.

    python benchmarks/claims/flexiffusion.py            # two models, five fresh seeds each; four minutes
    python benchmarks/claims/flexiffusion.py --quick    # one model, hardly trained; records nothing

A small diffusion model of digits (examples/diffusion_schedule). The search may spend 7.5 full steps and sees one seed
of noise; everything is judged on five others, by the Frechet distance of a classifier's features from the pictures of
all 50 steps. Wins count fresh seeds on which the searched schedule is no further away than ten uniform full steps.
Lines replace those in ``benchmarks/recorded/claims/flexiffusion.jsonl``, and the table in docs/concepts/annex.md.

References:
    H. Huang et al., "Flexiffusion: Training-Free Segment-Wise Neural Architecture Search for Efficient Diffusion
    Models", 2024, arXiv 2409.17566.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "diffusion_schedule"))

import denoiser
import search_schedule
import torch
from search_schedule import BASELINE, Settings

from record import RECORDED, ROOT, conclude, markdown

OUTPUT = RECORDED / "claims" / "flexiffusion.jsonl"
PAGE = ROOT / "docs" / "concepts" / "annex.md"


def lines_of(seed: int, *, train_steps: int, settings: Settings, fresh: int, pictures: int) -> list[dict[str, Any]]:
    """A line a schedule, of one trained model."""
    model = denoiser.train(train_steps, seed)
    found = search_schedule.search(model, settings)
    shared = {"seed": seed, "judged": found.judged, "schedule": search_schedule.spelled(found.schedule)}
    return [{**line, **shared} for line in search_schedule.compare(model, found, fresh, pictures)]


def table(lines: list[dict[str, Any]]) -> str:
    """A row a model and schedule."""
    rows = []
    for line in lines:
        base = next(b for b in lines if b["seed"] == line["seed"] and b["way"].startswith(f"{BASELINE} "))
        distances = line["distances"]
        wins = sum(mine <= theirs for mine, theirs in zip(distances, base["distances"], strict=True))
        rows.append(
            (
                line["seed"],
                line["way"],
                f"{line['cost']:.2f}",
                f"{line['cost'] / base['cost']:.2f}",
                f"{statistics.mean(distances):.2f} ± {statistics.stdev(distances):.2f}",
                "" if line is base else f"{wins} of {len(distances)}",
            )
        )
    return markdown(("model", "schedule", "full steps of work", "of the baseline's", "distance", "wins"), rows)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="records nothing")
    parser.add_argument("--seeds", type=int, default=2, help="models")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.quick:
        small = Settings(generations=2, population=8, pictures=100)
        print(table(lines_of(0, train_steps=100, settings=small, fresh=2, pictures=100)))
        return
    lines = []
    for seed in range(options.seeds):
        lines += lines_of(seed, train_steps=2500, settings=Settings(seed=seed), fresh=5, pictures=1000)
    conclude(OUTPUT, PAGE, "flexiffusion", lines, table)


if __name__ == "__main__":
    main()
