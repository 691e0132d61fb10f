"""What ranks do in ``test_matrix_optimizers.py``."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mycel.data_parallel import Dion, Muon, matrix_groups
from mycel.errors import UsageError


class Small(nn.Module):
    """An embedding, matrices that do not divide among three ranks, biases, and a layer that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.up = nn.Linear(8, 25)
        self.middle = nn.Linear(25, 25, bias=False)
        self.down = nn.Linear(25, 8, bias=False)
        self.sometimes = nn.Linear(8, 8)

    def forward(self, tokens: Tensor, use: bool) -> Tensor:
        x: Tensor = self.table(tokens)
        x = x + self.down(self.middle(self.up(x).relu()).relu())
        if use:
            x = self.sometimes(x)
        return x @ self.table.weight.T


def _optimizer(kind: str, model: nn.Module, wire: torch.dtype | None = None) -> Any:
    groups = matrix_groups(model, adamw_options={"lr": 1e-3})
    if kind == "mixed":
        return Dion([{"params": [groups[0]["params"][0]], "algorithm": "muon"},
                     {"params": groups[0]["params"][1:]}, groups[1]], lr=0.02, wire=wire)  # fmt: skip
    return {"dion": Dion, "muon": Muon}[kind](groups, lr=0.02, weight_decay=0.1, wire=wire)


def _batch(step: int, rank: int, size: int, *, joined: bool) -> Tensor:
    tokens = torch.randint(0, 11, (2 * size, 9), generator=torch.Generator().manual_seed(step))
    return tokens if joined else tokens[2 * rank : 2 * rank + 2]


def _loss(model: nn.Module, tokens: Tensor, use: bool) -> Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1], use).flatten(0, 1), tokens[:, 1:].flatten())


def _train(how: str, kind: str, rank: int, size: int, steps: int = 6, wire: torch.dtype | None = None) -> Any:
    torch.manual_seed(0)
    model: Any = Small().double() if wire is None else Small()
    if how == "ddp":
        model = DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=0.002)
    elif how == "fsdp":
        mesh = init_device_mesh("cpu", (size,))
        for part in (model.up, model.middle):
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = _optimizer(kind, model, wire)
    handle = optimizer.attach(model) if how == "ddp" else None
    for step in range(steps):
        optimizer.zero_grad()
        _loss(model, _batch(step, rank, size, joined=how == "alone"), step % 2 == 1).backward()
        optimizer.step()
    return model, optimizer, handle


def _values(model: nn.Module) -> Tensor:
    found = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([f.detach().reshape(-1) for f in found])


def equals_one_process(rank: int, size: int, how: str, kind: str) -> tuple[float, bool]:
    """The largest difference, and whether ranks have the same bits."""
    alone, _, _ = _train("alone", kind, rank, size)
    model, _, _ = _train(how, kind, rank, size)
    values = _values(model)
    everybody = [torch.empty_like(values) for _ in range(size)]
    dist.all_gather(everybody, values)
    return float((values - _values(alone)).abs().max()), all(torch.equal(e, values) for e in everybody)


def sends(rank: int, size: int) -> dict[str, tuple[float, float]]:
    """Bytes sent, and those of exact gradients, by way; ranks have the same bits whatever the wire."""
    found = {}
    for kind in ("dion", "muon"):
        for wire in (torch.float32, torch.bfloat16):
            model, optimizer, _ = _train("ddp", kind, rank, size, 2, wire)
            values = _values(model)
            others = values.clone()
            dist.broadcast(others, 0)
            assert torch.equal(values, others), (kind, wire)
            found[f"{kind} {wire}"] = (optimizer.stats.sent_bytes, optimizer.stats.exact_bytes)
    return found


