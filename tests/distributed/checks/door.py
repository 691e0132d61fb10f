"""What every rank runs for ``test_door.py``: calls that somebody looks at, and tensors that are more than memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode


class Seen(TorchDispatchMode):
    """Notes the collectives that torch's dispatcher is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def calls(rank: int, size: int) -> dict[str, Any]:
    """One of each collective; what came of it by name, the same over any backend."""
    mine = torch.arange(4.0) + rank
    results: dict[str, Any] = {}

    def note(name: str, *tensors: Tensor) -> None:
        results[name] = [tensor.tolist() for tensor in tensors]

    summed = mine.clone()
    dist.all_reduce(summed)
    note("all_reduce", summed)
    largest = mine.clone()
    work = dist.all_reduce(largest, dist.ReduceOp.MAX, async_op=True)
    assert work.wait()  # a work of a Python backend does not say that it is completed, in torch 2.15
    note("all_reduce, asynchronous", largest)
    told = mine.clone()
    dist.broadcast(told, size - 1)
    note("broadcast", told)
    at_root = mine.clone()
    dist.reduce(at_root, 0)
    note("reduce", *([at_root] if rank == 0 else []))
    whole = torch.zeros(4 * size)
    dist.all_gather_into_tensor(whole, mine)
    note("all_gather_into_tensor", whole)
    parts = [torch.zeros(4) for _ in range(size)]
    dist.all_gather(parts, mine)
    note("all_gather", *parts)
    shard = torch.zeros(4)
    dist.reduce_scatter_tensor(shard, whole)
    note("reduce_scatter_tensor", shard)
    dist.reduce_scatter(shard, [part + rank for part in parts])
    note("reduce_scatter", shard)
    exchanged = torch.zeros(2 * size)
    dist.all_to_all_single(exchanged, torch.arange(2.0 * size) + 10 * rank)
    note("all_to_all_single", exchanged)
    dist.gather(mine, parts if rank == 0 else None, dst=0)
    note("gather", *(parts if rank == 0 else []))
    dist.scatter(shard, [mine + i for i in range(size)] if rank == 0 else None, src=0)
    note("scatter", shard)
    dist.barrier()
    note("functional", funcol.all_reduce(mine, "sum", dist.group.WORLD) + 0)
    return results


def counted(rank: int, size: int) -> dict[str, Any]:
    """The calls without anybody looking, and in torch's debug mode, with what it counts."""
    results = calls(rank, size)
    with CommDebugMode() as mode:
        assert calls(rank, size) == results
    return {"results": results, "counts": {str(key): n for key, n in mode.get_comm_counts().items()}}


def one_looks(rank: int, size: int) -> dict[str, Any]:
    """Rank 0 looks, the others do not, and all are in the same collectives."""
    results = calls(rank, size)
    seen = Seen()
    if rank == 0:
        with seen:
            assert calls(rank, size) == results
    else:
        assert calls(rank, size) == results
    return {"results": results, "seen": seen.names}


def profiled(rank: int, size: int) -> list[str]:
    """Names of collectives in a profile."""
    with profile(activities=[ProfilerActivity.CPU]) as taken:
        dist.all_reduce(torch.ones(3))
        dist.all_gather_into_tensor(torch.zeros(3 * size), torch.ones(3))
    return sorted({e.key for e in taken.key_averages() if e.key.startswith(("c10d::", "mycel:"))})


def traced(rank: int, size: int) -> dict[str, Any]:
    """Names of collectives in graphs of a function, and what the graphs give when they are run again, twice."""

    def function(x: Tensor) -> Tensor:
        y = x * 2
        dist.all_reduce(y, dist.ReduceOp.MAX)
        z = torch.empty(3 * size)
        dist.all_gather_into_tensor(z, y)
        return z + 1

    found: dict[str, Any] = {}
    for mode in ("real", "fake"):
        graph = make_fx(function, tracing_mode=mode)(torch.ones(3))
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        found[mode] = {
            "names": [name for name in names if "c10d" in name],
            "again": [graph(torch.full((3,), rank + value)).tolist() for value in (1.0, 5.0)],
        }
    return found


