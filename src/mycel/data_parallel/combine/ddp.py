"""Gradients of a DDP-wrapped model combined by something else than the mean."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from mycel.comm.background import InBackground
from mycel.comm.bundle import Bundle
from mycel.comm.handle import Handle
from mycel.data_parallel.combine.base import Combiner, check_combiner
from mycel.data_parallel.ddp_hook import take_hook
from mycel.errors import UsageError

__all__ = ["CombinedGradients", "combine_gradients"]


def combine_gradients(
    model: DistributedDataParallel, combiner: Combiner, *, group: dist.ProcessGroup | None = None
) -> CombinedGradients:
    """Have a DDP-wrapped model's gradients combined by ``combiner``, layer by layer, while others are computed.

    Call it once, before the first backward pass. The combiner has a process group of its own and works through DDP's
    buckets in their order, which is the same on every rank, in the background.

    Args:
        model: the wrapped model.
        combiner: for example ``Adasum()``.
        group: the ranks, for nothing else; by default a new group of the model's ranks.

    Returns:
        A handle with ``close()``.

    Raises:
        UsageError: the model is not wrapped by DDP, or its gradients are compressed or combined already.

    Examples:
        >>> from mycel.data_parallel.combine.adasum import Adasum
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank, for show
        >>> model = DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
        >>> with combine_gradients(model, Adasum()):
        ...     model(torch.tensor([[1.0, 2.0, 3.0]])).sum().backward()
        >>> model.module.weight.grad.tolist()
        [[1.0, 2.0, 3.0]]
        >>> dist.destroy_process_group()
    """
    if not isinstance(model, DistributedDataParallel):
        raise UsageError(
            f"combine_gradients needs a DistributedDataParallel model, got {type(model).__name__}; "
            "for other models combine what local updates have changed: local_updates(..., combiner=...)"
        )
    check_combiner(combiner)
    ranks = dist.get_process_group_ranks(model.process_group)
    return CombinedGradients(model, combiner, group or dist.new_group(ranks, use_local_synchronization=True))


class CombinedGradients(Handle):
    """A combiner at work on a DDP-wrapped model; made by ``combine_gradients``.

    Args:
        model: the wrapped model.
        combiner: makes one gradient of all ranks'.
        group: the model's ranks, for nothing else.

    Examples:
        >>> from mycel.data_parallel.combine.adasum import Adasum
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank, for show
        >>> model = DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
        >>> combined = combine_gradients(model, Adasum())
        >>> combined.close()  # DDP averages again, and another may be made
        >>> combine_gradients(model, Adasum()).close()
        >>> dist.destroy_process_group()
    """

    def __init__(self, model: DistributedDataParallel, combiner: Combiner, group: dist.ProcessGroup) -> None:
        self._combiner, self._group = combiner, group
        self._thread = InBackground()
        self._release = take_hook(model, self._combined)

    def close(self) -> None:
        """Have DDP average gradients again; call it on every rank, between steps."""
        self._release()

    def _combined(self, bucket: Any) -> torch.futures.Future[Tensor]:
        return _in_background(self._thread, self._combiner, self._group, bucket.buffer(), bucket.gradients())


def _in_background(
    thread: InBackground, combiner: Combiner, group: dist.ProcessGroup, buffer: Tensor, gradients: list[Tensor]
) -> torch.futures.Future[Tensor]:
    bundle = Bundle.over(buffer, gradients)
    raw: torch.futures.Future[None] = torch.futures.Future()
    failures: list[BaseException] = []

    def job() -> None:
        try:
            combiner.start(bundle, group).wait()
        except BaseException as error:  # raised by the callback below: DDP reads a future without asking how it went
            failures.append(error)
        raw.set_result(None)

    thread.start(job, bundle)

    def value(_: object) -> Tensor:
        if failures:
            raise failures[0]
        return buffer

    return raw.then(value)