def overflow_is_everybodys(rank: int, size: int, how: str) -> dict[str, bool]:
    """One rank's gradients overflow in step 3: scalers agree, nothing is learnt, and training goes on."""
    model, optimizer, handle = _train(how, "dion", rank, size, 2, torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    fine = {}
    for step in range(2, 5):
        before = _values(model), [s.clone() for s in _state(optimizer)]
        optimizer.zero_grad()
        loss = _loss(model, _batch(step, rank, size, joined=False), False)
        overflows = None
        if step == 3 and rank == size - 1:
            if how == "ddp":  # of a matrix whose gradient stays here alone; nothing that is averaged tells the others
                overflows = model.module.middle.weight.register_hook(lambda gradient: gradient * torch.inf)
            else:
                loss = loss * torch.tensor(3e38) * 1e3
        scaler.scale(loss).backward()
        if overflows is not None:
            overflows.remove()
        scaler.step(optimizer)
        scaler.update()
        same = torch.equal(_values(model), before[0])
        same &= all(torch.equal(a, b) for a, b in zip(_state(optimizer), before[1], strict=True))
        fine[f"step {step}"] = same == (step == 3) and bool(_values(model).isfinite().all())
    fine["scale"] = scaler.get_scale() == 2.0
    del handle
    return fine


def _state(optimizer: Any) -> list[Tensor]:
    found = [v for s in optimizer.state.values() for v in s.values()]
    return [v.to_local() if isinstance(v, DTensor) else v for v in found]


def resumes(rank: int, size: int, how: str) -> tuple[float, float]:
    """How far from the unbroken run: own state; the mean of momenta, taken from rank 0."""
    found = []
    whole, _, _ = _train(how, "mixed", rank, size, 6)
    for shared in (False, True):
        model, optimizer, handle = _train(how, "mixed", rank, size, 3)
        if shared:
            optimizer.synchronize()
        state = copy.deepcopy(optimizer.state_dict())  # close() averages momenta in place
        if shared and how == "ddp":
            said = [state]
            dist.broadcast_object_list(said, 0)
            state = said[0]
        if handle is not None:
            handle.close()
        optimizer = _optimizer("mixed", model)
        optimizer.load_state_dict(state)
        handle = optimizer.attach(model) if how == "ddp" else None
        for step in range(3, 6):
            optimizer.zero_grad()
            _loss(model, _batch(step, rank, size, joined=False), step % 2 == 1).backward()
            optimizer.step()
        found.append(float((_values(model) - _values(whole)).abs().max()))
    return found[0], found[1]


def closing_averages(rank: int, size: int) -> float:
    """After ``close`` DDP averages and momenta are alike: goes on as one process does."""
    alone, lone, _ = _train("alone", "dion", rank, size, 3)
    model, optimizer, handle = _train("ddp", "dion", rank, size, 3)
    handle.close()
    handle.close()
    for step in range(3, 6):
        for m, o, joined in ((alone, lone, True), (model, optimizer, False)):
            o.zero_grad()
            _loss(m, _batch(step, rank, size, joined=joined), step % 2 == 1).backward()
            o.step()
    return float((_values(model) - _values(alone)).abs().max())


def refuses(rank: int, size: int) -> list[str]:
    """What is said about clipping by own norms, a second handle, parameters that nobody moves."""
    model, optimizer, _ = _train("ddp", "dion", rank, size, 1)
    said = []
    optimizer.zero_grad()
    _loss(model, _batch(1, rank, size, joined=False), True).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    for attempt in (optimizer.step, lambda: optimizer.attach(model)):
        try:
            attempt()
        except UsageError as error:
            said.append(str(error))
    other = DistributedDataParallel(nn.Linear(4, 4))
    try:
        Dion([other.module.weight]).attach(other)
    except UsageError as error:
        said.append(str(error))
    clipped = [p for g in optimizer.param_groups if g["algorithm"] == "adamw" for p in g["params"]]
    optimizer.zero_grad()
    _loss(model, _batch(1, rank, size, joined=False), True).backward()
    nn.utils.clip_grad_norm_(clipped, 1e-3)
    optimizer.step()
    return said


def deviations_fade(rank: int, size: int) -> float:
    """How long a momentum is beside the gradient that this rank has, for ever, and the mean has not."""
    model = DistributedDataParallel(nn.Linear(6, 6, bias=False).double())
    optimizer = Dion(model.parameters(), lr=0.0, rank=1.0, momentum=0.5)
    own = torch.randn(6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    own *= 1 if rank == 0 else -1
    with optimizer.attach(model):
        for step in range(20):
            shared = torch.randn(6, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            optimizer.zero_grad()
            with model.no_sync():  # half of the gradient stays here until the other half is there
                (model(torch.eye(6, dtype=torch.float64)) * (shared + own).T / 2).sum().backward()
            (model(torch.eye(6, dtype=torch.float64)) * (shared + own).T / 2).sum().backward()
            optimizer.step()
        momentum = optimizer.state[model.module.weight]["momentum"]
        mean = momentum.clone()
        dist.all_reduce(mean)
        return float((momentum - mean / size).norm() / own.norm())
