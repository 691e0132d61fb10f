"""What every rank runs for ``test_completeness.py``: what torch lets a program do with a process group.

Each function checks its own results, and returns what ranks or backends can be compared by.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
import torch.distributed.nn.functional as with_gradients
from tests.settled import settled
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from mycel.runtime.backend import is_called_by_torch


def objects(rank: int, size: int) -> None:
    """Every object collective, from every root; objects of different lengths, large ones too."""
    mine = {"rank": rank, "text": "x" * (rank * 5000)}
    everyone = [{"rank": r, "text": "x" * (r * 5000)} for r in range(size)]
    came: list[Any] = [None] * size
    dist.all_gather_object(came, mine)
    assert came == everyone
    for root in range(size):
        gathered: list[Any] | None = [None] * size if rank == root else None
        dist.gather_object(mine, gathered, dst=root)
        assert gathered == (everyone if rank == root else None)
        told = [everyone[root], root] if rank == root else [None, None]
        dist.broadcast_object_list(told, src=root)
        assert told == [everyone[root], root]
        given: list[Any] = [None]
        dist.scatter_object_list(given, everyone if rank == root else None, src=root)
        assert given == [mine]
    if rank == 0:
        dist.send_object_list([everyone, None], dst=size - 1)
    if rank == size - 1:
        heard: list[Any] = [None, 1]
        assert dist.recv_object_list(heard, src=0) == 0
        assert heard == [everyone, None]


def _forms(rows: int, width: int) -> Iterator[Callable[[Tensor], Tensor]]:
    """Ways to lay a matrix out in memory; each gives a tensor of the same values."""
    yield Tensor.clone
    yield lambda t: t.t().clone(memory_format=torch.contiguous_format).t()
    yield lambda t: torch.full((rows * 2, width * 3), -1.0)[::2, ::3].copy_(t)
    yield lambda t: torch.full((rows * width + 7,), -1.0)[7:].view(rows, width).copy_(t)


def layouts(rank: int, size: int) -> None:
    """Every collective on every layout of its inputs and outputs, empty ones among them."""
    for rows, width in ((3, 4), (0, 4), (3, 0), (1, 1)):
        parts = [torch.arange(float(rows * width)).view(rows, width) + 100 * r for r in range(size)]
        total = torch.stack(parts).sum(0)
        stacked = torch.cat(parts)
        for form in _forms(rows, width):
            mine = form(parts[rank])
            dist.all_reduce(mine)
            assert torch.equal(mine, total)
            for root in range(size):
                mine = form(parts[rank])
                dist.broadcast(mine, root)
                assert torch.equal(mine, parts[root])
                mine = form(parts[rank])
                dist.reduce(mine, root)
                assert torch.equal(mine, total if rank == root else parts[rank])
                outputs = [form(torch.zeros(rows, width)) for _ in range(size)] if rank == root else None
                dist.gather(form(parts[rank]), outputs, dst=root)
                assert outputs is None or all(torch.equal(a, b) for a, b in zip(outputs, parts, strict=True))
                mine = form(torch.zeros(rows, width))
                dist.scatter(mine, [form(part) for part in parts] if rank == root else None, src=root)
                assert torch.equal(mine, parts[rank])
            outputs = [form(torch.zeros(rows, width)) for _ in range(size)]
            dist.all_gather(outputs, form(parts[rank]))
            assert all(torch.equal(a, b) for a, b in zip(outputs, parts, strict=True))
            for wide in _forms(rows * size, width):
                whole = wide(torch.zeros(rows * size, width))
                dist.all_gather_into_tensor(whole, form(parts[rank]))
                assert torch.equal(whole, stacked)
                mine = form(torch.zeros(rows, width))
                dist.reduce_scatter_tensor(mine, wide(stacked + rank))
                assert torch.equal(mine, parts[rank] * size + size * (size - 1) / 2)
                came = wide(torch.zeros(rows * size, width))
                dist.all_to_all_single(came, wide(stacked + rank))
                assert torch.equal(came, torch.cat([parts[rank] + r for r in range(size)]))
            mine = form(torch.zeros(rows, width))
            dist.reduce_scatter(mine, [form(part) for part in parts])
            assert torch.equal(mine, parts[rank] * size)
            outputs = [form(torch.zeros(rows, width)) for _ in range(size)]
            dist.all_to_all(outputs, [form(part + rank) for part in parts])
            assert all(torch.equal(got, parts[rank] + r) for r, got in enumerate(outputs))
            came = form(torch.zeros(rows, width))
            sending = dist.isend(parts[rank].clone(), (rank + 1) % size)
            if came.is_contiguous():  # Gloo's rule, whose operation this is
                dist.recv(came, (rank - 1) % size)
            else:
                straight = torch.zeros(rows, width)
                dist.recv(straight, (rank - 1) % size)
                came.copy_(straight)
            sending.wait()
            assert torch.equal(came, parts[(rank - 1) % size])


def point_to_point(rank: int, size: int) -> None:
    """Batches in both directions, tags out of order, from anyone, in a group that counts its ranks otherwise."""
    right, left = (rank + 1) % size, (rank - 1) % size
    lengths = (0, 1, 1000, 300000)
    sent = [torch.full((n,), float(rank * 10 + i)) for i, n in enumerate(lengths)]
    came = [torch.zeros(n) for n in lengths]
    back = [torch.zeros(n) for n in lengths]
    swaps = [dist.P2POp(dist.isend, t, right) for t in sent] + [dist.P2POp(dist.irecv, t, left) for t in came]
    swaps += [dist.P2POp(dist.irecv, t, right) for t in back] + [dist.P2POp(dist.isend, t, left) for t in sent]
    for work in dist.batch_isend_irecv(swaps):
        work.wait()
    for i in range(len(lengths)):
        assert (came[i] == left * 10 + i).all()
        assert (back[i] == right * 10 + i).all()
    works = [dist.isend(torch.tensor([float(tag)]), right, tag=tag) for tag in range(5)]
    for tag in reversed(range(5)):
        heard = torch.zeros(1)
        dist.recv(heard, left, tag=tag)
        assert heard.item() == tag
    for work in works:
        work.wait()
    if rank:
        dist.send(torch.tensor([float(rank)]), 0)
    else:
        senders = set()
        for _ in range(size - 1):
            heard = torch.zeros(1)
            senders.add(dist.recv(heard))
            assert heard.item() in senders
        assert senders == set(range(1, size))
    backwards = dist.new_group(list(range(size))[::-1])
    heard = torch.zeros(2)
    sending = dist.isend(torch.full((2,), float(rank)), right, group=backwards)
    dist.recv(heard, group_src=dist.get_group_rank(backwards, left), group=backwards)
    sending.wait()
    assert (heard == left).all()


def kinds_of_tensors(rank: int, size: int) -> None:
    """Results of functional collectives, parameters, inference tensors, views that conjugate or negate, any type."""
    group = dist.group.WORLD
    assert group is not None
    waiting = funcol.all_reduce(torch.full((4,), rank + 1.0), "sum", group)
    assert isinstance(waiting, funcol.AsyncCollectiveTensor)
    whole = torch.zeros(4 * size)
    dist.all_gather_into_tensor(whole, waiting)
    assert (whole == size * (size + 1) / 2).all()
    in_place = funcol.all_reduce(torch.ones(4), "sum", group)
    dist.all_reduce(in_place)
    assert (in_place == size * size).all()
    sending = dist.isend(funcol.all_reduce(torch.ones(4), "max", group), (rank + 1) % size)
    came = torch.zeros(4)
    dist.recv(came, (rank - 1) % size)
    sending.wait()
    assert (came == 1).all()
    sharded = distribute_tensor(torch.ones(size), init_device_mesh("cpu", (size,)), [Shard(0)])
    with pytest.raises(
        NotImplementedError, match="allreduce_"
    ):  # as over Gloo: torch does not know what it should be
        dist.all_reduce(sharded)

    for given in (torch.full((3, 4), float(rank)).t(), torch.full((4,), float(rank))):
        parameter = nn.Parameter(given)
        dist.all_reduce(parameter)
        assert (parameter == size * (size - 1) / 2).all()
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(size)]
    dist.all_gather(parameters, torch.full((3,), float(rank)))
    assert all((parameter == r).all() for r, parameter in enumerate(parameters))
    with torch.inference_mode():
        turned = torch.full((3, 4), float(rank)).t()
        listed = [torch.zeros(3) for _ in range(size)]
        mine = torch.full((3,), float(rank))
        works = [dist.all_reduce(turned, async_op=True), dist.all_gather(listed, mine, async_op=True)]
    for work in works:
        work.get_future().wait()
        work.wait()
    assert (turned == size * (size - 1) / 2).all()
    assert all((part == r).all() for r, part in enumerate(listed))

    negative = torch.tensor([1 + 2j]).conj().imag
    assert negative.is_neg()
    dist.all_reduce(negative)
    # From 2.14 on the dispatcher hands a copy to every backend, Gloo too, and drops what becomes of it.
    assert negative.item() == (-2 if is_called_by_torch() else -2 * size)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64, torch.complex32):
        mine = torch.full((6,), float(rank)).to(dtype)
        whole = torch.empty(6 * size, dtype=dtype)
        dist.all_gather_into_tensor(whole, mine)
        dist.broadcast(mine, size - 1)
        expected = torch.cat([torch.full((6,), float(r)).to(dtype) for r in range(size)])
        assert torch.equal(whole.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(mine.view(torch.uint8), expected[-6:].view(torch.uint8))


def sparse(rank: int, size: int) -> None:
    """Sparse all_reduce, which Gloo carries out."""
    indices = torch.tensor([[0, rank + 1], [1, 1]])
    tensor = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0]), (size + 2, 3), check_invariants=True)
    dist.all_reduce(tensor)
    expected = torch.zeros(size + 2, 3)
    expected[0, 1], expected[1 : size + 1, 1] = size, 2.0
    assert torch.equal(tensor.to_dense(), expected)


def groups_in_flight(rank: int, size: int) -> None:
    """Many groups at once: every rank starts its groups' collectives in an order of its own; threads of their own."""
    members = [[r for r in range(size) if r != out] for out in range(size)]
    members += [[r, (r + 1) % size] for r in range(size)] + [list(range(size))] * 2
    made = [dist.new_group(sorted(ranks)) for ranks in members]
    mine = [(ranks, group) for ranks, group in zip(members, made, strict=True) if rank in ranks]
    generator = torch.Generator().manual_seed(rank)
    for turn in range(8):
        started = []
        for place in torch.randperm(len(mine), generator=generator).tolist():
            ranks, group = mine[place]
            n = (10, 5000, 100000)[(turn + sum(ranks)) % 3]
            summed = torch.full((n,), float(rank))
            works = [dist.all_reduce(summed, group=group, async_op=True)]
            gathered = torch.zeros(len(ranks))
            works.append(dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)]), group, async_op=True))
            started.append((ranks, works, summed, gathered))
        for place in torch.randperm(len(started), generator=generator).tolist():
            ranks, works, summed, gathered = started[place]
            for work in reversed(works):
                work.wait()
            assert (summed == sum(ranks)).all()
            assert gathered.tolist() == sorted(ranks)

    failures: list[BaseException] = []

    def use(ranks: Sequence[int], group: Any) -> None:
        try:
            for turn in range(20):
                tensor = torch.full((1000 * (turn % 3) + 1,), float(rank))
                dist.all_reduce(tensor, group=group, async_op=turn % 2 == 0) and dist.barrier(group)
                assert (tensor == sum(ranks)).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=each) for each in mine]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def coalesced(rank: int, size: int) -> None:
    """Coalescing managers of every kind that torch has, blocking and not."""
    for is_async in (False, True):
        tensors = [torch.full((n,), float(rank)) for n in (3, 0, 1000)]
        wholes = [torch.zeros(n * size) for n in (3, 0, 1000)]
        shards = [torch.zeros(n) for n in (3, 0, 1000)]
        managers = []
        with dist._coalescing_manager(async_ops=is_async) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        managers.append(manager)
        with dist._coalescing_manager(async_ops=is_async) as manager:
            for whole, n in zip(wholes, (3, 0, 1000), strict=True):
                dist.all_gather_into_tensor(whole, torch.full((n,), float(rank)))
        managers.append(manager)
        with dist._coalescing_manager(async_ops=is_async) as manager:
            for shard, n in zip(shards, (3, 0, 1000), strict=True):
                dist.reduce_scatter_tensor(shard, torch.full((n * size,), float(rank)))
        managers.append(manager)
        if is_async:
            for manager in managers:
                manager.wait()
        for tensor, whole, shard, n in zip(tensors, wholes, shards, (3, 0, 1000), strict=True):
            assert (tensor == size * (size - 1) / 2).all()
            assert torch.equal(whole, torch.arange(float(size)).repeat_interleave(n))
            assert (shard == size * (size - 1) / 2).all()


