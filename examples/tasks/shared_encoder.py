"""Two tasks share a narrow encoder: which digit an image shows, and what the image looks like.

torchrun --nproc-per-node 2 examples/tasks/shared_encoder.py     # a task a rank
torchrun --nproc-per-node 4 examples/tasks/shared_encoder.py     # two ranks a task, each with half of its batch
python examples/tasks/shared_encoder.py                          # one process with both: the same results
python examples/tasks/shared_encoder.py --write                  # puts the table beside the script

The picture's loss is in squared levels of grey, the digit's in nats. Nobody has chosen these units for each other, so
a mean of gradients listens to whoever has larger numbers. Ranks exchange the gradients of the encoder, an
all_reduce's bytes; heads stay where they are.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import Tensor, nn

from mycel.data_parallel import FAMO, IMTLG, MGDA, CAGrad, Mean, PCGrad, UPGrad, combine_now, combine_tasks
from mycel.data_parallel.combine.tasks import ByGram, TaskCombiner
from mycel.errors import UsageError

TABLE = Path(__file__).with_name("table.md")
TASKS = ("digit", "picture")
#: Outputs of the tasks' heads.
OUTPUTS = (10, 64)
HELD_OUT = 360


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of one training.

    Attributes:
        width: of what the encoder leaves of an image.
        batch: images a step and task, over all of its ranks.
        rate: of Adam.
        steps: of the optimizer.
        seed: decides everything.
    """

    width: int = 8
    batch: int = 64
    rate: float = 1e-2
    steps: int = 400
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What training gave, the same on every rank.

    Attributes:
        errors: on images that were not seen: the share of digits that are wrong, and of the pictures' variance
            that is left.
        against: share of steps in which the tasks' gradients pointed against each other; none where nobody looked.
    """

    errors: tuple[float, float]
    against: float | None = None


# -- methods ------------------------------------------------------------------------------------------------------


class Equal(ByGram):
    """The mean. A method of one's own is as short as this: weights of the tasks from their inner products."""

    def weights(self, gram: NDArray[np.float64]) -> NDArray[np.float64]:
        """See ``ByGram``."""
        return np.full(len(gram), 1 / len(gram))


class Watched(ByGram):
    """Another method, and how often tasks were against each other: every rank sees their inner products anyway."""

    def __init__(self, method: ByGram, tasks: Sequence[int] | None) -> None:
        super().__init__(tasks=tasks)
        self.method = method
        self.against: list[bool] = []

    def weights(self, gram: NDArray[np.float64]) -> NDArray[np.float64]:
        """See ``ByGram``."""
        self.against.append(bool(gram[0, 1] < 0))
        self.method.step = self.step
        return self.method.weights(gram)


METHODS: dict[str, Callable[[], TaskCombiner] | None] = {
    "an encoder each": None,
    "mean": Equal,
    "MGDA, normalised": lambda: MGDA(normalised=True),
    "PCGrad": PCGrad,
    "CAGrad": CAGrad,
    "IMTL-G": IMTLG,
    "UPGrad": UPGrad,
    "FAMO": FAMO,
}


def made(method: str, tasks: Sequence[int] | None) -> TaskCombiner | None:
    """A combiner for these tasks by rank."""
    if method not in METHODS:
        raise UsageError(f"no method {method!r}; there are {', '.join(METHODS)}")
    make = METHODS[method]
    if make is None:
        return None
    found = make()
    if isinstance(found, ByGram):
        return Watched(found, tasks)
    return FAMO(tasks=tasks)


# -- tasks --------------------------------------------------------------------------------------------------------


@cache
def pixels() -> tuple[Tensor, Tensor]:
    """Levels of grey of all images, 0 to 16, and what they show."""
    found: Any = load_digits()
    return torch.tensor(found.data, dtype=torch.float64), torch.tensor(found.target)


