"""Sequences divided over the ranks that experts are divided over as well: losses and gradients of one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tests.distributed.checks.sequence_models import alone, apart, batch_of, make
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import mycel.moe
import mycel.sequence
from mycel.moe import MoE, expert_parameter_names

EXPERTS, DIM, HEADS = 6, 8, 2
LENGTHS = [14, 1, 2, 11]


class Mixed(nn.Module):
    """Attention and a mixture of experts, over tokens that are vectors."""

    def __init__(self, parallel: Any = None, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.moe = MoE(DIM, 12, EXPERTS, 2, parallel=parallel, **options)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + y.transpose(1, 2).flatten(2)
        return self.out(x + self.moe(x))


def tokens_of(total: int) -> Tensor:
    return torch.randn(1, total, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(11))


def plain(rank: int, world_size: int) -> dict[str, float]:
    mesh = init_device_mesh("cpu", (world_size,))
    whole, model = Mixed().double(), Mixed(mesh).double()
    x = tokens_of(29)
    whole(x).square().sum(-1).mean().backward()
    handle = mycel.sequence.apply(model)
    ddp = DistributedDataParallel(model)
    y = ddp(handle.shard(x))
    handle.mean(y.square().sum(-1), 29).backward()
    found = {}
    for name, parameter in model.named_parameters():
        wanted = whole.get_parameter(name).grad
        if ".experts." in name:
            wanted = wanted[list(model.moe.experts.owned)]
        found[name] = float((parameter.grad - wanted).norm() / wanted.norm())
    return found


def hugging_face(rank: int, world_size: int, family: str) -> dict[str, float]:
    mesh = init_device_mesh("cpu", (world_size,))
    model = make(family, num_experts=EXPERTS, num_local_experts=EXPERTS).double()
    batch = batch_of(LENGTHS)
    _, wanted = alone(copy.deepcopy(model), batch, LENGTHS)
    mycel.moe.apply(model, parallel=mesh)
    handle = mycel.sequence.apply(model)
    ddp = DistributedDataParallel(model)
    ddp(**handle.shard(batch)).loss.backward()
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = float(parameter.grad.norm()/wanted[name].norm()) if name in wanted and parameter.shape == wanted[name].shape else -1.
        if name in wanted and parameter.shape == wanted[name].shape:
            found[name] = float((parameter.grad-wanted[name]).norm()/wanted[name].norm())
        elif name in wanted:
            n = parameter.shape[0]
            w = wanted[name][rank*n:(rank+1)*n]
            found[name] = float((parameter.grad-w).norm()/w.norm())
    return found


def naive(rank: int, world_size: int, family: str, how: str) -> dict[str, float]:
    mesh = init_device_mesh("cpu", (world_size,))
    model = make(family, num_experts=EXPERTS, num_local_experts=EXPERTS).double()
    batch = batch_of(LENGTHS)
    _, wanted = alone(copy.deepcopy(model), batch, LENGTHS)
    if how == "after":
        handle = mycel.sequence.apply(model)
    mycel.moe.apply(model, parallel=mesh)
    if how != "after":
        handle = mycel.sequence.apply(model)
    if how == "fsdp":
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif how == "after":
        model_ = DistributedDataParallel(model)
    elif how == "ignored":
        names = expert_parameter_names(model)
        ignored = {model.get_parameter(n) for n in names}
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, ignored_params=ignored)
        fully_shard(model, mesh=mesh, ignored_params=ignored)
    model(**handle.shard(batch)).loss.backward()
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        w = wanted[name]
        if w.shape != grad.shape:
            n = grad.shape[0]
            w = w[rank*n:(rank+1)*n]
        found[name] = float((grad-w).norm()/w.norm())
    found["norm"] = float(mycel.moe.grad_norm(model))
    found["wanted norm"] = float(sum(w.norm()**2 for w in wanted.values())**.5)
    return found