def compiled(rank: int, size: int) -> None:
    """Functional collectives, and plain ones that dynamo rewrites, in one graph as in eager mode; also backwards."""
    group = dist.group.WORLD
    assert group is not None

    def functional(x: Tensor) -> Tensor:
        y = funcol.all_reduce(x * 2, "sum", group)
        y = funcol.all_gather_tensor(y, 0, group)
        y = funcol.reduce_scatter_tensor(y, "avg", 0, group)
        y = y + funcol.all_to_all_single(x.repeat(size, 1), None, None, group)[: x.shape[0]]
        return funcol.broadcast(y, 0, group) + sum(funcol.all_reduce_coalesced([x, x + 1], "sum", group))

    def plain(x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        whole = torch.empty(x.shape[0] * size, x.shape[1])
        dist.all_gather_into_tensor(whole, x)
        shard = torch.empty_like(x)
        dist.reduce_scatter_tensor(shard, whole)
        return shard

    def backwards(x: Tensor) -> Tensor:
        y = funcol.all_gather_tensor_autograd(x, 0, group)
        # Squared, because torch 2.11 refuses gradients that are not contiguous, as those of a sum.
        return funcol.reduce_scatter_tensor_autograd(y * y, "sum", 0, group).square().sum()

    given = torch.arange(12.0).view(4, 3) + rank
    for function in (functional, plain, backwards):
        results = []
        for run in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
            x = given.clone().requires_grad_(function is backwards)
            result = run(x)
            if function is backwards:
                result.backward()
                result = x.grad
            results.append(result)
        assert torch.equal(*results), function


def graph_breaks(rank: int, size: int) -> list[float]:
    """Between compiled graphs torch's compiler meets the process group itself, and leaves it alone."""

    @torch.compile(backend="aot_eager")
    def broken(x: Tensor) -> Tensor:
        y = x * 2
        dist.broadcast(y, 0)
        work = dist.all_gather(listed, y + rank, async_op=True)
        dist.barrier()
        work.wait()
        return torch.stack(listed) + y

    listed = [torch.zeros(3) for _ in range(size)]
    result = broken(torch.full((3,), rank + 1.0))
    assert torch.equal(result, (torch.arange(float(size)) + 4).view(-1, 1).expand(size, 3))
    losses = []
    for model in (_small(), fully_shard(_small())):
        # Before the first forward DDP tells everybody which buckets there are, from within the compiled frame.
        whole = model if hasattr(model, "unshard") else DistributedDataParallel(model)
        compiled = torch.compile(whole, backend="aot_eager")
        losses += _learn(compiled, torch.optim.SGD(whole.parameters(), lr=0.1), rank)
    return losses


def hooks(rank: int, size: int) -> list[float]:
    """Hooks of DDP that start collectives in the callbacks of others, and wait for them there."""
    losses = []
    for matrices in (1, 2):
        model = DistributedDataParallel(_small())  # one bucket: those of several would race
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=matrices, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        losses += _learn(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, steps=5)
    model = DistributedDataParallel(_small())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    losses += _learn(model, torch.optim.SGD(model.parameters(), lr=0.1), rank)
    return losses


def gradients(rank: int, size: int) -> list[float]:
    """The collectives of ``torch.distributed.nn``, through which gradients flow."""
    seen = []
    for function in (
        lambda x: with_gradients.all_reduce(x),
        lambda x: torch.cat(with_gradients.all_gather(x)),
        lambda x: with_gradients.reduce_scatter(torch.empty_like(x), [x * (r + 1) for r in range(size)]),
        lambda x: torch.cat(
            with_gradients.all_to_all([torch.empty_like(x) for _ in range(size)], [x * (r + 1) for r in range(size)])
        ),
        lambda x: with_gradients.broadcast(x, 0),
    ):
        x = (torch.arange(5.0) + rank).requires_grad_()
        (function(x) ** 2).sum().backward()
        assert x.grad is not None
        seen += x.grad.tolist()
    return seen


def meshes(rank: int, size: int) -> list[float]:
    """DTensors on a mesh of two dimensions, their changes of layout, slices of the mesh and its flat form."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("a", "b"))
    full = torch.arange(float(8 * 12)).view(8, 12)
    for start in ([Shard(0), Shard(1)], [Shard(1), Replicate()], [Shard(0), Shard(0)]):
        sharded = distribute_tensor(full, mesh, start)
        for end in ([Replicate(), Replicate()], [Shard(1), Shard(0)], [Replicate(), Shard(1)]):
            assert torch.equal(sharded.redistribute(mesh, end).full_tensor(), full)
    flat = mesh._flatten("all")
    assert torch.equal(distribute_tensor(full, flat, [Shard(0)]).full_tensor(), full)
    across = distribute_tensor(full, flat, [Shard(0)]).redistribute(flat, [Shard(1)])
    assert torch.equal(across.to_local(), full.chunk(size, 1)[rank])
    partial = DTensor.from_local(full.clone(), mesh["b"], [Partial("avg")])
    assert torch.equal(partial.full_tensor(), full)
    product = distribute_tensor(full, mesh, [Shard(0), Replicate()]) @ distribute_tensor(
        full.t().contiguous(), mesh, [Replicate(), Shard(1)]
    )
    assert torch.equal(product.full_tensor(), full @ full.t())
    return [product.full_tensor().sum().item()]


def _small(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def _learn(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int = 3) -> list[float]:
    losses = []
    for step in range(steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class _Gather(AllGather):
    calls = 0

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        _Gather.calls += 1
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class _Scatter(ReduceScatter):
    calls = 0

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        _Scatter.calls += 1
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def custom_communication(rank: int, size: int) -> list[float]:
    """FSDP2 with the user's own communication objects, and with buffers from the process group."""
    model = fully_shard(_small())
    model.set_custom_all_gather(_Gather())
    model.set_custom_reduce_scatter(_Scatter())
    losses = _learn(model, torch.optim.AdamW(model.parameters(), lr=1e-2), rank)
    assert _Gather.calls >= 3
    assert _Scatter.calls == 3
    other = fully_shard(_small())
    other.set_allocate_memory_from_process_group_for_comm(True)
    other.set_force_sum_reduction_for_comms(True)
    return losses + _learn(other, torch.optim.AdamW(other.parameters(), lr=1e-2), rank)


def zero(rank: int, size: int) -> list[float]:
    """The sharded optimizer of DDP."""
    model = DistributedDataParallel(_small())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    losses = _learn(model, optimizer, rank)
    optimizer.consolidate_state_dict(0)
    return losses


def checkpoint(rank: int, size: int, folder: str) -> list[float]:
    """Save a sharded model and its optimizer, in line and beside the training, and read both back."""
    shared: list[Any] = [folder if rank == 0 else None]
    dist.broadcast_object_list(shared, src=0)
    model = fully_shard(_small())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _learn(model, optimizer, rank)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"weights": weights, "moments": moments}, checkpoint_id=f"{shared[0]}/saved")
    saving = dcp.async_save({"weights": weights, "moments": moments}, checkpoint_id=f"{shared[0]}/beside")
    saving.result()
    went_on = _learn(model, optimizer, rank)
    for name in ("saved", "beside"):
        again = fully_shard(_small(seed=1))
        optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
        weights, moments = get_state_dict(again, optimizer)
        dcp.load({"weights": weights, "moments": moments}, checkpoint_id=f"{shared[0]}/{name}")
        set_state_dict(again, optimizer, model_state_dict=weights, optim_state_dict=moments)
        assert _learn(again, optimizer, rank) == went_on
    return went_on


