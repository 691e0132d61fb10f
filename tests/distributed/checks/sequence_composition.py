"""Divided sequences together with what else training is made of: gradients are those of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tests.distributed.checks.sequence_models import alone, apart, batch_of, make
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from mycel.data_parallel import Cast, compress
from mycel.sequence import apply

LENGTHS = [14, 1, 2, 11]


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Gradients by the model's own names, put together where they are divided."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.detach().clone()
    return found


def sharded(model: Any, mesh: DeviceMesh) -> None:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def by_fsdp(model: Any, mesh: DeviceMesh, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each layer sharded, over the ranks that share the sequences."""
    handle = apply(model, mesh)
    sharded(model, mesh)
    model(**handle.shard(batch)).loss.backward()
    return whole(model)


def by_fsdp_and_recomputation(model: Any, mesh: DeviceMesh, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Layers sharded and computed again in the backward pass, when another batch has been prepared already."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    handle = apply(model, mesh)
    sharded(model, mesh)
    loss = model(**handle.shard(batch)).loss
    handle.shard(batch_of([9]))
    loss.backward()
    return whole(model)


def by_ddp(model: Any, mesh: DeviceMesh, batch: dict[str, Tensor], *, compiled: bool = False) -> dict[str, Tensor]:
    handle = apply(model, mesh)
    wrapped: Any = DistributedDataParallel(model)
    if compiled:
        wrapped = torch.compile(wrapped, backend="aot_eager")
    wrapped(**handle.shard(batch)).loss.backward()
    return whole(model)


def by_compression(model: Any, mesh: DeviceMesh, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients in half precision on the wire."""
    handle = apply(model, mesh)
    wrapped = DistributedDataParallel(model)
    with compress(wrapped, Cast("bfloat16")):
        wrapped(**handle.shard(batch)).loss.backward()
    return whole(model)


def by_two_dimensions(model: Any, _: DeviceMesh, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Two groups that share sequences, each with other ones, of other lengths; one optimizer's step of all."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "cp"))
    handle = apply(model, mesh, dim="cp")
    wrapped = DistributedDataParallel(model)
    replica = mesh.get_local_rank("dp")
    own = (batch, batch_of([9, 7], seed=8))[replica]
    wrapped(**handle.shard(own)).loss.backward()
    return whole(model)


def by_tensors(model: Any, _: DeviceMesh, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Heads and widths divided over one dimension of a mesh, sequences and shards over the other."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("cp", "tp"))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan: dict[str, Any] = dict.fromkeys(columns, ColwiseParallel())
    plan |= dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), RowwiseParallel())
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], plan)
    handle = apply(model, mesh, dim="cp")
    sharded(model, mesh["cp"])
    model(**handle.shard(batch)).loss.backward()
    return whole(model)


WAYS: dict[str, Callable[..., dict[str, Tensor]]] = {
    "fsdp2": by_fsdp,
    "fsdp2 and recomputation": by_fsdp_and_recomputation,
    "compression": by_compression,
    "compiled": lambda *args: by_ddp(*args, compiled=True),
    "two dimensions": by_two_dimensions,
    "tensor parallel": by_tensors,
}


def composed(rank: int, world_size: int, family: str, names: list[str]) -> dict[str, float]:
    """How far gradients are from one process, by what they are composed with."""
    mesh = init_device_mesh("cpu", (world_size,))
    model = make(family)
    batch = batch_of(LENGTHS)
    oracle = copy.deepcopy(model).double()
    _, wanted = alone(oracle, batch, LENGTHS)
    found = {}
    for name in names:
        right = wanted
        if name == "two dimensions":
            counts = [labels_of(batch, LENGTHS), labels_of(batch_of([9, 7], seed=8), [9, 7])]
            _, others = alone(oracle, batch_of([9, 7], seed=8), [9, 7])
            right = {
                n: (wanted[n] * counts[0] + others[n] * counts[1]) / sum(counts)
                for n in wanted.keys() & others.keys()
            }
        theirs = WAYS[name](copy.deepcopy(model), mesh, batch)
        found[name] = apart({n: theirs[n] for n in right}, right)
    return found


def labels_of(batch: dict[str, Tensor], lengths: list[int]) -> int:
    return sum(int((part[:, 1:] != -100).sum()) for part in batch["labels"].split(lengths, 1))