def wrapped(rank: int, size: int) -> dict[str, Any]:
    """Collectives of tensors that are made of two."""

    def two(value: float) -> Any:
        return TwoTensor(torch.full((3,), value), torch.full((3,), 10 * value))

    def inside(tensor: Any) -> list[list[float]]:
        return [tensor.a.tolist(), tensor.b.tolist()]

    results = {}
    summed = two(rank + 1.0)
    dist.all_reduce(summed)
    results["all_reduce"] = inside(summed)
    told = two(float(rank))
    dist.broadcast(told, 1)
    results["broadcast"] = inside(told)
    taken = two(0.0)
    dist.scatter(taken, [two(float(i)) for i in range(size)] if rank == 0 else None, src=0)
    results["scatter"] = inside(taken)
    waiting = two(rank + 1.0)
    dist.all_reduce(waiting, async_op=True).wait()
    results["asynchronous"] = inside(waiting)
    return results


def without_memory(rank: int, size: int) -> dict[str, Any]:
    """Fake and meta tensors, after which the group works as before."""
    with FakeTensorMode():
        fake = torch.ones(3)
        dist.all_reduce(fake)
        gathered = torch.zeros(3 * size)
        dist.all_gather_into_tensor(gathered, fake)
        dist.broadcast(fake, 0)
    meta = torch.ones(3, device="meta")
    dist.all_reduce(meta)
    real = torch.ones(3)
    dist.all_reduce(real)
    return {"fake": [type(fake).__name__, list(gathered.shape)], "meta": str(meta.device), "real": real.tolist()}


def sharded(rank: int, size: int) -> dict[str, Any]:
    """FSDP2 of fake tensors, then FSDP2 and DDP of real ones in the debug mode."""
    mesh = init_device_mesh("cpu", (size,))
    with FakeTensorMode():
        model = torch.nn.Linear(8, 8)
        fully_shard(model, mesh=mesh)
        model(torch.randn(2, 8)).sum().backward()
    torch.manual_seed(0)
    counts = {}
    models: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
        "fsdp2": lambda module: fully_shard(module, mesh=mesh),  # type: ignore[dict-item,return-value]
        "ddp": DistributedDataParallel,
    }
    for name, attach in models.items():
        attached = attach(torch.nn.Linear(8, 8))
        with CommDebugMode() as mode:
            attached(torch.ones(2, 8)).sum().backward()
        counts[name] = {str(key): n for key, n in mode.get_comm_counts().items()}
    return counts


def unscheduled(rank: int, size: int) -> list[bool]:
    """Whether there was a Gloo group after all that is scheduled, and after a call that is not."""
    from mycel.runtime import tensor_group

    fallback = tensor_group()._fallback
    calls(rank, size)
    before = fallback._gloo is not None
    sparse = torch.eye(3).to_sparse()
    dist.all_reduce(sparse)
    assert torch.equal(sparse.to_dense(), size * torch.eye(3))
    return [before, fallback._gloo is not None]


def new_groups(rank: int, size: int) -> int:
    """Groups over one fabric run the same schedules, which are made once."""
    from mycel.runtime import tensor_group

    groups = [dist.new_group() for _ in range(4)]
    for number, group in enumerate(groups):
        tensor = torch.full((10,), float(number))
        dist.all_reduce(tensor, group=group)
        assert tensor.eq(number * size).all()
    made = [tensor_group(g).communicator.planner.schedules("all_reduce") for g in groups]  # type: ignore[union-attr]
    for group in groups:
        dist.destroy_process_group(group)
    return len({id(schedule) for of_group in made for schedule in of_group.values()}) - len(made[0])


def under_torchs_checks(rank: int, size: int) -> list[list[float]]:
    """Sums over groups made while torch checks every call (TORCH_DISTRIBUTED_DEBUG=DETAIL)."""
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    sums = []
    try:
        for _ in range(2):
            group = dist.new_group()
            gc.collect()
            tensor = torch.full((2,), rank + 1.0)
            dist.all_reduce(tensor, group=group)
            sums.append(tensor.tolist())
            dist.destroy_process_group(group)
    finally:
        dist.set_debug_level(before)
    return sums
