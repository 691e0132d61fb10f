"""What ranks do in ``test_momentum_optimizers.py``."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mycel.data_parallel import DeMo, OneBitAdam
from mycel.data_parallel.compress.aggregation import share_sizes

#: Elements of a bucket of signs.
BUCKET = 1024


class Linear(nn.Module):
    """Two matrices whose gradients are what the inputs say: ``(a * A).sum() + (b * B).sum()``."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(40, 70, dtype=torch.float64))
        self.b = nn.Parameter(torch.zeros(9, 7, dtype=torch.float64))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (self.a * a).sum() + (self.b * b).sum()


def gradient(step: int, rank: int) -> list[Tensor]:
    """Of each parameter: a part that all ranks have, and a part of this rank's own."""
    found = []
    for who in (99, rank):
        generator = torch.Generator().manual_seed(1000 * step + who)
        found.append([torch.randn(s, generator=generator, dtype=torch.float64) for s in ((40, 70), (9, 7))])
    return [a + b for a, b in zip(*found, strict=True)]


def _train(make: Any, rank: int, steps: int, resume_at: int | None = None, *, shared: bool = False) -> Any:
    def start() -> Any:
        optimizer = make(model.parameters())
        return optimizer, optimizer.attach(model)

    model = DistributedDataParallel(Linear(), bucket_cap_mb=0.001)
    optimizer, handle = start()
    for step in range(steps):
        if step == resume_at:
            if shared:
                optimizer.synchronize()
            state = copy.deepcopy(optimizer.state_dict())
            if shared:
                said = [state]
                dist.broadcast_object_list(said, 0)
                state = said[0]
            handle.close()
            optimizer, handle = start()
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        model(*gradient(step, rank)).backward()
        optimizer.step()
    return model, optimizer, handle


def demo(parameters: Any) -> DeMo:
    """As the oracle below has it."""
    return DeMo(parameters, lr=0.1, momentum=0.9, chunk=16, top_k=5, weight_decay=0.01)


def one_bit(parameters: Any) -> OneBitAdam:
    """As the oracle below has it."""
    return OneBitAdam(parameters, lr=0.1, warm_up=2, betas=(0.8, 0.9), weight_decay=0.01)


MAKERS: dict[str, Any] = {"demo": demo, "one bit": one_bit}


def _demo_alone(size: int, steps: int) -> list[Tensor]:
    """All ranks' momenta in one place. What each tells is what a rank without others moves by, signs aside."""
    xs = [torch.zeros(40, 70, dtype=torch.float64), torch.zeros(9, 7, dtype=torch.float64)]
    momenta = [[torch.zeros_like(x) for x in xs] for _ in range(size)]
    for step in range(steps):
        told = [torch.zeros_like(x) for x in xs]
        for rank in range(size):
            for i, g in enumerate(gradient(step, rank)):
                before = 0.9 * momenta[rank][i] + g
                lone = nn.Parameter(torch.zeros_like(before))
                teller = DeMo([lone], momentum=0.0, chunk=16, top_k=5)
                lone.grad = before.clone()
                teller.step()
                momenta[rank][i] = teller.state[lone]["momentum"]
                told[i] += before - momenta[rank][i]
        for x, t in zip(xs, told, strict=True):
            x.mul_(1 - 0.1 * 0.01).sub_(0.1 * t.sign())
    return xs


def _signs(values: Tensor) -> Tensor:
    return torch.cat([(part >= 0).double().mul(2).sub(1) * part.abs().mean() for part in values.split(BUCKET)])


