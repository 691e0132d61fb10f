"""What every rank runs for ``test_outer.py``: compressed, streamed and elastic local updates."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mycel import elastic
from mycel.data_parallel import (
    COMPRESSORS,
    QSR,
    Delayed,
    DenseInt4,
    Periodic,
    Streaming,
    diloco,
    local_updates,
    make_compressor,
)
from mycel.data_parallel.local import LocalUpdates

Vectors = list[Tensor]
RATE = 0.1


class Net(nn.Module):
    """Blocks by number, and parts that have none."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.into = nn.Linear(6, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        result: Tensor = self.out(x)
        return result


def loss_of(net: nn.Module, worker: int, step: int) -> Tensor:
    dtype = next(net.parameters()).dtype
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * step + worker)).to(dtype)
    return nn.functional.mse_loss(net(x), torch.stack((x[:, 0] * x[:, 1], x[:, 2]), dim=1))


def flat(net: nn.Module) -> Tensor:
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in whole]).clone()


def agree(tensor: Tensor) -> bool:
    """Whether all ranks have the same bits."""
    theirs = tensor.clone()
    dist.broadcast(theirs, 0)
    same = torch.tensor([int(torch.equal(tensor, theirs))])
    dist.all_reduce(same, op=dist.ReduceOp.MIN)
    return bool(same)


def go(model: nn.Module, worker: int, steps: range, *, optimizer: torch.optim.Optimizer, scale: float = 1.0) -> None:
    for step in steps:
        optimizer.zero_grad()
        (loss_of(model, worker, step) * scale).backward()
        optimizer.step()


# -- streaming ----------------------------------------------------------------------------------------------------


def simulate_streaming(rule: Streaming, fragments: list[list[int]], workers: int, steps: int) -> Vectors:
    """Algorithm 2 of the paper, all workers in one process, with SGD inside and DiLoCo's outer optimizer."""
    net = Net().double()
    start = [p.detach().clone() for p in net.parameters()]
    shared, slow = [v.clone() for v in start], [torch.zeros_like(v) for v in start]
    local = [[v.clone() for v in start] for _ in range(workers)]
    flying: dict[int, tuple[int, dict[int, Tensor], list[dict[int, Tensor]]]] = {}

    def measure(fragment: int) -> dict[int, Tensor]:
        return {i: torch.stack([shared[i] - w[i] for w in local]).mean(0) for i in fragments[fragment]}

    def use(change: dict[int, Tensor], mixing: float, since: list[dict[int, Tensor]] | None = None) -> None:
        for i, c in change.items():
            slow[i].mul_(0.9).add_(c)
            shared[i].sub_(0.7 * (c + 0.9 * slow[i]))
            for worker, w in enumerate(local):
                if since is None:
                    w[i].copy_(mixing * w[i] + (1 - mixing) * shared[i])
                else:
                    w[i].copy_(shared[i] + w[i] - since[worker][i])

    for step in range(steps):
        for worker, values in enumerate(local):
            with torch.no_grad():
                for p, v in zip(net.parameters(), values, strict=True):
                    p.copy_(v)
            net.zero_grad()
            loss_of(net, worker, step).backward()
            for p, v in zip(net.parameters(), values, strict=True):
                v.sub_(RATE * p.grad)
        done = step + 1
        for fragment in range(rule.fragments if done < steps else 0):
            offset = (fragment + 1) * rule.steps // rule.fragments
            if done % rule.steps == offset % rule.steps and done + rule.steps <= steps:
                before = [{i: w[i].clone() for i in fragments[fragment]} for w in local]
                flying[fragment] = (done + rule.overlap, measure(fragment), before)
        for fragment, (at, change, before) in list(flying.items()):
            if at <= done or done == steps:
                keeps = rule.own == "since" and rule.overlap
                use(change, rule.mixing if rule.overlap else 0.0, before if keeps else None)
                del flying[fragment]
    for fragment in range(rule.fragments):
        use(measure(fragment), 0.0)
    return shared


