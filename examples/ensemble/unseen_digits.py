"""Whether an ensemble knows what it does not know: members learn the digits 0 to 7 and are shown 8 and 9.

torchrun --nproc-per-node 4 examples/ensemble/unseen_digits.py    # a member a rank
torchrun --nproc-per-node 2 examples/ensemble/unseen_digits.py    # two each: the same members, bit for bit
python examples/ensemble/unseen_digits.py                         # all of them
python examples/ensemble/unseen_digits.py --write                 # puts the table beside the script

Of every example two numbers a member travel, and no gradient.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from mycel.data_parallel import Ensemble, EnsembleScores, MultipleChoice
from mycel.errors import UsageError

TABLE = Path(__file__).with_name("table.md")
#: Digits that are learned; the others are shown only when all is over.
LEARNED = 8
WAYS: dict[str, MultipleChoice | None] = {
    "independent": None,
    "multiple choice, K = 1": MultipleChoice(beta=0.0),
    "confident, K = 1": MultipleChoice(overlap=1),
    "confident, K = 2": MultipleChoice(overlap=2),
    "confident, K = 3": MultipleChoice(overlap=3),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of one ensemble.

    Attributes:
        members: over all ranks; each has as many.
        images: that are learned from.
        width: of a member's hidden layer.
        batch: images a step, the same for all members.
        rate: of Adam.
        steps: of the optimizer.
        seed: decides everything.
    """

    members: int = 4
    images: int = 400
    width: int = 24
    batch: int = 50
    rate: float = 1e-2
    steps: int = 400
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What an ensemble is worth, the same on every rank.

    Attributes:
        scores: on other images of the digits that were learned.
        sure: mean of the largest probability on these, and on digits that nobody has learned.
        told_apart: the chance that the ensemble is surer of an image of the first kind than of one of the second.
    """

    scores: EnsembleScores
    sure: tuple[float, float]
    told_apart: float


class Images:
    """Standardised images: to learn from, to judge by, and of digits that are not learned."""

    def __init__(self, settings: Settings) -> None:
        x, y = _all_images()
        known = y < LEARNED
        order = torch.randperm(int(known.sum()), generator=torch.Generator().manual_seed(settings.seed))
        rest, held = order[: settings.images], order[settings.images :]
        mean, spread = x[known][rest].mean(), x[known][rest].std()
        x = (x - mean) / spread
        self.train = x[known][rest], y[known][rest]
        self.test = x[known][held], y[known][held]
        self.unseen = x[~known]


@cache
def _all_images() -> tuple[Tensor, Tensor]:
    found: Any = load_digits()
    return torch.tensor(found.data, dtype=torch.float32), torch.tensor(found.target)


def member(number: int, settings: Settings) -> nn.Module:
    """A network of a member's own; the number decides its weights, not the rank that it is on."""
    torch.manual_seed(1000 * settings.seed + number)
    return nn.Sequential(nn.Linear(64, settings.width), nn.ReLU(), nn.Linear(settings.width, LEARNED))


def train(way: str, settings: Settings) -> Judged:
    """An ensemble whose members are divided over the ranks; needs a process group, which may be of one rank.

    Raises:
        UsageError: ranks cannot have equally many members each, or there is no such way.
    """
    if way not in WAYS:
        raise UsageError(f"no way {way!r}; there are {', '.join(WAYS)}")
    size = dist.get_world_size()
    if settings.members % size:
        raise UsageError(f"{settings.members} members on {size} ranks; take a number that {size} divides")
    here = settings.members // size
    ensemble, images = Ensemble(WAYS[way], per_rank=here, seed=settings.seed), Images(settings)
    mine = [member(ensemble.member + number, settings) for number in range(here)]
    optimizer = torch.optim.Adam([p for model in mine for p in model.parameters()], lr=settings.rate)
    x, y = images.train
    drawn = torch.Generator().manual_seed(settings.seed)  # the same images in the same order for all members
    for _ in range(settings.steps):
        which = torch.randint(0, len(x), (settings.batch,), generator=drawn)
        loss = ensemble.loss([model(x[which]) for model in mine], y[which])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        known, unknown = ([model(x) for model in mine] for x in (images.test[0], images.unseen))
    sure = [ensemble.predict(logits).amax(1) for logits in (known, unknown)]
    labels = [1] * len(sure[0]) + [0] * len(sure[1])
    return Judged(
        scores=ensemble.evaluate(known, images.test[1]),
        sure=(float(sure[0].mean()), float(sure[1].mean())),
        told_apart=float(roc_auc_score(labels, torch.cat(sure).numpy())),
    )


def table(found: dict[str, list[Judged]]) -> str:
    """Markdown: means over seeds, in percent but for the last column."""
    headings = ("members", "top-1 error", "oracle error", "calibration error", "sure of 0 to 7", "sure of 8 and 9")
    rows = ["| " + " | ".join([*headings, "told apart"]) + " |", "|" + "---|" * (len(headings) + 1)]
    for way, runs in found.items():
        columns = [
            [run.scores.top1_error for run in runs],
            [run.scores.oracle_error for run in runs],
            [run.scores.calibration_error for run in runs],
            [run.sure[0] for run in runs],
            [run.sure[1] for run in runs],
        ]
        cells = [f"{100 * statistics.mean(column):.1f}" for column in columns]
        apart = f"{statistics.mean(run.told_apart for run in runs):.3f}"
        rows.append(f"| {way} | {' | '.join(cells)} | {apart} |")
    return "\n".join(rows) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train every kind of ensemble and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("gloo", "mycel"), default="mycel")
    parser.add_argument("--way", choices=tuple(WAYS), action="append", help="by default all of them")
    parser.add_argument("--steps", type=int, default=Settings().steps)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=f"put the table into {TABLE.name}")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        if options.backend == "mycel":
            import mycel.runtime  # noqa: F401  (registers the backend)
        dist.init_process_group(options.backend)
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = {
        way: [train(way, Settings(steps=options.steps, seed=seed)) for seed in range(options.seeds)]
        for way in options.way or WAYS
    }
    if dist.get_rank() == 0:
        text = table(found)
        print(text, end="")
        if options.write:
            head = f"{Settings().members} members, {options.steps} steps, means of {options.seeds} seeds; %.\n\n"
            TABLE.write_text(head + text, encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
