"""The one line that compresses a wrapped model's gradients."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from mycel.data_parallel.ddp import attach_ddp
from mycel.errors import UsageError

__all__ = ["compress"]


def compress(model: nn.Module, method: Any, **options: Any) -> Any:
    """Compress what a wrapped model communicates. Every rank calls it, once, before the first backward pass.

    Args:
        model: wrapped in ``DistributedDataParallel``, or sharded by ``fully_shard``.
        method: a compressor, such as ``PowerSGD(rank=4)``; a ``CompressionPolicy`` for DDP; ``QSDP`` for FSDP2.
        options: of ``attach_ddp`` or of ``mycel.data_parallel.fsdp.attach``.

    Returns:
        A handle with the bytes that were sent and with state for checkpoints: ``DDPCompression`` or
        ``FSDPCompression``.

    Raises:
        UsageError: the model is not wrapped, or the method does not fit.

    Examples:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from mycel.data_parallel import TopK
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank, for show
        >>> model = DistributedDataParallel(nn.Linear(32, 16, bias=False))
        >>> with compress(model, TopK(0.1)):
        ...     model(torch.ones(1, 32)).sum().backward()
        >>> int(model.module.weight.grad.count_nonzero())  # of 512
        52
        >>> dist.destroy_process_group()
    """
    if isinstance(model, DistributedDataParallel):
        return attach_ddp(model, method, **options)
    if isinstance(model, FSDPModule):
        from mycel.data_parallel.fsdp.attach import attach

        return attach(model, method, **options)
    raise UsageError(
        f"compress needs a model in DistributedDataParallel or sharded by fully_shard, got {type(model).__name__}: "
        "wrap it first"
    )
