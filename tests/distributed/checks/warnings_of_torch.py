"""What every rank runs for ``test_warnings_of_torch.py``: each wing once, as its guide has it."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mycel.data_parallel import (
    QSDP,
    Adasum,
    Dion,
    Periodic,
    combine_gradients,
    compress,
    diloco,
    local_updates,
)
from mycel.moe import ExpertParallel, MoE, SwitchLoss

WIDTH = 16


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> float:
    """Three steps; the loss of the last."""
    loss = torch.zeros(())
    for step in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * rank + step))
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def replicated(rank: int, size: int) -> float:
    """DDP, and what replaces its sums."""
    model = DistributedDataParallel(_net())
    _steps(model, _sgd(model), rank)
    for method in ("powersgd", "int4", "top_k", "bf16"):
        with compress(model, method) as handle:
            _steps(model, _sgd(model), rank)
            handle.state_dict()
    with combine_gradients(model, Adasum()):
        _steps(model, _sgd(model), rank)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = {"params": [p for p in model.parameters() if p.dim() != 2], "algorithm": "adamw"}
    optimizer = Dion([{"params": matrices}, others], lr=0.01)
    with optimizer.attach(model):
        return _steps(model, optimizer, rank)


def sharded(rank: int, size: int) -> float:
    """FSDP2, as it is and compressed."""
    model = _net()
    mesh = dist.init_device_mesh("cpu", (size,))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    last = _steps(model, _sgd(model), rank)
    for method in (QSDP(weight_bits=8, gradient_bits=4), "int8"):
        with compress(model, method) as handle:
            last = _steps(model, _sgd(model), rank)
            handle.state_dict()
    return last


def apart(rank: int, size: int) -> float:
    """Local updates, with and without an outer optimizer."""
    model = _net()
    optimizer = _sgd(model)
    with local_updates(optimizer, Periodic(2), model=model, total_steps=3):
        _steps(model, optimizer, rank)
    with local_updates(optimizer, Periodic(2), model=model, outer=diloco(), compressor="dense_int4", total_steps=3):
        return _steps(model, optimizer, rank)


def experts(rank: int, size: int) -> float:
    """Experts over all ranks, tokens exchanged whole and in eight bits."""
    mesh = dist.init_device_mesh("cpu", (size,))
    last = 0.0
    for codec in ("identity", "int8"):
        torch.manual_seed(1)
        parallel = ExpertParallel(mesh, codec=codec, degree=2)
        layer = MoE(WIDTH, 32, 4, 2, parallel=parallel, balancing=SwitchLoss())
        optimizer = _sgd(layer)
        for _ in range(2):
            loss: Tensor = layer(torch.randn(8, WIDTH)).square().mean() + layer.loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        last = float(loss.detach())
    return last


def collectives(rank: int, size: int) -> float:
    """Those with names of their own, alike in every release of torch."""
    array = torch.full((4 * size,), float(rank))
    dist.all_reduce(array)
    dist.broadcast(array, 0)
    parts = [torch.zeros(4) for _ in range(size)]
    dist.all_gather(parts, torch.full((4,), float(rank)))
    dist.barrier()
    return float(array[0])


def heard(rank: int, size: int) -> str:
    """What a warning comes to here."""
    try:
        warnings.warn("an old name", FutureWarning, stacklevel=1)
    except FutureWarning as error:
        return str(error)
    return "nothing"