def _footprint() -> tuple[int, int, int]:
    """Open descriptors, threads and resident bytes of this process."""
    gc.collect()
    mine = Path("/proc/self")
    descriptors, threads = settled(lambda: tuple(len(list((mine / kind).iterdir())) for kind in ("fd", "task")))
    pages = int((mine / "statm").read_text(encoding="ascii").split()[1])
    return descriptors, threads, pages * os.sysconf("SC_PAGE_SIZE")


def many_lives(rank: int, size: int, backend: str, lives: int) -> list[tuple[int, int, int]]:
    """Process groups with a sub-group made, used and destroyed one after the other; what each life left behind."""
    left = []
    for life in range(lives):
        store = dist.FileStore(f"{os.environ['STORE_FILE']}-{life}", size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        pair = dist.new_group([0, 1])
        tensor = torch.ones(100000)
        works = [dist.all_reduce(tensor, async_op=True)]
        if rank < 2:
            works.append(dist.all_reduce(torch.ones(10), group=pair, async_op=True))
        for work in works:
            work.wait()
        assert (tensor == size).all()
        sending = dist.isend(torch.ones(1), (rank + 1) % size)
        dist.recv(torch.zeros(1), (rank - 1) % size)
        sending.wait()
        dist.barrier()
        dist.destroy_process_group()
        del pair, works, work, store, sending
        left.append(_footprint())
    return left
