"""What runs on the ranks. Plain torch programs: under torchrun they would look the same."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mycel.controller import current

BATCH, WIDTH = 16, 64


def batch(number: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples of a step, another share for every part: sums of squares to be learnt."""
    generator = torch.Generator().manual_seed(1000 * number + part)
    inputs = torch.randn(BATCH, WIDTH, generator=generator)
    return inputs, inputs.square().sum(1, keepdim=True) / WIDTH


def network(width: int, seed: int = 0) -> torch.nn.Sequential:
    """Two layers."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))


class Trainer:
    """A model under DDP on the ranks of a group, with its optimizer."""

    def __init__(self, width: int, learning_rate: float, rank: int, group: dist.ProcessGroup | None) -> None:
        self._model = DistributedDataParallel(network(width), process_group=group)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=learning_rate)
        self._rank = rank

    def step(self, number: int) -> float:
        """One step on this rank's samples. Returns its loss."""
        inputs, targets = batch(number, self._rank)
        loss = torch.nn.functional.mse_loss(self._model(inputs), targets)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())


def build(width: int, learning_rate: float = 0.05) -> Trainer:
    """A trainer on the mesh that this is called on; it stays there."""
    here = current()
    return Trainer(width, learning_rate, here.rank, here.group)


def train(trainer: Trainer, number: int) -> float:
    """A step of it."""
    return trainer.step(number)


class Stage:
    """Half of a network, for a pipeline whose stages are different programs."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        self.outputs: dict[int, torch.Tensor] = {}


def first_stage(width: int) -> Stage:
    """The first layer."""
    return Stage(network(width)[:2])


def second_stage(width: int) -> Stage:
    """The second layer, of the same network."""
    return Stage(network(width)[2:])


def forward(stage: Stage, number: int) -> torch.Tensor:
    """What the first stage sends on. It remembers what it has sent."""
    stage.outputs[number] = stage.module(batch(number, 0)[0])
    return stage.outputs[number].detach()


def forward_backward(stage: Stage, activation: torch.Tensor, number: int) -> dict[str, Any]:
    """The second stage's whole part of a step: the loss, and the gradient of what came in."""
    received = activation.requires_grad_()
    loss = torch.nn.functional.mse_loss(stage.module(received), batch(number, 0)[1])
    stage.optimizer.zero_grad()
    loss.backward()
    stage.optimizer.step()
    return {"loss": float(loss.detach()), "gradient": received.grad}


def backward(stage: Stage, came: dict[str, Any], number: int) -> None:
    """The rest of the first stage's part."""
    stage.optimizer.zero_grad()
    stage.outputs.pop(number).backward(came["gradient"])
    stage.optimizer.step()
