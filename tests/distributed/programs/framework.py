"""Run by the tests of frameworks on every rank: trains a line with each framework and tells where its groups are.

Usage: framework.py FRAMEWORK[:BACKEND] ... Without a backend, mycel; each one's default group is a new one. Prints
for each, once a rank, one line of JSON: which it was, the default group's backend, its ranks, the losses of the rank
and the parameters at the end.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

WORLD_SIZE = int(os.environ["WORLD_SIZE"])
RANK = int(os.environ["RANK"])
EPOCHS, BATCH = 2, 8
torch.manual_seed(0)
INPUTS = torch.randn(64, 8)
TARGETS = INPUTS.sum(1, keepdim=True)
FIRST = nn.Linear(8, 1)


def squares(net: nn.Module, batch: list[Tensor]) -> Tensor:
    return (net(batch[0]) - batch[1]).square().mean()


def own_batches() -> Iterator[list[Tensor]]:
    """This rank's rows, every so many, in their order."""
    for _ in range(EPOCHS):
        for first in range(0, len(INPUTS), BATCH * WORLD_SIZE):
            rows = slice(first + RANK, first + BATCH * WORLD_SIZE, WORLD_SIZE)
            yield [INPUTS[rows], TARGETS[rows]]


def tell(losses: list[float]) -> None:
    state = torch.cat([parameter.detach().flatten() for parameter in NET.parameters()]).tolist()
    group = {"backend": dist.get_backend(), "ranks": dist.get_world_size()}
    print(json.dumps({"framework": FRAMEWORK, **group, "losses": losses, "state": state}), flush=True)


def steps(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for batch in own_batches():
        optimizer.zero_grad()
        loss = squares(net, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def plain() -> None:
    dist.init_process_group(BACKEND)
    model = DistributedDataParallel(NET)
    tell(steps(model, torch.optim.SGD(model.parameters(), lr=0.05)))
    dist.destroy_process_group()


def accelerate() -> None:
    from accelerate import Accelerator

    dist.init_process_group(BACKEND)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(NET, torch.optim.SGD(NET.parameters(), lr=0.05))
    assert isinstance(model, DistributedDataParallel)
    tell(steps(model, optimizer))
    dist.destroy_process_group()


def ignite() -> None:
    import ignite.distributed as idist
    from ignite.engine import Engine

    dist.init_process_group(BACKEND)
    model = DistributedDataParallel(NET)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses: list[float] = []

    def step(engine: Engine, batch: list[Tensor]) -> None:
        optimizer.zero_grad()
        loss = squares(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    Engine(step).run(list(own_batches()), max_epochs=1)
    assert (idist.backend(), idist.get_rank(), idist.get_world_size()) == (BACKEND, RANK, WORLD_SIZE)
    assert idist.all_reduce(torch.ones(3)).tolist() == [WORLD_SIZE] * 3
    tell(losses)
    dist.destroy_process_group()


def lightning() -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    class Line(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = NET
            self.losses: list[float] = []

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss = squares(self.net, batch)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.05)

        def on_train_end(self) -> None:
            tell(self.losses)

    strategy = DDPStrategy(process_group_backend=BACKEND)
    trainer = Trainer(
        accelerator="cpu",
        devices=WORLD_SIZE,
        strategy=strategy,
        max_epochs=1,
        use_distributed_sampler=False,  # releases of torch and Lightning differ in whether it shuffles
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Line(), DataLoader(list(own_batches()), batch_size=None))


def fabric() -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    fabric = Fabric(accelerator="cpu", devices=WORLD_SIZE, strategy=DDPStrategy(process_group_backend=BACKEND))
    fabric.launch()
    model, optimizer = fabric.setup(NET, torch.optim.SGD(NET.parameters(), lr=0.05))
    losses = []
    batches = DataLoader(list(own_batches()), batch_size=None)
    for batch in fabric.setup_dataloaders(batches, use_distributed_sampler=False):
        optimizer.zero_grad()
        loss = squares(model, batch)
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    tell(losses)


for argument in sys.argv[1:]:
    FRAMEWORK, _, named = argument.partition(":")
    BACKEND, NET = named or "mycel", copy.deepcopy(FIRST)
    globals()[FRAMEWORK]()
    if dist.is_initialized():
        dist.destroy_process_group()
    if BACKEND == "gloo":
        # A thread of Gloo's that lets a tensor go while Python ends aborts the process (pytorch #190489).
        os._exit(0)