def streaming(rank: int, size: int) -> dict[str, float]:
    """Parameters after some steps against the simulation: fragments, overlaps, mixing, wrapped by DDP too."""
    out = {}
    # into, blocks.0 to .2, out: weight and bias each
    strided = [[2, 3, 6, 7, 8, 9], [0, 1, 4, 5]]
    sequential = [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]]
    cases = {
        "waits": (Streaming(steps=4, fragments=2), strided, 13),
        "overlap": (Streaming(steps=4, fragments=2, overlap=3), strided, 17),
        "own kept": (Streaming(steps=5, fragments=2, overlap=2, mixing=0.25), strided, 20),
        "own steps kept": (Streaming(steps=5, fragments=2, overlap=2, own="since"), strided, 20),
        "in a row": (Streaming(steps=4, fragments=2, overlap=1, pattern="sequential"), sequential, 18),
    }
    for name, (rule, fragments, steps) in cases.items():
        for wrap in (False, True)[: 1 + (name == "overlap")]:
            net = Net().double()
            model = DistributedDataParallel(net) if wrap else net
            optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
            updates = local_updates(optimizer, rule, model=model, outer=diloco(), total_steps=steps)
            go(model, rank, range(steps), optimizer=optimizer)
            assert updates.in_step and updates.step == steps
            want = torch.cat([v.reshape(-1) for v in simulate_streaming(rule, fragments, size, steps)])
            out[f"{name}, {'DDP' if wrap else 'plain'}"] = float((flat(net) - want).abs().max())
            updates.close()
    return out


# -- compression --------------------------------------------------------------------------------------------------

#: By name: when to meet.
RULES: dict[str, Any] = {
    "blocking": Periodic(3),
    "delayed": Delayed(Periodic(3)),
    "streamed": Streaming(steps=4, fragments=2, overlap=2),
    "since": Streaming(steps=4, fragments=2, overlap=2, own="since"),
}


def compressed(rank: int, size: int) -> dict[str, float]:
    """Every compressor and way of meeting: all that was ever changed arrives, on the same bits everywhere.

    The outer optimizer just adds up, and gradients do not depend on parameters: the shared parameters and the mean of
    what is owed together are those of exact means.
    """
    out = {}
    for name in COMPRESSORS:
        for way, rule in RULES.items():
            if way != "blocking" and name not in ("dense_int4", "powersgd", "top_k", "fp8"):
                continue
            net = Net(width=20)
            start = flat(net)
            optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
            updates = local_updates(
                optimizer, rule, model=net, compressor=make_compressor(name), feedback=True, total_steps=12
            )
            total = torch.zeros_like(start)
            for step in range(12):
                for i, p in enumerate(net.parameters()):
                    noise = torch.Generator().manual_seed(10_000 * step + 100 * i + rank)
                    p.grad = torch.randn(p.shape, generator=noise)
                total -= torch.cat([p.grad.reshape(-1) for p in net.parameters()])
                optimizer.step()
            dist.all_reduce(total)
            state = updates.state_dict()
            owed = [state["residuals"].get(n, torch.zeros_like(p)).reshape(-1) for n, p in net.named_parameters()]
            assert agree(flat(net)), (name, way)
            # With mixing a rank keeps a share of what others have had from it already: nothing telescopes there.
            if way != "streamed":
                want = start + total / size
                out[f"{name}, {way}"] = float((flat(net) - torch.cat(owed) - want).norm() / (want - start).norm())
            assert way == "streamed" or name in ("bf16", "fp16", "lattice") or any(o.abs().max() > 0 for o in owed)
            updates.close()
    return out


def resumed(rank: int, size: int, way: str, save_at: int) -> tuple[bool, bool]:
    """Stop in the middle, go on in new objects: whether the end has the same bits, and whether ranks agree."""

    def begin() -> tuple[Net, torch.optim.Optimizer, LocalUpdates]:
        net = Net(width=20)
        optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.5)
        method = make_compressor("powersgd", rank=1, min_ratio=1.0) if way == "powersgd" else DenseInt4()
        rule = RULES.get(way, RULES["streamed"])
        updates = local_updates(optimizer, rule, model=net, outer=diloco(), compressor=method, total_steps=14)
        return net, optimizer, updates

    straight, optimizer, _ = begin()
    go(straight, rank, range(14), optimizer=optimizer)
    net, optimizer, updates = begin()
    go(net, rank, range(save_at), optimizer=optimizer)
    file = Path(tempfile.mkdtemp()) / "saved.pt"
    everything = {
        "net": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "updates": updates.state_dict(own=True),
    }
    torch.save(everything, file)
    loaded = torch.load(file, weights_only=True)
    again, optimizer, updates = begin()
    again.load_state_dict(loaded["net"])
    optimizer.load_state_dict(loaded["optimizer"])
    updates.load_state_dict(loaded["updates"])
    go(again, rank, range(save_at, 14), optimizer=optimizer)
    return torch.equal(flat(again), flat(straight)), agree(flat(again))


