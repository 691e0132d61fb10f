"""What every rank runs for ``test_training.py``: torch's own distributed features, unchanged, on a small model.

Each function returns losses (or other numbers) that the test compares between backends.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from mycel.runtime import tensor_group

STEPS = 4
WIDTH = 24


class Model(nn.Module):
    """A few layers; ``spare`` takes part in every second step only."""

    def __init__(self, *, with_spare: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.spare = nn.Linear(WIDTH, WIDTH) if with_spare else None
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, *, use_spare: bool = False) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        if use_spare and self.spare is not None:
            x = x + self.spare(x)
        return self.head(x)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, WIDTH, generator=generator)
    return x, x[:, :1] * 2 + x[:, 1:2]


def train(
    model: nn.Module,
    rank: int,
    *,
    forward: Callable[[Tensor, int], Tensor] | None = None,
    sync: Callable[[int], Any] | None = None,
) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        predicted = model(x) if forward is None else forward(x, step)
        loss = nn.functional.mse_loss(predicted.float(), y)
        if sync is None:
            loss.backward()
        else:
            with sync(step):
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def ddp(rank: int, size: int) -> dict[str, list[float]]:
    """Distributed data parallel in the forms people use; buckets so small that there are several."""
    out = {}
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "many_buckets": {"bucket_cap_mb": 0.002},
        "bucket_view": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.002},
        "static_graph": {"static_graph": True, "bucket_cap_mb": 0.002},
        "unused": {"find_unused_parameters": True},
    }
    for name, chosen in options.items():
        torch.manual_seed(rank)  # different on every rank: DDP broadcasts rank 0's
        model = DistributedDataParallel(Model(with_spare=name == "unused"), **chosen)
        if name == "unused":
            out[name] = train(model, rank, forward=lambda x, step, m=model: m(x, use_spare=step % 2 == 0))
        else:
            out[name] = train(model, rank)
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    out["no_sync"] = []
    for step in range(STEPS):
        with model.no_sync():
            x, y = batch(rank, 2 * step)
            nn.functional.mse_loss(model(x), y).backward()
        x, y = batch(rank, 2 * step + 1)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out["no_sync"].append(loss.item())
    return out


def _fully_sharded(**options: Any) -> Model:
    torch.manual_seed(0)
    model = Model()
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def fsdp(rank: int, size: int) -> dict[str, list[float]]:
    """FSDP2: sharded parameters, sharded with mixed precision, and sharded inside nodes and replicated between."""
    out = {"plain": train(_fully_sharded(), rank)}
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    out["bfloat16"] = train(_fully_sharded(mp_policy=half), rank)
    out["kept"] = train(_fully_sharded(reshard_after_forward=False), rank)
    if size % 2 == 0 and size > 2:
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
        out["hybrid"] = train(_fully_sharded(mesh=mesh), rank)
    return out


def groups(rank: int, size: int) -> dict[str, list[float]]:
    """Sub-groups in use at the same time, of a mesh and of new_group, with other ranks doing other things."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("row", "column"))
    row, column = mesh.get_group("row"), mesh.get_group("column")
    one, other = torch.full((1000,), float(rank)), torch.full((3000,), float(rank))
    works = [dist.all_reduce(one, group=row, async_op=True), dist.all_reduce(other, group=column, async_op=True)]
    whole = torch.full((10,), float(rank))
    dist.all_reduce(whole)
    for work in reversed(works):
        work.wait()
    half = size // 2
    assert (one == rank % half * 2 + half).all()
    assert (other == sum(range(rank // half * half, rank // half * half + half))).all()
    assert (whole == size * (size - 1) / 2).all()

    odd_ones_out = [dist.new_group([r for r in range(size) if r != left_out]) for left_out in range(size)]
    for left_out, group in enumerate(odd_ones_out):
        if left_out != rank:
            mine = torch.full((5,), float(rank))
            dist.all_reduce(mine, group=group)
            assert (mine == size * (size - 1) / 2 - left_out).all()
            told = torch.full((2,), float(rank))
            dist.broadcast(told, src=(left_out + 1) % size, group=group)
            assert (told == (left_out + 1) % size).all()
    backwards = dist.new_group(list(range(size))[::-1])
    gathered = torch.zeros(size)
    dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)]), group=backwards)
    by_group_rank = [float(dist.get_global_rank(backwards, r)) for r in range(size)]
    assert gathered.tolist() == by_group_rank
    alone = dist.new_group([0])
    if rank == 0:
        single = torch.ones(3)
        dist.all_reduce(single, group=alone)
        assert (single == 1).all()
    return {"groups": [one[0].item() + other[0].item()]}


