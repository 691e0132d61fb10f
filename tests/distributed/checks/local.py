"""What every rank runs for ``test_local.py``. References simulate all workers in one process, from the formulas."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mycel.data_parallel.combine import Adasum
from mycel.data_parallel.local import (
    QSR,
    Delayed,
    EveryStep,
    LocalUpdates,
    Periodic,
    PostLocal,
    co2,
    diloco,
    local_updates,
    slowmo,
)

STEPS = 10
RATE = 0.2
#: By name: what is passed to ``local_updates``.
KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "local": lambda: {"synchronizer": Periodic(3)},
    "every step": lambda: {"synchronizer": EveryStep()},
    "diloco": lambda: {"synchronizer": Periodic(3), "outer": diloco()},
    "slowmo": lambda: {"synchronizer": Periodic(3), "outer": slowmo(momentum=0.6)},
    "late": lambda: {"synchronizer": Delayed(Periodic(3))},
    "co2": lambda: {"synchronizer": Delayed(Periodic(3)), "outer": co2(penalty=False)},
    "co2 penalty": lambda: {"synchronizer": Delayed(Periodic(3)), "outer": co2()},
    "co2 clip": lambda: {"synchronizer": Delayed(Periodic(3)), "outer": co2(clip=0.01)},
    "adasum": lambda: {"synchronizer": Periodic(3), "combiner": Adasum()},
}


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def batch(worker: int, step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * step + worker), dtype=torch.float64)
    return x, torch.stack((x[:, 0] * x[:, 1], x[:, 2]), dim=1)


def rate(step: int) -> float:
    """A schedule that decays."""
    return RATE * (1 - step / (2 * STEPS))


def loss_of(net: nn.Module, worker: int, step: int) -> Tensor:
    x, y = batch(worker, step)
    return nn.functional.mse_loss(net(x), y)


def train(net: nn.Module, worker: int, settings: dict[str, Any], steps: int = STEPS) -> LocalUpdates:
    """Ten steps of SGD with momentum, whose learning rate torch's scheduler sets."""
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.5)
    updates = local_updates(optimizer, model=net, total_steps=STEPS, **settings)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step) / RATE)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(net, worker, step).backward()
        optimizer.step()
        scheduler.step()
    return updates


# -- references ---------------------------------------------------------------------------------------------------

Vectors = list[Tensor]


def mean(changes: list[Vectors]) -> Vectors:
    return [torch.stack(layer).mean(0) for layer in zip(*changes, strict=True)]


def adasum_of_two(changes: list[Vectors]) -> Vectors:
    out = []
    for a, b in zip(*changes, strict=True):
        dot = (a * b).sum()
        out.append((1 - dot / (2 * (a * a).sum())) * a + (1 - dot / (2 * (b * b).sum())) * b)
    return out


def simulate(kind: str, gradient: Callable[[Vectors, int, int], Vectors], start: Vectors, workers: int) -> Vectors:
    """All workers of a run, one after the other."""
    period = 1 if kind == "every step" else 3
    shared = [v.clone() for v in start]
    slow = [torch.zeros_like(v) for v in start]
    inner = [[torch.zeros_like(v) for v in start] for _ in range(workers)]
    late: Vectors | None = None

    def outer(changes: Vectors, gamma: float) -> None:
        for x, m, c in zip(shared, slow, changes, strict=True):
            if kind == "diloco":
                m.mul_(0.9).add_(c)
                x.sub_(0.7 * (c + 0.9 * m))
            elif kind == "slowmo":
                m.mul_(0.6).add_(c / gamma)
                x.sub_(gamma * m)
            elif kind.startswith("co2"):
                gap = 1 + m.norm() / c.norm() if kind != "co2" else 1.0
                m.mul_(0.5).add_(c / gap)
                if kind == "co2 clip":
                    m.copy_(m.clamp(-0.01, 0.01))
                x.sub_(m)
            else:
                x.sub_(c)

    step = 0
    while step < STEPS:
        length = min(period, STEPS - step)
        ends = []
        for worker in range(workers):
            x = [v.clone() for v in shared]
            for t in range(step, step + length):
                for v, m, g in zip(x, inner[worker], gradient(x, worker, t), strict=True):
                    m.mul_(0.5).add_(g)
                    v.sub_(rate(t) * m)
            ends.append(x)
        changes = [[s - e for s, e in zip(shared, end, strict=True)] for end in ends]
        combined = adasum_of_two(changes) if kind == "adasum" else mean(changes)
        gamma = rate(step)
        step += length
        if kind == "late" or kind.startswith("co2"):
            if late is not None:
                outer(late, gamma)
            late = combined
            if step == STEPS:
                outer(late, gamma)
        else:
            outer(combined, gamma)
    return shared