def _one_bit_alone(size: int, steps: int) -> list[Tensor]:
    """Workers and servers of the paper, each with a memory; a server's own part of a worker's vector stays exact."""
    numels = [40 * 70, 9 * 7]
    n = sum(numels)
    shares = list(torch.arange(n).split(share_sizes(n, size)))
    x, m, v = (torch.zeros(n, dtype=torch.float64) for _ in range(3))
    worker = torch.zeros(size, n, dtype=torch.float64)
    server = torch.zeros(n, dtype=torch.float64)
    for step in range(1, steps + 1):
        gs = torch.stack([torch.cat([g.view(-1) for g in gradient(step - 1, rank)]) for rank in range(size)])
        if step <= 2:
            m, v = 0.8 * m + 0.2 * gs.mean(0), 0.9 * v + 0.1 * gs.mean(0) ** 2
            second = v / (1 - 0.9**step)
        else:
            wanted = 0.8 * m + 0.2 * gs + worker
            sent = wanted.clone()
            for rank in range(size):
                for owner, share in enumerate(shares):
                    if owner != rank:
                        sent[rank, share] = _signs(wanted[rank, share])
            worker = wanted - sent
            total = sent.mean(0) + server
            m = torch.cat([_signs(total[share]) for share in shares])
            server = total - m
        x = x * (1 - 0.1 * 0.01) - 0.1 * m / (1 - 0.8**step) / (second.sqrt() + 1e-8)
    return [part.view(s) for part, s in zip(x.split(numels), ((40, 70), (9, 7)), strict=True)]


def equals_oracle(rank: int, size: int, kind: str) -> tuple[float, bool]:
    """The largest difference, and whether ranks have the same bits."""
    model, _, _ = _train(MAKERS[kind], rank, 7)
    alone = {"demo": _demo_alone, "one bit": _one_bit_alone}[kind](size, 7)
    found = [p.detach() for p in model.parameters()]
    difference = max(float((a - b).abs().max()) for a, b in zip(found, alone, strict=True))
    return difference, _alike(found)


def _alike(tensors: list[Tensor]) -> bool:
    mine = torch.cat([t.reshape(-1) for t in tensors])
    first = mine.clone()
    dist.broadcast(first, 0)
    return torch.equal(mine, first)


def sends(rank: int, size: int, kind: str) -> tuple[float, float]:
    """Bytes of the first step and of the fifth."""
    model, optimizer, _ = _train(MAKERS[kind], rank, 1)
    first = optimizer.stats.sent_bytes
    for step in range(1, 5):
        optimizer.stats.reset()
        optimizer.zero_grad()
        model(*gradient(step, rank)).backward()
        optimizer.step()
    return first, optimizer.stats.sent_bytes


def overflow_is_everybodys(rank: int, size: int, kind: str) -> list[bool]:
    """One rank's gradient overflows in the last of four steps: all scalers skip it and nothing has changed."""
    model, optimizer, _ = _train(MAKERS[kind], rank, 3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    fine = []
    for factor in (torch.inf if rank == size - 1 else 1.0, 1.0):
        kept = [s.clone() for s in _kept(model, optimizer)]
        optimizer.zero_grad()
        scaler.scale(model(*(factor * g for g in gradient(3, rank)))).backward()
        scaler.step(optimizer)
        scaler.update()
        fine.append(all(torch.equal(a, b) for a, b in zip(kept, _kept(model, optimizer), strict=True)))
    alike = _alike([p.detach() for p in model.parameters()])
    return [fine[0], not fine[1], scaler.get_scale() == 2.0, alike]


def _kept(model: Any, optimizer: Any) -> list[Tensor]:
    return [p.detach() for p in model.parameters()] + [v for s in optimizer.state.values() for v in s.values()]


def resumes(rank: int, size: int, kind: str) -> tuple[bool, bool]:
    """Own state goes on bit for bit; the mean, taken from rank 0, keeps ranks alike."""
    whole, _, _ = _train(MAKERS[kind], rank, 6)
    own, _, _ = _train(MAKERS[kind], rank, 6, resume_at=4)
    mean, _, _ = _train(MAKERS[kind], rank, 6, resume_at=4, shared=True)
    same = all(torch.equal(a, b) for a, b in zip(whole.parameters(), own.parameters(), strict=True))
    return same, _alike([p.detach() for p in mean.parameters()])
