"""What every rank runs for ``test_tasks.py``; the references are the gradients' weighted sums, on whole vectors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mycel.comm.bundle import Bundle
from mycel.comm.pending import Pending
from mycel.data_parallel import Periodic, local_updates
from mycel.data_parallel.combine import combine_gradients, combine_now, combine_tasks
from mycel.data_parallel.combine.tasks import (
    FAMO,
    IMTLG,
    MGDA,
    AlignedMTL,
    ByGram,
    CAGrad,
    GradNorm,
    GradVac,
    NashMTL,
    PCGrad,
    UncertaintyWeighting,
    UPGrad,
)
from mycel.errors import UsageError

BY_GRAM: dict[str, Callable[..., ByGram]] = {
    "mgda": MGDA,
    "pcgrad": PCGrad,
    "cagrad": CAGrad,
    "imtl_g": IMTLG,
    "nash": NashMTL,
    "aligned": AlignedMTL,
    "upgrad": UPGrad,
    "gradvac": GradVac,
}
BY_LOSS = {"famo": FAMO, "gradnorm": GradNorm, "uncertainty": UncertaintyWeighting}
LENGTHS = (1, 7, 1000)


def gradient(rank: int, length: int, case: str) -> Tensor:
    """A rank's vector, float64."""
    made = torch.randn(length, generator=torch.Generator().manual_seed(17 + rank), dtype=torch.float64)
    if case == "zeros" and rank == 0:
        made.zero_()
    return made


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def same_everywhere(tensor: Tensor) -> bool:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, digest(tensor))
    return len(set(found)) == 1


def formulas(rank: int, size: int) -> dict[str, float]:
    """Largest relative differences of every method from its weighted sum; infinite where ranks differ in a bit."""
    found = {}
    for name, make in BY_GRAM.items():
        for case in ("random", "zeros"):
            method, alone = make(), make()
            for length in LENGTHS:
                vectors = np.stack([gradient(r, length, case).numpy() for r in range(size)])
                alone.step = method.step
                wanted = torch.from_numpy(vectors.T @ alone.weights(vectors @ vectors.T))
                for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
                    if dtype == torch.float32 and name in ("gradvac", "aligned", "imtl_g"):
                        continue  # they remember, or depend on the last digits of a matrix without full rank
                    own = gradient(rank, length, case).to(dtype)
                    before = method.step
                    method.start(Bundle.over(own, [own]), dist.group.WORLD).wait()
                    method.step = before
                    wrong = float((own.double() - wanted).abs().max() / (1 + wanted.abs().max())) / tolerance
                    found[f"{name} {case} {length} {dtype}"] = wrong if same_everywhere(own) else float("inf")
                method.step += 1
    return found


