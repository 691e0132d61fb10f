"""Replicas of a stage: parameters and gradients sharded over them by FSDP2, and the norm of all gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mycel.parallel.chain import module_of

__all__ = ["clip_gradients", "shard_stage"]


def shard_stage(
    stage: nn.Module,
    part: nn.Module,
    names: Sequence[str],
    zero: int,
    mesh: DeviceMesh,
    left_alone: set[nn.Parameter] | None = None,
) -> None:
    """Shard a stage over its replicas, in place.

    Up to ZeRO-2 the stage is gathered whole once a step, gradients are reduced to shards after the last micro-batch,
    and each rank updates its own: a sum of gradients in two halves with the optimizer between them. ZeRO-3 gathers
    module by module and frees each after its use.

    Args:
        stage: what the pipeline runs.
        part: of the model, in it.
        names: of the stage's modules.
        zero: from 1 to 3.
        mesh: of the replicas.
        left_alone: parameters that each of them has others of.

    References:
        Rajbhandari et al., "ZeRO", SC 2020; Jangda et al., "CoCoNet", ASPLOS 2022, section 3 (split and reorder).
    """
    if zero == 3:
        for name in names:
            module = module_of(part, name)
            if any(True for _ in module.parameters()):
                fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=left_alone)
    fully_shard(stage, mesh=mesh, reshard_after_forward=zero == 3, ignored_params=left_alone)


@torch.no_grad()
def clip_gradients(
    parameters: Sequence[nn.Parameter],
    max_norm: float,
    ranks_of_place: int,
    divided: set[nn.Parameter] | None = None,
    degree: int = 1,
) -> float:
    """Scale all gradients of a plan's ranks so that their norm together is no more than a limit.

    Args:
        parameters: of this rank.
        max_norm: of all gradients of the whole model, as one vector.
        ranks_of_place: that hold the same stages as this one: a parameter is on all of them, in as many shards as
            its layout says, and counts once.
        divided: parameters of which others of these ranks have others.
        degree: by how many they are divided.

    Returns:
        The norm before; the same on all ranks.
    """
    total = torch.zeros(1, dtype=torch.float64)
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None:
            own = grad.to_local() if isinstance(grad, DTensor) else grad
            shards = degree if divided and parameter in divided else _shards_of(grad)
            total += own.double().square().sum().cpu() * shards / ranks_of_place
    if dist.get_backend() == "nccl":
        total = total.cuda()
    dist.all_reduce(total)
    norm = float(total.sqrt())
    if norm > max_norm:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(max_norm / norm)
    return norm


def _shards_of(grad: Tensor) -> int:
    count = 1
    if isinstance(grad, DTensor):
        for axis, placement in enumerate(grad.placements):
            is_whole = placement.is_replicate() or placement.is_partial()  # FSDP2 over shared matrices is strided
            count *= 1 if is_whole else grad.device_mesh.size(axis)
    return count