def gradients(sources: int) -> Callable[[Vectors, int, int], Vectors]:
    """Gradient of a worker whose batches are those of ``sources`` ranks."""
    net = network()

    def gradient(values: Vectors, worker: int, step: int) -> Vectors:
        with torch.no_grad():
            for p, v in zip(net.parameters(), values, strict=True):
                p.copy_(v)
        net.zero_grad()
        torch.stack([loss_of(net, worker * sources + i, step) for i in range(sources)]).mean().backward()
        return [p.grad.clone() for p in net.parameters() if p.grad is not None]

    return gradient


def difference(kind: str, found: Vectors, workers: int, sources: int = 1) -> float:
    start = [p.detach().clone() for p in network().parameters()]
    want = simulate(kind, gradients(sources), start, workers)
    moved = max(float((w - s).abs().max()) for w, s in zip(want, start, strict=True))
    assert moved > 1e-3
    return max(float((f - w).abs().max()) for f, w in zip(found, want, strict=True))


# -- checks -------------------------------------------------------------------------------------------------------


def formulas(rank: int, size: int) -> dict[str, float]:
    """Parameters after ten steps against the simulation, plain and under DDP."""
    out = {}
    for kind, settings in KINDS.items():
        if kind == "adasum" and size != 2:
            continue
        for wrap in (False, True):
            net = network()
            if rank:  # whoever begins elsewhere is brought into line
                with torch.no_grad():
                    net[0].bias += 1.0
            model = DistributedDataParallel(net) if wrap else net
            updates = train(model, rank, settings())
            assert updates.in_step and updates.step == STEPS
            assert updates.rounds == (STEPS if kind == "every step" else 4)
            found = [p.detach() for p in net.parameters()]
            out[f"{kind}, {'DDP' if wrap else 'plain'}"] = difference(kind, found, size)
            updates.close()
    return out