class TwoHeads(nn.Module):
    """A trunk, and a head that every rank trains for itself."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.trunk = nn.Sequential(nn.Linear(6, 5), nn.Tanh())
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.trunk(x))
        return found


def loss_of(model: nn.Module, rank: int) -> Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(5 + rank))
    return (model(x) - rank).square().mean()


def own_gradients(rank: int) -> dict[str, Tensor]:
    model = TwoHeads(0)
    loss_of(model, rank).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def in_training(rank: int, size: int) -> dict[str, float]:
    """DDP with heads left out, several ranks a task, gradients that are there, and local updates."""
    found: dict[str, float] = {}
    each = [own_gradients(r) for r in range(size)]
    shared = [name for name in each[0] if name.startswith("trunk")]
    flat = np.stack([torch.cat([g[n].double().reshape(-1) for n in shared]).numpy() for g in each])

    def wrong(model: nn.Module, wanted: Any) -> float:
        named = dict(model.named_parameters())
        got = torch.cat([named[n].grad.double().reshape(-1) for n in shared])
        return float((got - torch.from_numpy(wanted)).abs().max() / (1e-12 + np.abs(wanted).max()))

    groupings: list[tuple[int, ...] | None] = [None]
    if size > 2:
        groupings.append(tuple([0] * (size - 1) + [1]))
    for tasks in groupings:
        spread = np.eye(size) if tasks is None else np.array([[t == k for t in tasks] for k in (0, 1)], float)
        spread /= spread.sum(1, keepdims=True)
        means = spread @ flat
        for make in (MGDA, UPGrad):
            # Buckets of one layer each: what is weighed whole waits for the last.
            model = DistributedDataParallel(TwoHeads(0), bucket_cap_mb=0.0001)
            handle = combine_gradients(model, make(tasks=tasks), heads=["head.*"])
            for _ in range(2):  # DDP orders its buckets anew after the first step
                model.zero_grad()
                loss_of(model, rank).backward()
            found[f"ddp {make.__name__} {tasks}"] = wrong(model.module, means.T @ make().weights(means @ means.T))
            own = [rank] if tasks is None else [r for r in range(size) if tasks[r] == tasks[rank]]
            head = torch.stack([each[r]["head.weight"] for r in own]).mean(0)
            found[f"head {make.__name__} {tasks}"] = float((model.module.head.weight.grad - head).abs().max())
            handle.close()
    model = TwoHeads(0)
    loss_of(model, rank).backward()
    combine_now(model.trunk.parameters(), UPGrad())
    found["now"] = wrong(model, flat.T @ UPGrad().weights(flat @ flat.T))
    for name, make in BY_LOSS.items():
        model = DistributedDataParallel(TwoHeads(0), bucket_cap_mb=0.0001)
        method, alone = make(), make()
        with combine_gradients(model, method, heads=["head.*"]):
            for _ in range(2):
                model.zero_grad()
                loss = loss_of(model, rank)
                method.tell(loss)
                loss.backward()
                losses = np.array([float(loss_of(TwoHeads(0), r)) for r in range(size)])
                second = {"famo": np.full(size, -1.0), "gradnorm": np.linalg.norm(flat, axis=1)}.get(name)
                heard = losses[:, None] if second is None else np.stack([losses, second], axis=1)
                weights = alone.update(heard)
        found[name] = wrong(model.module, flat.T @ weights)
    found["local"] = local_changes(rank, size)
    return found


def several(rank: int, size: int) -> dict[str, float]:
    """Two tasks a rank by every method: the shared gradient, the same bits on all ranks, and each task's own head."""
    found: dict[str, float] = {}
    count = 2 * size
    each = [own_gradients(task) for task in range(count)]
    shared = [name for name in each[0] if name.startswith("trunk")]
    flat = np.stack([torch.cat([g[n].double().reshape(-1) for n in shared]).numpy() for g in each])
    losses = np.array([float(loss_of(TwoHeads(0), task)) for task in range(count)])
    for name, make in {**BY_GRAM, **BY_LOSS}.items():
        models = [TwoHeads(0), TwoHeads(0)]
        models[1].trunk = models[0].trunk
        method, alone = make(), make()
        combine_tasks([loss_of(m, 2 * rank + t) for t, m in enumerate(models)], models[0].trunk.parameters(), method)
        if name in BY_GRAM:
            weights = alone.weights(flat @ flat.T)
        else:
            second = {"famo": np.full(count, -1.0), "gradnorm": np.linalg.norm(flat, axis=1)}.get(name)
            weights = alone.update(losses[:, None] if second is None else np.stack([losses, second], axis=1))
        got = torch.cat([p.grad.reshape(-1) for p in models[0].trunk.parameters()])
        wanted = torch.from_numpy(flat.T @ weights)
        wrong = float((got.double() - wanted).abs().max() / (1e-12 + wanted.abs().max()))
        found[name] = wrong if same_everywhere(got) else float("inf")
        for t, model in enumerate(models):
            own = each[2 * rank + t]["head.weight"]
            found[f"head {t} {name}"] = float((model.head.weight.grad - own).abs().max())
    # Numbers of tasks of two ranks each: the means of each pair are what is combined.
    model, tasks = TwoHeads(0), tuple(number // 2 for number in range(count))
    combine_tasks([loss_of(model, 2 * rank + t) for t in range(2)], model.trunk.parameters(), MGDA(tasks=tasks))
    means = flat.reshape(size, 2, -1).mean(1)
    got = torch.cat([p.grad.double().reshape(-1) for p in model.trunk.parameters()])
    found["means"] = float((got - torch.from_numpy(means.T @ MGDA().weights(means @ means.T))).abs().max())
    return found


def local_changes(rank: int, size: int) -> float:
    """A round of local updates of a trunk: the shared weights move by the combination of what ranks changed."""
    trunk = nn.Linear(6, 5, bias=False)
    with torch.no_grad():
        trunk.weight.fill_(0.1)
    optimizer = torch.optim.SGD(trunk.parameters(), lr=0.1)
    updates = local_updates(optimizer, Periodic(2), model=trunk, combiner=UPGrad())
    pulls = [torch.randn(5, 6, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    for _ in range(2):
        optimizer.zero_grad()
        (trunk.weight * pulls[rank]).sum().backward()
        optimizer.step()
    updates.close()
    changes = np.stack([(0.2 * p).double().reshape(-1).numpy() for p in pulls])
    wanted = 0.1 - changes.T @ UPGrad().weights(changes @ changes.T)
    return float((trunk.weight.detach().double().reshape(-1) - torch.from_numpy(wanted)).abs().max())


def shards(rank: int, size: int) -> dict[str, float]:
    """FSDP2: replicas are tasks, each sharded over two ranks; inner products are sums over shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("task", "shard"))
    task, group = mesh.get_local_rank("task"), mesh["task"].get_group()
    each = [own_gradients(t) for t in range(size // 2)]
    flat = np.stack([torch.cat([g[n].double().reshape(-1) for n in g]).numpy() for g in each])
    found = {}
    for make in (NashMTL, UPGrad):
        model = TwoHeads(0)
        fully_shard(model, mesh=mesh["shard"])
        loss_of(model, task).backward()
        combine_now(model.parameters(), make(shards=mesh["shard"].get_group()), group=group)
        got = torch.cat([p.grad.full_tensor().double().reshape(-1) for p in model.parameters()])
        wanted = flat.T @ make().weights(flat @ flat.T)
        found[make.__name__] = float((got - torch.from_numpy(wanted)).abs().max())
    try:
        combine_now(model.parameters(), MGDA(), group=group)
        found["not refused"] = 1.0
    except UsageError as error:
        found["refused"] = 0.0 if "shards=" in str(error) else 1.0
    return found


def disagreements(rank: int, size: int) -> list[str]:
    """What every rank is told where ranks do not share the same, and what it gets of numbers that are none."""
    told = []
    trunk = nn.Linear(3, 2 + rank % 2)
    trunk(torch.ones(1, 3)).sum().backward()
    try:
        combine_now(trunk.parameters(), MGDA())
    except UsageError as error:
        told.append(str(error))
    model = DistributedDataParallel(TwoHeads(0))
    try:
        combine_gradients(model, MGDA(), heads=["head.*"] if rank else ["head.weight"])
    except UsageError as error:
        told.append(str(error))
    try:
        combine_gradients(model, FAMO(), heads=["tail.*"])
    except UsageError as error:
        told.append(str(error))
    forgotten: Pending[None] = FAMO().start(Bundle.over(torch.ones(3), [torch.ones(3)]), dist.group.WORLD)
    try:
        forgotten.wait()
    except UsageError as error:
        told.append(str(error))
    own = torch.full((5,), float("nan") if rank == 0 else 1.0)
    for make in BY_GRAM.values():
        brought = own.clone()
        make().start(Bundle.over(brought, [brought]), dist.group.WORLD).wait()
        told.append("not finite" if not brought.isfinite().any() else "finite")
    return told