def tensors(rank: int, size: int) -> dict[str, list[float]]:
    """Functional collectives and DTensor's changes of layout."""
    x = torch.arange(12.0) + rank
    summed = funcol.all_reduce(x, "sum", dist.group.WORLD)
    assert torch.equal(summed, torch.arange(12.0) * size + size * (size - 1) / 2)
    gathered = funcol.all_gather_tensor(x, 0, dist.group.WORLD)
    assert torch.equal(gathered, torch.cat([torch.arange(12.0) + r for r in range(size)]))
    scattered = funcol.reduce_scatter_tensor(torch.ones(size * 3) * (rank + 1), "avg", 0, dist.group.WORLD)
    assert torch.allclose(scattered, torch.full((3,), (size + 1) / 2))
    pair = funcol.all_reduce_coalesced([torch.ones(2), torch.ones(3)], "sum", dist.group.WORLD)
    assert all((t == size).all() for t in pair)

    mesh = init_device_mesh("cpu", (size,))
    full = torch.arange(float(size * 2 * 6)).view(size * 2, 6)
    sharded = distribute_tensor(full, mesh, [Shard(0)])
    assert torch.equal(sharded.redistribute(mesh, [Replicate()]).to_local(), full)
    partial = DTensor.from_local(full.clone(), mesh, [Partial()])
    assert torch.equal(partial.redistribute(mesh, [Replicate()]).to_local(), full * size)
    assert torch.equal(partial.redistribute(mesh, [Shard(0)]).to_local(), full[rank * 2 : rank * 2 + 2] * size)
    uneven = distribute_tensor(torch.arange(float(size * 2 + 1)), mesh, [Shard(0)])
    assert torch.equal(uneven.full_tensor(), torch.arange(float(size * 2 + 1)))
    product: Any = distribute_tensor(torch.eye(size * 2), mesh, [Shard(1)]) @ sharded
    return {"sum": [product.full_tensor().sum().item()]}


def twice(rank: int, size: int, backend: str) -> list[float]:
    """Destroy the process group and make another in the same process; sizes and roots as the first had."""
    seen = []
    for number in range(2):
        store = dist.FileStore(f"{os.environ['STORE_FILE']}-{number}", size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        tensor = torch.full((1000,), float(rank + number))
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        dist.barrier()
        seen.append(tensor[0].item())
        dist.destroy_process_group()
    return seen


def fails(rank: int, size: int) -> list[str]:
    """The error with which the process group refuses to start."""
    store = dist.FileStore(os.environ["STORE_FILE"], size)
    try:
        dist.init_process_group("mycel", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


def fabric(rank: int, size: int) -> list[str]:
    """Which topology the group believes to run on, and whether it works."""
    tensor = torch.ones(100)
    dist.all_reduce(tensor)
    assert (tensor == size).all()
    group: Any = dist.group.WORLD
    communicator = tensor_group(group).communicator
    return [communicator.topology.name, communicator.topology.fingerprint] if communicator else ["none"]


def single(rank: int, size: int) -> list[float]:
    """A world of one rank."""
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    out = [torch.zeros(3)]
    dist.all_gather(out, tensor)
    kept = torch.zeros(3)
    dist.reduce_scatter_tensor(kept, tensor)
    dist.broadcast(tensor, 0)
    dist.barrier()
    assert torch.equal(out[0], kept)
    torch.manual_seed(0)
    return train(DistributedDataParallel(Model()), rank)
