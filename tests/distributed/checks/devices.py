"""What every rank runs for ``test_devices.py``: collectives in groups of point-to-point operations, step by step.

Gloo carries the bytes and the tensors are on the CPU, where a lane has nothing to order; all else is as on GPUs.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mycel.runtime.device.group import DeviceGroup
from mycel.runtime.device.lane import CudaLane
from mycel.runtime.device.transport import BackendTransport
from mycel.runtime.tensor_group import TensorGroup, tensor_group


def checks_of(name: str) -> ModuleType:
    """The checks of the other side, which hold here too."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def collectives() -> ModuleType:
    """Those of collectives, with shorter arrays."""
    module = checks_of("collectives")
    module.SIZES = (*module.SIZES[:-1], 20001)  # type: ignore[attr-defined]  # pieces are the unit tests' matter
    return module


def as_on_devices(group: Any) -> list[str]:
    """From now on every tensor counts as one on a device; the names of the collectives that run there."""
    assert isinstance(group, TensorGroup)
    ran: list[str] = []

    class Watched(DeviceGroup):
        def start(self, call: Any, *rest: Any) -> Any:
            ran.append(call.title or call.name)
            return super().start(call, *rest)

    group._devices = Watched(group._fallback.gloo, group.communicator, described=True, least_bytes=0)
    group._on_host = lambda tensors: False  # type: ignore[method-assign]
    return ran


def everything(rank: int, size: int) -> dict[str, Any]:
    """All checks of the engine for sockets, in one process group; what each returned, and what ran, by name."""
    ran = as_on_devices(tensor_group())
    checks = collectives()
    # Where ranks send their parts themselves, parts of different lengths are the backend's; Gloo has no such form,
    # and before torch 2.12 no lists at all.
    direct = tensor_group().communicator.exchanges_directly  # type: ignore[union-attr]
    missing = [checks.uneven] if torch.__version__ >= (2, 12) else [checks.uneven, checks.all_to_all_of_lists]
    chosen = [check for check in checks.CHECKS if not (direct and check in missing)]
    results = {check.__name__: check(rank, size) for check in chosen}
    return results | {"ran": sorted(set(ran))}


def reductions(rank: int, size: int) -> list[str]:
    """Digests of sums and averages of every kind of float."""
    checks = collectives()
    digests = []
    for n in (1, 1000, 30001):
        for dtype in checks.FLOATS:
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                mine = checks.given(rank, n * size, dtype)
                everywhere, shard, at_root = mine[:n].clone(), torch.zeros(n, dtype=dtype), mine[:n].clone()
                dist.all_reduce(everywhere, op)
                dist.reduce_scatter_tensor(shard, mine, op)
                dist.reduce(at_root, size - 1, op)
                digests.append(checks.digest(everywhere, shard, at_root))
    return digests


def same_bits(rank: int, size: int) -> list[str]:
    """By the same schedule both engines add in the same order, whatever the pieces; the methods compared."""
    group: Any = tensor_group()
    planner = group.communicator.planner
    every = planner.schedules
    methods = [m for m in every("all_reduce") if m in every("reduce_scatter") and m in every("reduce", size - 1)]
    for method in methods:
        planner.schedules = lambda name, root=None, method=method: {method: every(name, root)[method]}
        planner._choices.clear()
        expected = reductions(rank, size)
        as_on_devices(group)
        group._devices.planner.schedules = planner.schedules  # no classics
        assert reductions(rank, size) == expected, method
        group._devices = None
        del group._on_host
    planner.schedules = every
    return methods


def of_which_group(rank: int, size: int) -> str:
    """The name of the world's process group, after a sum and a barrier, also in a group of its own."""
    for group in (None, dist.new_group()):
        tensor = torch.full((5,), rank + 1.0)
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [size * (size + 1) / 2] * 5
        dist.barrier(group)
    world: Any = dist.group.WORLD
    return str(world._get_backend(torch.device("cpu")).name())


def training(rank: int, size: int) -> dict[str, Any]:
    """Losses of DDP in all its forms, and of FSDP2: futures, hooks, coalesced and asynchronous calls."""
    ran = as_on_devices(tensor_group())
    losses = training_over_gloo(rank, size)
    assert {"all_reduce", "broadcast", "all_gather", "reduce_scatter"} <= set(ran)
    return losses


def training_over_gloo(rank: int, size: int) -> dict[str, Any]:
    """The same without us."""
    checks = checks_of("training")
    return {f"{kind}, {k}": v for kind in ("ddp", "fsdp") for k, v in getattr(checks, kind)(rank, size).items()}


def one_on_a_gpu(rank: int, size: int) -> None:
    """A group of one rank: NCCL's own collectives, and an exchange with itself on a lane."""
    device = torch.device("cuda", 0)
    group: Any = tensor_group()
    tensor = torch.arange(5.0, device=device)
    for work in (dist.all_reduce(tensor, async_op=True), dist.broadcast(tensor, 0, async_op=True)):
        work.wait()
    gathered, shard = torch.zeros(5, device=device), torch.zeros(5, device=device)
    dist.all_gather_into_tensor(gathered, tensor)
    dist.reduce_scatter_tensor(shard, gathered)
    came = torch.zeros(5, device=device)
    dist.all_to_all_single(came, shard, [5], [5])
    assert came.tolist() == list(range(5))
    on_host = torch.ones(3)
    dist.all_reduce(on_host)
    assert on_host.tolist() == [1.0] * 3
    told: list[Any] = [{"from": rank}]
    dist.broadcast_object_list(told, 0)
    dist.barrier()

    transport, lane = BackendTransport(group._devices.backend), CudaLane(device)
    source, target = (torch.zeros(1 << 22, dtype=torch.uint8, device=device) for _ in range(2))
    for value in (3, 4):
        source.fill_(value)
        with lane.enter([source, target]):
            transport.exchange([(source[:1000], 0), (source[1000:], 0)], [(target[:1000], 0), (target[1000:], 0)])
            target.add_(1)
            end = lane.mark()
        lane.join(end)
        assert (target == value + 1).all()

    model = DistributedDataParallel(torch.nn.Linear(8, 8).to(device), device_ids=[0])
    model(torch.ones(2, 8, device=device)).sum().backward()
    assert model.module.weight.grad is not None