def fewer_bytes(rank: int, size: int) -> tuple[float, float]:
    """Bytes sent with DiLoCo in float32, and in four fragments of fifteen levels."""
    sent = []
    for rule, method in ((Periodic(8), None), (Streaming(steps=8, fragments=4, overlap=2), DenseInt4())):
        net = Net(width=128)
        optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
        updates = local_updates(optimizer, rule, model=net, outer=diloco(), compressor=method, total_steps=24)
        go(net, rank, range(24), optimizer=optimizer)
        assert agree(flat(net))
        total = torch.tensor([updates.stats.sent_bytes])
        dist.all_reduce(total)
        sent.append(float(total))
        updates.close()
    return sent[0], sent[1]


def overflown(rank: int, size: int, way: str, method: str | None) -> tuple[bool, bool, int]:
    """One rank runs away in the second round: whether nothing is remembered of it, ranks agree, and rounds left out.

    The other run has no training in that round at all: whoever was to learn nothing from it ends there.
    """
    ends = []
    for runs_away in (True, False):
        net = Net(width=20)
        optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.5)
        compressor = None if method is None else make_compressor(method)
        updates = local_updates(
            optimizer, RULES[way], model=net, outer=diloco(), compressor=compressor, total_steps=12
        )
        if runs_away:
            ends.append(updates)
        for step in range(12):
            optimizer.zero_grad()
            loss_of(net, rank, step).backward()
            if runs_away and rank == 1 and step == 4:
                net.blocks[1].weight.grad[0, 0] = float("inf")
            optimizer.step()
        assert bool(flat(net).isfinite().all())
        state = updates.state_dict(own=True)
        memories = [*state["residuals"].values(), *state["shared"].values()]
        memories += [v for entry in state["outer"]["state"].values() for v in entry.values() if isinstance(v, Tensor)]
        assert all(bool(m.isfinite().all()) for m in memories)
        if runs_away:
            found = agree(flat(net)), updates.skipped
        updates.close()
    return True, found[0], found[1]


def scaled(rank: int, size: int) -> tuple[list[int], bool]:
    """A scaler that leaves out steps of one rank: steps counted, and whether the ranks end with the same."""
    net = Net().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    updates = local_updates(
        optimizer,
        Streaming(steps=4, fragments=2, overlap=1),
        model=net,
        outer=diloco(),
        scaler=scaler,
        total_steps=12,
    )
    for step in range(12):
        optimizer.zero_grad()
        scaler.scale(loss_of(net, rank, step)).backward()
        if rank == 0 and step in (1, 7, 8):
            net.out.bias.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
    counted = [updates.step, updates.rounds]
    updates.close()
    assert "step" not in scaler.__dict__
    return counted, agree(flat(net)) and bool(flat(net).isfinite().all())


