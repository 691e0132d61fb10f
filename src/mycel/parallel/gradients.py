"""Gradients of ranks that hold the same parameters, summed after a step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["sum_gradients"]


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, *, divisor: int = 1) -> None:
    """Gradients become their sum over ranks, divided, in one message for each type.

    Args:
        parameters: of this rank; those without a gradient are passed over, as on all other ranks.
        group: whose ranks have the same parameters.
        divisor: the number of replicas, for a mean.
    """
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None:
            own = grad.to_local() if isinstance(grad, DTensor) else grad
            by_type.setdefault(own.dtype, []).append(own)
    for grads in by_type.values():
        flat = torch.cat([grad.reshape(-1) for grad in grads]).div_(divisor)
        dist.all_reduce(flat, group=group)
        at = 0
        for grad in grads:
            grad.copy_(flat[at : at + grad.numel()].view_as(grad))
            at += grad.numel()