class Tasks:
    """Images that are divided by a seed, and what the two tasks make of them."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        images, digits = pixels()
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(settings.seed))
        held, rest = order[:HELD_OUT], order[HELD_OUT:]
        self.train, self.test = (images[rest], digits[rest]), (images[held], digits[held])
        self.mean = self.train[0].mean(0)
        torch.manual_seed(settings.seed)  # all of them on every rank, so that seeds mean the same everywhere
        self.encoders = [self._encoder() for _ in TASKS]  # the first is shared; both where tasks have one each
        self.heads = [nn.Linear(settings.width, outputs).double() for outputs in OUTPUTS]

    def _encoder(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, self.settings.width), nn.Tanh()).double()

    def loss(self, task: int, encoder: nn.Module, step: int, part: int = 0, parts: int = 1) -> Tensor:
        """Of this part of a task's batch, a mean."""
        drawn = torch.Generator().manual_seed((self.settings.seed * 1009 + task) * 100_003 + step)
        which = torch.randint(0, len(self.train[0]), (self.settings.batch,), generator=drawn)[part::parts]
        images, digits = self.train[0][which], self.train[1][which]
        output = self.output(task, encoder, images)
        return nn.functional.cross_entropy(output, digits) if task == 0 else (output - images).square().mean()

    def output(self, task: int, encoder: nn.Module, images: Tensor) -> Tensor:
        """Ten logits, or a picture."""
        found: Tensor = self.heads[task](encoder((images - self.mean) / 16))
        return found if task == 0 else found + self.mean

    @torch.no_grad()
    def error(self, task: int, encoder: nn.Module) -> float:
        """On images that were held out; see ``Learned.errors``."""
        images, digits = self.test
        output = self.output(task, encoder, images)
        if task == 0:
            return float((output.argmax(1) != digits).double().mean())
        return float((output - images).square().mean() / (images - self.mean).square().mean())


# -- training -----------------------------------------------------------------------------------------------------


def train(method: str, settings: Settings) -> Learned:
    """Both tasks, on one rank, on one each, or on several each, which divide its batches. Needs a process group.

    Raises:
        UsageError: an odd number of ranks, or a batch that a task's ranks cannot share evenly.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    each = max(1, size // len(TASKS))
    if size not in (1, each * len(TASKS)) or settings.batch % each:
        raise UsageError(
            f"{size} ranks for {len(TASKS)} tasks with batches of {settings.batch}: take one, or as many ranks for "
            "each task, and a batch that they can divide"
        )
    numbers = tuple(r // each for r in range(each * len(TASKS)))  # of the tasks, by rank; on one rank it has both
    mine, part = (range(len(TASKS)), 0) if size == 1 else ([numbers[rank]], rank % each)
    of_task = [dist.new_group([r for r in range(size) if numbers[r] == t]) for t in range(len(TASKS)) if each > 1]
    tasks, combiner = Tasks(settings), made(method, numbers)
    encoders = {task: tasks.encoders[task if combiner is None else 0] for task in mine}
    shared = list(tasks.encoders[0].parameters()) if combiner is not None else []
    own = [p for task in mine for p in tasks.heads[task].parameters()]
    own += [p for encoder in encoders.values() for p in encoder.parameters()] if combiner is None else []
    optimizer = torch.optim.Adam([*shared, *own], lr=settings.rate)
    for step in range(settings.steps):
        losses = [tasks.loss(task, encoder, step, part, each) for task, encoder in encoders.items()]
        optimizer.zero_grad()
        if combiner is None:
            torch.stack(losses).sum().backward()
        else:
            combine_tasks(losses, shared, combiner)
        if each > 1:
            combine_now(own, Mean(), group=of_task[numbers[rank]])
        optimizer.step()
    errors = torch.zeros(len(TASKS), dtype=torch.float64)
    for task, encoder in encoders.items():
        errors[task] = tasks.error(task, encoder) / each
    dist.all_reduce(errors)
    return _learned((float(errors[0]), float(errors[1])), combiner)


def _learned(errors: tuple[float, float], combiner: TaskCombiner | None) -> Learned:
    seen = combiner.against if isinstance(combiner, Watched) else []
    return Learned(errors=errors, against=sum(seen) / len(seen) if seen else None)


# -- the table ----------------------------------------------------------------------------------------------------


def table(found: dict[str, list[Learned]]) -> str:
    """Markdown: means over seeds."""
    rows = [
        "| encoder's gradients | digits wrong, % | of the pictures' variance left, % | steps against each other, % |"
    ]
    rows.append("|---|---|---|---|")
    for method, runs in found.items():
        cells = []
        for task in range(len(TASKS)):
            errors = [100 * run.errors[task] for run in runs]
            spread = f" ± {statistics.stdev(errors):.1f}" if len(errors) > 1 else ""
            cells.append(f"{statistics.mean(errors):.1f}{spread}")
        seen = [100 * run.against for run in runs if run.against is not None]
        cells.append(f"{statistics.mean(seen):.0f}" if seen else "")
        rows.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train by every method and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("gloo", "mycel"), default="mycel")
    parser.add_argument("--method", choices=tuple(METHODS), action="append", help="by default all of them")
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
        method: [train(method, Settings(steps=options.steps, seed=seed)) for seed in range(options.seeds)]
        for method in options.method or METHODS
    }
    if dist.get_rank() == 0:
        text = table(found)
        print(text, end="")
        if options.write:
            head = f"{options.steps} steps, {options.seeds} seeds, images that were not seen.\n\n"
            TABLE.write_text(head + text, encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
