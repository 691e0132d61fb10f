"""Tune a frozen network for point clouds through adapters: few gradients travel.

torchrun --nproc-per-node 4 examples/point_clouds/tune_clouds.py
python examples/point_clouds/tune_clouds.py --write      # puts the table beside the script

A transformer is pre-trained on six shapes and tuned to six others, four ways: from scratch, all weights, the head
alone, adapters and the head. DDP exchanges the gradients of what is trained, and of nothing else.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from adapters import CloudNet, adapt
from clouds import PRETRAINED, TUNED, Clouds, make_clouds
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mycel.errors import UsageError

TABLE = Path(__file__).with_name("table.md")
WAYS = ("from scratch", "head alone", "adapters", "all weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of pre-training and tuning.

    Attributes:
        width: of the transformer.
        rank: of the adapters.
        batch: clouds a step, over all ranks.
        pretrain: clouds a shape, and how often each is seen.
        tune: the same of tuning.
        held_out: clouds a shape that judge.
        rate: of AdamW when all weights are trained.
        adapter_rate: when few are.
        seed: decides everything.
    """

    width: int = 96
    rank: int = 16
    batch: int = 32
    pretrain: tuple[int, int] = (200, 10)
    tune: tuple[int, int] = (80, 12)
    held_out: int = 150
    rate: float = 1e-3
    adapter_rate: float = 3e-3
    seed: int = 0


@dataclass(slots=True)
class Tuned:
    """What one way gave.

    Attributes:
        way: one of ``WAYS``.
        accuracy: on clouds that were not seen.
        trained: parameters.
        losses: mean over ranks, of every step.
        steps: of the optimizer.
    """

    way: str
    accuracy: float = 0.0
    trained: int = 0
    losses: list[float] = field(default_factory=list)
    steps: int = 0

    @property
    def gradient_bytes(self) -> int:
        """That DDP reduces in a step."""
        return 4 * self.trained


def fit(model: nn.Module, clouds: Clouds, epochs: int, rate: float, settings: Settings) -> tuple[list[float], int]:
    """Train on all ranks' parts of the same batches; losses of all steps, and parameters that were trained.

    Raises:
        UsageError: a batch cannot be divided among the ranks.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if settings.batch % size:
        raise UsageError(f"a batch of {settings.batch} clouds on {size} ranks; take a multiple of {size}")
    trained = [p for p in model.parameters() if p.requires_grad]
    wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.02)
    order = torch.Generator().manual_seed(settings.seed)
    per_epoch = len(clouds) // settings.batch
    if not per_epoch:
        raise UsageError(f"{len(clouds)} clouds make no batch of {settings.batch}; take a smaller one")
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=epochs * per_epoch)
    losses = []
    for _ in range(epochs):
        shuffled = torch.randperm(len(clouds), generator=order)[: per_epoch * settings.batch]
        for batch in shuffled.split(settings.batch):
            mine = clouds[batch.chunk(size)[rank]]
            loss = nn.functional.cross_entropy(wrapped(mine), mine.kinds)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
    course = torch.stack(losses).double()
    if dist.is_initialized():
        dist.all_reduce(course)
        course /= size
    return course.tolist(), sum(p.numel() for p in trained)


@torch.no_grad()
def accuracy(model: nn.Module, clouds: Clouds) -> float:
    """Share that is classified right."""
    right = [model(clouds[part]).argmax(1) == clouds.kinds[part] for part in torch.arange(len(clouds)).split(256)]
    return float(torch.cat(right).double().mean())


def pretrained(settings: Settings) -> CloudNet:
    """A network that knows the six other shapes; the same on all ranks."""
    torch.manual_seed(settings.seed)
    model = CloudNet(len(PRETRAINED), width=settings.width)
    each, epochs = settings.pretrain
    fit(model, make_clouds(PRETRAINED, each, settings.seed + 1), epochs, settings.rate, settings)
    return model


def tune(before: CloudNet, way: str, settings: Settings) -> Tuned:
    """Tune a copy one way."""
    if way not in WAYS:
        raise UsageError(f"no way {way!r}; there are {', '.join(WAYS)}")
    torch.manual_seed(settings.seed + 7)
    model = CloudNet(len(TUNED), width=settings.width) if way == "from scratch" else copy.deepcopy(before)
    model.head = nn.Linear(2 * settings.width, len(TUNED))
    if way == "adapters":
        adapt(model, settings.rank)
    elif way == "head alone":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("head."))
    each, epochs = settings.tune
    rate = settings.adapter_rate if way in ("head alone", "adapters") else settings.rate
    found = Tuned(way)
    found.losses, found.trained = fit(model, make_clouds(TUNED, each, settings.seed + 2), epochs, rate, settings)
    found.steps = len(found.losses)
    found.accuracy = accuracy(model, make_clouds(TUNED, settings.held_out, settings.seed + 3))
    return found


def table(lines: Sequence[Tuned]) -> str:
    """Markdown."""
    most = max(line.gradient_bytes for line in lines)
    rows = ["| trained | accuracy | parameters | KB of gradients a step | times fewer |", "|---|---|---|---|---|"]
    for line in lines:
        cells: list[Any] = [line.way, f"{line.accuracy:.3f}", line.trained, f"{line.gradient_bytes / 1e3:.1f}"]
        rows.append(f"| {' | '.join(map(str, cells))} | {most / line.gradient_bytes:.1f} |")
    return "\n".join(rows) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Pre-train, tune and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("gloo", "mycel"), default="mycel")
    parser.add_argument("--epochs", type=int, default=Settings().tune[1], help="of tuning")
    parser.add_argument("--rank", type=int, default=Settings().rank, help="of the adapters")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help=f"put the table into {TABLE.name}")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    ranks = "WORLD_SIZE" in os.environ
    if ranks:
        if options.backend == "mycel":
            import mycel.runtime  # noqa: F401  (registers the backend)
        dist.init_process_group(options.backend)
    settings = Settings(seed=options.seed, rank=options.rank, tune=(Settings().tune[0], options.epochs))
    before = pretrained(settings)
    made = table([tune(before, way, settings) for way in WAYS])
    if not ranks or dist.get_rank() == 0:
        print(made, end="")
        if options.write:
            TABLE.write_text(made, encoding="utf-8")
    if ranks:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