def sharded(rank: int, size: int) -> dict[str, float]:
    """FSDP2 in two nodes: gradients are shared inside, parameters between."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    out = {}
    for kind in ("local", "diloco", "late"):
        net = network()
        for layer in (net[0], net[2]):
            fully_shard(layer, mesh=mesh["shard"])
        fully_shard(net, mesh=mesh["shard"])
        updates = train(net, rank, {**KINDS[kind](), "group": mesh["replicate"].get_group()})
        saved = updates.state_dict()
        assert all(isinstance(v, DTensor) for v in saved["shared"].values())
        found = [p.full_tensor().detach() for p in net.parameters() if isinstance(p, DTensor)]
        out[kind] = difference(kind, found, 2, size // 2)
        updates.close()
    return out


def meetings(rank: int, size: int) -> tuple[list[int], list[int]]:
    """Steps after which ranks have met under QSR, and those that the rule says; DDP, cosine schedule, warm-up."""
    steps, warm_up = 60, 5
    rates = [
        0.4 * (s + 1) / warm_up if s < warm_up else 0.2 * (1 + math.cos(math.pi * s / steps)) for s in range(steps)
    ]
    expected, step = [], 0
    while step < steps:
        rule = max(2, int((0.25 / rates[step]) ** 2)) if step >= warm_up else min(4, warm_up - step)
        step = min(step + rule, steps)
        expected.append(step)
    net = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rates[min(step, steps - 1)])
    rule = QSR(alpha=0.25, base=2, warm_up=warm_up, warm_up_period=4)
    updates = local_updates(optimizer, rule, model=net, total_steps=steps)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        (loss_of(net, rank, step) * 1e-3).backward()
        optimizer.step()
        if updates.in_step:
            found.append(step + 1)
        with torch.no_grad():
            net(batch(rank, step)[0])  # between the step and the schedule: must not begin a round
        scheduler.step()
    return found, expected


def post_local(rank: int, size: int) -> dict[str, list[bool]]:
    """Whether ranks agree after each step: with DDP's gradients at first, alone later; a batch norm and a frozen
    layer, accumulation over two passes."""
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).double()
    net[0].bias.requires_grad_(False)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.1)
    updates = local_updates(
        optimizer, PostLocal(begin=3, steps=2), model=model, total_steps=8, optimizer_state="average"
    )
    out: dict[str, list[bool]] = {"parameters": [], "statistics": [], "moments": []}
    for step in range(8):
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model, rank, 100 + step).backward()
        loss_of(model, rank, step).backward()
        optimizer.step()
        moments = [v for p in net.parameters() for k, v in optimizer.state[p].items() if k == "exp_avg"]
        for name, tensors in (
            ("parameters", list(net.parameters())),
            ("statistics", [net[1].running_mean]),
            ("moments", moments),
        ):
            mine = torch.cat([t.detach().reshape(-1) for t in tensors])
            theirs = mine.clone()
            dist.broadcast(theirs, 0)
            agree = torch.tensor([float(torch.equal(mine, theirs))])
            dist.all_reduce(agree, op=dist.ReduceOp.MIN)
            out[name].append(bool(agree))
        if step == 2:
            assert updates.num_bytes == 0
    return out


def resumed(rank: int, size: int, kind: str, save_at: int) -> tuple[bool, bool]:
    """Stop after some steps, go on in new objects from what was saved: whether the end has the same bits, and whether
    all ranks agree."""
    straight = network()
    train(straight, rank, KINDS[kind]())

    def pieces(net: nn.Module) -> tuple[Any, Any]:
        optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.5)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step) / RATE)

    def go(net: nn.Module, optimizer: Any, scheduler: Any, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss_of(net, rank, step).backward()
            optimizer.step()
            scheduler.step()

    net = network()
    optimizer, scheduler = pieces(net)
    updates = local_updates(optimizer, model=net, total_steps=STEPS, **KINDS[kind]())
    go(net, optimizer, scheduler, range(save_at))
    everything = {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "updates": updates.state_dict(),
    }
    file = io.BytesIO()
    torch.save(everything, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    again = network()
    optimizer, scheduler = pieces(again)
    again.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    scheduler.load_state_dict(loaded["scheduler"])
    updates = local_updates(optimizer, model=again, total_steps=STEPS, **KINDS[kind]())
    again.load_state_dict(loaded["model"])  # in the middle of a round a rank's parameters are its own
    updates.load_state_dict(loaded["updates"])
    go(again, optimizer, scheduler, range(save_at, STEPS))
    mine = torch.cat([p.detach().reshape(-1) for p in again.parameters()])
    theirs = mine.clone()
    dist.broadcast(theirs, 0)
    same = torch.equal(mine, torch.cat([p.detach().reshape(-1) for p in straight.parameters()]))
    return same, torch.equal(mine, theirs)


def part_of_a_run(rank: int, size: int, kind: str, file: str, first: int, last: int) -> list[float]:
    """Train some steps of a run and save; begin from the file unless it is the first part."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5)
    loaded = torch.load(file, weights_only=True) if first else None
    if loaded:
        net.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
    updates = local_updates(optimizer, model=net, **KINDS[kind]())
    if loaded:
        updates.load_state_dict(loaded["updates"])
    losses = []
    for step in range(first, last):
        optimizer.zero_grad()
        loss = loss_of(net, rank, step)
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / size)
    assert updates.in_step and updates.step == last
    saved = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "updates": updates.state_dict()}
    if rank == 0:
        torch.save(saved, file)
    return losses


def trainer(rank: int, size: int, folder: str) -> tuple[list[int], int, bool]:
    """Hugging Face's Trainer, with a callback: meetings, bytes, and whether the ranks agree in the end."""
    import os

    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    found: list[int] = []

    class Meet(TrainerCallback):
        updates: LocalUpdates

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.updates = local_updates(
                made.optimizer, Periodic(3), model=made.model_wrapped, outer=diloco(), total_steps=state.max_steps
            )

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.updates.in_step:
                found.append(state.global_step)

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32,
        n_positions=8,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    rows = torch.randint(0, 32, (64, 8), generator=torch.Generator().manual_seed(1))
    meet = Meet()
    made = Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=7,
            per_device_train_batch_size=2,
            ddp_find_unused_parameters=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[meet],
    )
    made.train()
    mine = torch.cat([p.detach().reshape(-1) for p in made.model.parameters()])
    theirs = mine.clone()
    dist.broadcast(theirs, 0)
    return found, meet.updates.num_bytes // (4 * len(mine)), torch.equal(mine, theirs)