def sharded(rank: int, size: int) -> tuple[bool, bool, int]:
    """FSDP2 in two nodes with compressed changes, one shard of which runs away: agreement, and rounds left out."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    net = Net(width=20)
    for block in net.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(net, mesh=mesh["shard"])
    start = flat(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    group = mesh["replicate"].get_group()
    updates = local_updates(
        optimizer,
        Streaming(steps=4, fragments=2, overlap=1),
        model=net,
        outer=diloco(),
        compressor=DenseInt4(),
        group=group,
        total_steps=12,
    )
    for step in range(12):
        optimizer.zero_grad()
        loss_of(net, rank // (size // 2), step).backward()
        if rank == 1 and step == 4:
            net.out.weight.grad.to_local().fill_(float("inf"))
        optimizer.step()
    end = flat(net)
    saved = updates.state_dict()
    assert all(isinstance(v, DTensor) for v in saved["shared"].values())
    return agree(end) and bool(end.isfinite().all()), not torch.equal(end, start), updates.skipped


# -- ranks that end early, are lost, and come back ------------------------------------------------------------------

#: Of ranks, more or fewer than rounds have; also none at all.
BATCHES = (11, 5, 0, 8)


def uneven(rank: int, size: int, way: str, compress: bool) -> tuple[bool, float, int]:
    """Ranks with different numbers of batches: whether all end with the same, how far from start plus all changes
    over the number of ranks (gradients do not depend on parameters), and steps counted."""
    rules = {**RULES, "by rate": QSR(alpha=0.25, base=2)}
    net = Net().double()
    start = flat(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    updates = local_updates(
        optimizer, rules[way], model=net, compressor=DenseInt4() if compress else None, uneven=True
    )
    total = torch.zeros_like(start)
    for step in range(BATCHES[rank]):
        for i, p in enumerate(net.parameters()):
            noise = torch.Generator().manual_seed(10_000 * step + 100 * i + rank)
            p.grad = torch.randn(p.shape, generator=noise, dtype=p.dtype)
        total -= RATE * torch.cat([p.grad.reshape(-1) for p in net.parameters()])
        optimizer.step()
    updates.finish()
    updates.finish()  # over: nothing happens
    dist.all_reduce(total)
    owed = torch.zeros_like(start)
    if compress:
        residuals = updates.state_dict()["residuals"]
        owed = torch.cat([residuals.get(n, torch.zeros_like(p)).reshape(-1) for n, p in net.named_parameters()])
    error = (flat(net) - owed - start - total / size).abs().max()
    return agree(flat(net)), float(error), updates.rounds


def lives(rank: int, size: int, way: str, lost: int, dies_at: int, steps: int) -> list[list[dict[str, Any]]]:
    """Local updates while one rank is killed in a round and comes back; what each of its lives has said."""
    folder = Path(os.environ["STORE_FILE"]).parent
    said = [folder / f"said{rank}.{life}" for life in range(1 + (rank == lost))]
    for life in said:
        pid = os.fork()
        if pid == 0:
            _live(rank, size, way, life, dies_at if life is not said[-1] else -1, steps)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code != (0 if life is said[-1] else -signal.SIGKILL):
            raise AssertionError(f"exit code {code}: {life.read_text()}")
    return [[json.loads(line) for line in life.read_text().splitlines() if line.startswith("{")] for life in said]


def _live(rank: int, size: int, way: str, said: Path, dies_at: int, steps: int) -> None:
    code = 1
    try:
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        store = dist.FileStore(os.environ["STORE_FILE"], -1)
        _train_as_member(rank, size, way, store, dies_at, steps)
        sys.stdout.flush()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
    finally:
        os._exit(code)


def _train_as_member(rank: int, size: int, way: str, store: dist.Store, dies_at: int, steps: int) -> None:
    limit = timedelta(seconds=60)
    elastic.start_alone(timeout=limit)

    def choose(candidates: Any) -> Any:  # the job begins when all are there
        begins = all(candidate.note < 0 for candidate in candidates)
        return None if begins and len(candidates) < size else elastic.everyone(candidates)

    roster = elastic.Roster(store, place=rank, expected=None, choose=choose, settle_s=0.5)
    members = elastic.Members(roster, store=store, timeout=limit)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    updates = local_updates(
        optimizer,
        RULES[way],
        model=net,
        outer=diloco(),
        compressor=DenseInt4(),
        members=members,
        total_steps=None,
    )
    print(json.dumps({"from": updates.step, "size": dist.get_world_size()}), flush=True)
    if updates.step:
        store.set("back", str(updates.step))
    end = 4000
    while updates.step < end:
        optimizer.zero_grad()
        loss = loss_of(net, rank, updates.step)
        loss.backward()
        if updates.step == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        before = dist.get_world_size()
        optimizer.step()
        if before != dist.get_world_size():
            print(json.dumps({"step": updates.step, "size": dist.get_world_size()}), flush=True)
        if end == 4000 and store.check(["back"]):
            end = int(store.get("back")) + steps
    updates.finish()
    print(json.dumps({"end": updates.step, "agree": agree(flat(net)), "sum": float(flat(net).sum())}), flush=True)
    dist.destroy_process_group()
