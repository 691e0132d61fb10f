"""What every rank runs for ``test_combine.py``. References are written here from the formulas, on whole vectors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mycel.comm.bundle import Packed
from mycel.data_parallel.combine import Adasum, Combiner, Mean, ModelCombiner, Sum, combine_gradients, combine_rows

#: A matrix, a vector, nothing, a scalar, a vector that a cut goes through.
SHAPES = [(5, 3), (7,), (0,), (), (11,), (2, 2, 2)]
KINDS: dict[str, Any] = {"adasum": Adasum, "model": ModelCombiner, "mean": Mean, "sum": Sum}


def contribution(rank: int, dtype: torch.dtype, case: str = "random") -> list[Tensor]:
    """What a rank brings: random numbers, the same for all, one layer each, or nothing at some ranks."""
    generator = torch.Generator().manual_seed(0 if case == "equal" else 17 + rank)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    if case == "orthogonal":
        made = [t if index % 3 == rank % 3 else torch.zeros_like(t) for index, t in enumerate(made)]
    if case == "zeros" and rank % 2 == 0:
        made = [torch.zeros_like(t) for t in made]
    return [t.to(dtype) for t in made]


def pair(a: Tensor, b: Tensor) -> Tensor:
    """Adasum of two vectors."""
    dot, aa, bb = float((a * b).sum()), float((a * a).sum()), float((b * b).sum())
    return (1 - dot / (2 * aa) if aa else 1.0) * a + (1 - dot / (2 * bb) if bb else 1.0) * b


def adasum(vectors: list[Tensor]) -> Tensor:
    """The formula over any number of vectors: those beyond a power of two into the first, then pairs of pairs."""
    power = 1
    while 2 * power <= len(vectors):
        power *= 2
    level = [pair(v, vectors[power + i]) if power + i < len(vectors) else v for i, v in enumerate(vectors[:power])]
    while len(level) > 1:
        level = [pair(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    return level[0]


def model(vectors: list[Tensor]) -> Tensor:
    """The fold, row by row."""
    if vectors[0].dim() > 1:
        return (
            torch.stack([model(list(rows)) for rows in zip(*vectors, strict=True)]) if len(vectors[0]) else vectors[0]
        )
    total = vectors[0]
    for further in vectors[1:]:
        square = float((total * total).sum())
        total = total + further - (float((total * further).sum()) / square * total if square else 0.0)
    return total


def reference(kind: str, vectors: list[Tensor]) -> Tensor:
    if kind == "adasum":
        return adasum(vectors)
    if kind == "model":
        flat = vectors[0].dim() > 2
        rows = (
            model([v.flatten(1) for v in vectors])
            if flat
            else model([v.reshape(-1) if v.dim() == 0 else v for v in vectors])
        )
        return rows.view(vectors[0].shape)
    total = torch.stack(vectors).sum(0)
    return total / len(vectors) if kind == "mean" else total


def errors(rank: int, size: int, dtype_name: str) -> dict[str, float]:
    """Largest difference from the reference in float64, relative to the largest number, by combiner and case."""
    return {f"{kind}, {case}": e for kind in KINDS for case, e in errors_of(rank, size, kind, dtype_name).items()}


def errors_of(rank: int, size: int, kind: str, dtype_name: str) -> dict[str, float]:
    dtype = getattr(torch, dtype_name)
    out = {}
    for case in ("random", "equal", "orthogonal", "zeros"):
        mine = contribution(rank, dtype, case)
        packed = Packed(mine)
        packed.copy_from(mine)
        combiner: Combiner = KINDS[kind]()
        under_way = [combiner.start(bundle, dist.group.WORLD) for bundle in packed.bundles]
        for combined in under_way:
            combined.wait()
        packed.copy_to(mine)
        everyone = [[t.double() for t in contribution(r, dtype, case)] for r in range(size)]
        worst = 0.0
        for index, got in enumerate(mine):
            want = reference(kind, [layers[index] for layers in everyone])
            if want.numel():
                worst = max(worst, float((got.double() - want).abs().max()) / max(1.0, float(want.abs().max())))
        out[case] = worst
        same = packed.bundles[0].flat.clone()
        dist.broadcast(same, 0)
        out[f"{case}, other bits than rank 0"] = float((same != packed.bundles[0].flat).sum())
    return out


def rows(rank: int, size: int) -> list[tuple[float, int]]:
    """Combined rows against whole tables, and how many rows came out, for each combiner."""
    return [rows_by(rank, size, combiner) for combiner in ("model", "sum", "mean")]


def rows_by(rank: int, size: int, combiner: str) -> tuple[float, int]:
    generator = torch.Generator().manual_seed(rank)
    touched = torch.randperm(20, generator=generator)[: 3 + 4 * rank]
    changes = torch.randn(len(touched), 6, generator=generator, dtype=torch.float64)
    tables = []
    for other in range(size):
        generator = torch.Generator().manual_seed(other)
        which = torch.randperm(20, generator=generator)[: 3 + 4 * other]
        table = torch.zeros(20, 6, dtype=torch.float64)
        table[which] = torch.randn(len(which), 6, generator=generator, dtype=torch.float64)
        tables.append(table)
    assert dist.group.WORLD is not None
    numbers, combined = combine_rows(touched, changes, dist.group.WORLD, combiner=combiner)
    got = torch.zeros(20, 6, dtype=torch.float64)
    got[numbers] = combined
    return float((got - reference(combiner, tables)).abs().max()), len(numbers)


def no_rows(rank: int, size: int) -> int:
    """A rank without rows, and then no rank with any."""
    assert dist.group.WORLD is not None
    some = torch.arange(3) if rank == 0 else torch.arange(0)
    numbers, _ = combine_rows(some, torch.ones(len(some), 2), dist.group.WORLD)
    none, _ = combine_rows(torch.arange(0), torch.ones(0, 2), dist.group.WORLD)
    return len(numbers) + len(none)


def ddp(rank: int, size: int, kind: str) -> float:
    """Gradients of a DDP model with many buckets and an unused layer, against the reference in float64."""
    torch.manual_seed(3)
    layers = nn.ModuleDict(
        {"a": nn.Linear(40, 30), "b": nn.Linear(30, 20), "unused": nn.Linear(3, 3), "c": nn.Linear(20, 1)}
    )

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor) -> Tensor:
            return self.layers["c"](torch.tanh(self.layers["b"](torch.tanh(self.layers["a"](x)))))

    net = Net()
    wrapped = DistributedDataParallel(net, bucket_cap_mb=0.001, find_unused_parameters=True)
    combine_gradients(wrapped, KINDS[kind]())
    worst = 0.0
    for step in range(3):
        inputs = [torch.randn(8, 40, generator=torch.Generator().manual_seed(100 * step + r)) for r in range(size)]
        alone = []
        for x in inputs:
            net.zero_grad()
            net(x).square().mean().backward()
            alone.append({n: p.grad.double().clone() for n, p in net.named_parameters() if p.grad is not None})
        net.zero_grad()
        wrapped(inputs[rank]).square().mean().backward()
        for name, parameter in net.named_parameters():
            if name in alone[0]:
                assert parameter.grad is not None
                want = reference(kind, [g[name] for g in alone])
                worst = max(worst, float((parameter.grad.double() - want).abs().max() / want.abs().max()))
    return worst
