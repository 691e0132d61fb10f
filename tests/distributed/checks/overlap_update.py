"""Sliced optimizers against DDP and the same optimizer on every rank."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer

from mycel.errors import UsageError
from mycel.overlap import Lamb, SlicedOptimizer, reduce_scatter_update_all_gather

STEPS = 4


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5, bias=False), nn.LayerNorm(5))


def optimizer_of(kind: str, made: nn.Module) -> Optimizer:
    decayed = [p for p in made.parameters() if p.dim() > 1]
    others = [p for p in made.parameters() if p.dim() == 1]
    groups: Any = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}]
    if kind == "sgd":
        return SGD(groups, lr=1e-2, momentum=0.9, weight_decay=0.01)
    if kind == "lamb":
        return Lamb(groups, lr=1e-2)
    return (Adam if kind == "adam" else AdamW)(groups, lr=1e-2, amsgrad=kind == "adam")


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(6, 7, generator=torch.Generator().manual_seed(100 * step + rank))


def difference(left: nn.Module, right: nn.Module) -> float:
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def sliced(kind: str, tiles: int | None) -> tuple[nn.Module, SlicedOptimizer]:
    made = model()
    return made, reduce_scatter_update_all_gather(optimizer_of(kind, made), made.named_parameters(), tiles=tiles)


def beside_ddp(rank: int, size: int) -> dict[str, float]:
    """The largest difference of a parameter after some steps, by optimizer and tiles; schedulers change the rate."""
    found = {}
    for kind, tiles in itertools.product(("sgd", "adam", "adamw", "lamb"), (1, 3, None)):
        plain, expected = DistributedDataParallel(model()), None
        theirs = optimizer_of(kind, plain.module)
        mine, ours = sliced(kind, tiles)
        schedules = [torch.optim.lr_scheduler.LinearLR(o, 0.5, total_iters=3) for o in (theirs, ours)]
        for step in range(STEPS):
            for net, optimizer, schedule in zip((plain, mine), (theirs, ours), schedules, strict=True):
                optimizer.zero_grad()
                net(batch(rank, step)).square().sum().backward()
                optimizer.step()
                schedule.step()
        found[f"{kind} {tiles}"] = difference(plain.module, mine)
        expected = sum(t.nbytes for s in theirs.state.values() for t in s.values() if isinstance(t, Tensor))
        assert ours.state_bytes < expected / size + 400, (ours.state_bytes, expected)
        if size > 1:  # all ranks have the same
            flat = torch.cat([p.detach().reshape(-1) for p in mine.parameters()])
            theirs_flat = flat.clone()
            dist.broadcast(theirs_flat, 0)
            assert torch.equal(flat, theirs_flat)
    return found


def accumulated_and_clipped(rank: int, size: int) -> float:
    """Two backward passes a step, and a limit on the norm of gradients."""
    plain = DistributedDataParallel(model())
    theirs = optimizer_of("adamw", plain.module)
    mine, ours = sliced("adamw", 2)
    for step in range(STEPS):
        theirs.zero_grad()
        ours.zero_grad()
        with plain.no_sync():
            plain(batch(rank, step)).square().sum().backward()
        plain(batch(rank, step + 50)).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        with ours.no_sync():
            mine(batch(rank, step)).square().sum().backward()
        mine(batch(rank, step + 50)).square().sum().backward()
        assert abs(float(ours.clip_grad_norm(1.0)) - float(norm)) < 1e-4 * float(norm)
        theirs.step()
        ours.step()
    with pytest.raises(UsageError, match="a second gradient of"):
        for _ in range(2):
            mine(batch(rank, 0)).square().sum().backward()
    ours.zero_grad()
    ours.close()
    return difference(plain.module, mine)


def save(rank: int, size: int, file: str) -> list[float]:
    """Train, save; the parameters after one more step."""
    mine, ours = sliced("adamw", 3)
    for step in range(STEPS):
        ours.zero_grad()
        mine(batch(0, step)).square().sum().backward()
        ours.step()
    state = {"model": {k: v.clone() for k, v in mine.state_dict().items()}, "optimizer": ours.state_dict()}
    if rank == 0:
        torch.save(state, file)
    return one_more(mine, ours)


def one_more(mine: nn.Module, ours: SlicedOptimizer) -> list[float]:
    ours.zero_grad()
    mine(batch(0, 77)).square().sum().backward()
    ours.step()
    return torch.cat([p.detach().reshape(-1) for p in mine.parameters()]).tolist()


def load(rank: int, size: int, file: str) -> list[float]:
    """Load on another number of ranks, in other tiles; the parameters after one more step."""
    mine, ours = sliced("adamw", 2)
    saved = torch.load(Path(file))
    mine.load_state_dict(saved["model"])
    broken = {**saved["optimizer"], "state": {"strange": {}}}
    with pytest.raises(UsageError, match="the state has nothing of"):
        ours.load_state_dict(broken)
    with pytest.raises(UsageError, match="expected one of 'AdamW'"):
        ours.load_state_dict({**saved["optimizer"], "optimizer": "SGD"})
    ours.load_state_dict(saved["optimizer"])
    return one_more(mine, ours)
