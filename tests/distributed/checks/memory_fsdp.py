"""Ranks that train what ``fully_shard`` has sharded, within a budget and without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from mycel.comm.pending import Pending
from mycel.errors import SynthesisError, UsageError
from mycel.memory import EmulatedLink, Fitted, Link, fit, needs_of
from mycel.memory.needs import counted_peak
from mycel.memory.residency import Residency

WIDTH, LAYERS, ROWS = 48, 6, 16


class Layer(nn.Module):
    """A network; five does not divide among ranks, and one parameter gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 5 * WIDTH), nn.Linear(5 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(nn.functional.relu(self.up(x)))


class Model(nn.Module):
    """Layers between an embedding and a head, which are the root's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(61, WIDTH), nn.Linear(WIDTH, 61)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.layers[2].requires_grad_(requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x), ids)


class AtOnce(Link):
    """Copies in the thread that asks, whose allocations are counted; what goes out is held until it is waited for."""

    def fetch(self, copies: Any) -> Pending[None]:
        for far, near in copies:
            near.copy_(far)
            self.fetched_bytes += near.nbytes
        return Pending.done(None)

    def store(self, copies: Any) -> Pending[None]:
        super().store(copies).wait()
        held = list(copies)
        return Pending(held.clear)


def sharded(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model over all ranks, and AdamW."""
    model = Model()
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def ids(step: int) -> Tensor:
    """What this rank gets."""
    seed = 100 * step + dist.get_rank()
    return torch.randint(0, 61, (ROWS,), generator=torch.Generator().manual_seed(seed))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int, micro: int = 1) -> list[float]:
    """Losses."""
    losses = []
    for step in range(first, first + count):
        for part in range(micro):
            loss = model(ids(step * micro + part))
            loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def states(model: nn.Module) -> int:
    """Bytes of this rank's parameters, gradients and optimizer state."""
    return sum(4 * p.to_local().nbytes for p in model.parameters())  # type: ignore[attr-defined]


def held(part: float, micro: int = 1, link: Link | None = None, **options: Any) -> tuple[Any, Any, Fitted]:
    """The model with a part of its states as budget, beyond what a step works with."""
    model, optimizer = sharded(**options)
    needs = needs_of(model, (ids(0),), optimizer=optimizer)
    works = max(moment.working for moment in needs.moments)
    budget = works + round(part * states(model))
    return model, optimizer, fit(model, optimizer, (ids(0),), budget=budget, micro_batches=micro, link=link)


def trains(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Losses as without a budget, in several ways of sharding; a checkpoint that plain FSDP2 goes on from."""
    found: dict[str, Any] = {}
    link = EmulatedLink(bandwidth_gbps=50)
    for name, micro, options in (
        ("layers", 1, {}),
        ("two micro-batches", 2, {}),
        ("kept gathered", 1, {"reshard_after_forward": False}),
    ):
        plain, optimizer = sharded(**options)
        wanted = steps(plain, optimizer, 0, 4, micro)
        model, optimizer, fitted = held(0.3, micro, link, **options)
        with fitted:
            got = steps(model, optimizer, 0, 3, micro)
            residency = next(h for h in fitted.handles if isinstance(h, Residency))
            found[name] = {
                "way": fitted.way,
                "same": got == wanted[: 3 * micro],
                "moved": residency.schedule.moved_bytes,
                "off": residency.off_schedule,
                "pinned": len(residency.schedule.pinned),
            }
            if name == "layers":
                parameters, state = get_state_dict(model, optimizer)
                dcp.save({"model": parameters, "optimizer": state}, checkpoint_id=folder)
                found["far"] = all(
                    t.to_local().device.type == "cpu" for s in optimizer.state.values() for t in s.values() if t.dim()
                )
        found[name]["closed"] = steps(model, optimizer, 3, 1, micro) == wanted[3 * micro :]
    plain, optimizer = sharded()
    wanted = steps(plain, optimizer, 0, 4)
    fresh, optimizer = sharded()
    parameters, state = get_state_dict(fresh, optimizer)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)  # what gets no gradient has no state
    dcp.load({"model": parameters, "optimizer": state}, checkpoint_id=folder, planner=planner)
    set_state_dict(fresh, optimizer, model_state_dict=parameters, optim_state_dict=state)
    found["loaded"] = steps(fresh, optimizer, 3, 1) == wanted[3:]
    found["kept"] = Path(folder, ".metadata").exists()
    link.close()
    return found


def fits(rank: int, world_size: int) -> dict[str, Any]:
    """Peaks beside what was counted, budgets beside bytes, and what is refused alike by all."""
    found: dict[str, Any] = {"ratios": [], "moved": []}
    for part in (0.15, 0.3, 0.6, 2.0):
        link = AtOnce()
        model, optimizer, fitted = held(part, 1, link)
        with fitted:
            steps(model, optimizer, 0, 1)
            inputs = ids(0).nbytes
            kept = next((h for h in fitted.handles if isinstance(h, Residency)), None)
            found["moved"].append(0 if kept is None else kept.schedule.moved_bytes)
            if kept is not None and not kept.schedule.pinned:
                begun = link.fetched_bytes
                counted = inputs + counted_peak(lambda: steps(model, optimizer, 1, 1))  # noqa: B023 (called here)
                found["ratios"].append(kept.schedule.peak / counted)
                found["within"] = counted <= fitted.budget
                found["planned"] = link.fetched_bytes - begun == kept.schedule.plan.loaded_bytes
    found["way"] = fitted.way
    model, optimizer = sharded()
    budget = 10_000 if rank == 0 else 1 << 30  # one rank has too little, and all are told
    try:
        fit(model, optimizer, (ids(0),), budget=budget)
    except SynthesisError as error:
        found["refused"] = str(error)
    part = Model()
    fully_shard(part.layers[0])
    try:
        fit(part, torch.optim.AdamW(part.parameters()), (ids(0),), budget=1 << 30)
    except UsageError as error:
        found["in part"] = str(error)
    return found
