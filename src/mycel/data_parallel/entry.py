"""The one line that compresses a wrapped model's gradients."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mycel.arguments import check_options, the
from mycel.comm.sharded import is_fully_sharded
from mycel.data_parallel.compress import Compressor, make_compressor
from mycel.data_parallel.ddp import attach_ddp
from mycel.data_parallel.policy import CompressionPolicy
from mycel.errors import UsageError

__all__ = ["compress"]

_WANTED = "a compressor, the name of one, or a policy"


def compress(model: nn.Module, method: Any, **options: Any) -> Any:
    """Compress what a wrapped model communicates. Every rank calls it, once, before the first backward pass.

    Args:
        model: wrapped in ``DistributedDataParallel``, or sharded by ``fully_shard``.
        method: a compressor, such as ``PowerSGD(rank=4)``, or the name of one with its usual settings, such as
            ``"powersgd"`` (a key of ``COMPRESSORS``); a ``CompressionPolicy``; for FSDP2 also ``QSDP`` (``"qsdp"``).
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
        check_options(attach_ddp, options, "compress under DistributedDataParallel")
        return attach_ddp(model, _for_gradients(method), **options)
    if is_fully_sharded(model):
        from mycel.data_parallel.fsdp.attach import attach
        from mycel.data_parallel.fsdp.qsdp import QSDP

        check_options(attach, options, "compress under fully_shard")
        if method is QSDP or (isinstance(method, str) and method.lower() == "qsdp"):
            method = the(QSDP, QSDP() if isinstance(method, str) else method, _WANTED)
        _refuse_a_second(model)
        wanted = method if isinstance(method, QSDP) else _for_gradients(method)
        _refuse_encryption(wanted)
        return attach(model, wanted, **options)
    raise UsageError(
        f"compress needs a model in DistributedDataParallel or sharded by fully_shard, got {type(model).__name__}: "
        "wrap it first"
    )


def _refuse_a_second(model: nn.Module) -> None:
    """Compression of a sharded model is in the place of torch's communication: a second would wrap the first."""
    from mycel.data_parallel.fsdp.layout import units_of

    for unit in units_of(model):
        comms = (unit.param_group._all_gather_comm, unit.param_group._reduce_scatter_comm)
        if any(type(comm).__module__.startswith("mycel.") for comm in comms):
            raise UsageError("what the model gathers and reduces is compressed already: close() that handle first")


def _refuse_encryption(method: object) -> None:
    """What nothing may travel without has to see all that travels."""
    kinds = method.compressors() if isinstance(method, CompressionPolicy) else [method]
    for kind in kinds:
        if isinstance(kind, Compressor) and kind.covers_all:
            raise UsageError(
                f"{type(kind).__name__} is of gradients' sums, and fully_shard gathers weights in the clear: "
                "wrap the model in DistributedDataParallel"
            )


def _for_gradients(method: object) -> Compressor | CompressionPolicy:
    """A compressor or a policy of gradients; names become what they name.

    Raises:
        UsageError: it is neither: a class, or what is for another wrapper.
    """
    if isinstance(method, str) and method.lower() != "qsdp":
        return make_compressor(method)
    if isinstance(method, str) or any(each.__name__ == "QSDP" for each in _classes_of(method)):
        raise UsageError(
            "QSDP compresses weights and gradients of a model that fully_shard has sharded; this one is wrapped in "
            "DistributedDataParallel, which sends no weights: take a compressor, such as Quantised(bits=4)"
        )
    kind: type[Any] = CompressionPolicy if CompressionPolicy in _classes_of(method) else Compressor
    found: Compressor | CompressionPolicy = the(kind, method, _WANTED, hint="such as PowerSGD(rank=4)")
    return found


def _classes_of(thing: object) -> tuple[type, ...]:
    return (thing if isinstance(thing, type) else type(thing)).__mro__
