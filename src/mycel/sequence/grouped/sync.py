"""When gradients of a step's micro-batches are averaged: under DDP and FSDP2, with the last one only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

__all__ = ["averaging"]


@contextmanager
def averaging(model: nn.Module | None, *, now: bool) -> Iterator[None]:
    """Around the forward and backward pass of a micro-batch.

    All ranks do the same, whatever group they are in: what DDP and FSDP2 exchange is always of all of them.

    Args:
        model: wrapped or not.
        now: whether gradients are averaged in this pass, or stay and are added up on each rank.
    """
    if model is None or now:
        yield
        return
    with ExitStack() as stack:
        if isinstance(model, DistributedDataParallel):
            stack.enter_context(model.no_sync())
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in sharded:
            module.set_requires_gradient_sync(False, recurse=False)
            module.set_is_last_backward(False)
            stack.callback(module.set_is_last_backward, True)
            stack.callback(module.set_requires_gradient_sync, True, recurse=False)
        yield
