"""Gradients that are there already, combined at once: for models without a wrapper, whole or sharded."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.arguments import the
from mycel.comm.bundle import Packed
from mycel.comm.sharded import is_sharded
from mycel.comm.start import group_or_all
from mycel.data_parallel.combine.base import Combiner, check_combiner
from mycel.data_parallel.combine.tasks.base import TaskCombiner
from mycel.errors import UsageError

__all__ = ["combine_now"]


@torch.no_grad()
def combine_now(parameters: Iterable[Tensor], combiner: Combiner, *, group: dist.ProcessGroup | None = None) -> None:
    """Replace the gradients of some parameters by what the combiner makes of all ranks'; waits for it.

    Call it after the backward pass on every rank of the group. What is not given, such as a task's own head, is left
    as it is. Of an FSDP2 model give its parameters, the ranks that hold the same shard of other replicas as
    ``group``, and to a combiner of tasks those that hold this replica's other shards as ``shards``.

    Args:
        parameters: the same ones in the same order on every rank. One without a gradient counts as zeros, so that
            ranks may have used different ones.
        combiner: for example ``MGDA()``.
        group: the ranks; by default all.

    Raises:
        UsageError: no parameters, ones that are sharded where the combiner does not know of shards, or ranks that
            share different ones.

    Examples:
        >>> from mycel.data_parallel.combine.tasks import UPGrad
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank, for show
        >>> trunk = torch.nn.Linear(2, 1, bias=False)
        >>> trunk(torch.tensor([[1.0, 2.0]])).sum().backward()
        >>> combine_now(trunk.parameters(), UPGrad())
        >>> trunk.weight.grad.tolist()
        [[1.0, 2.0]]
        >>> dist.destroy_process_group()
    """
    check_combiner(combiner)
    given = [the(torch.Tensor, parameter, "a parameter") for parameter in parameters]
    if not given:
        raise UsageError("combine_now: no parameters were given; give those that all ranks share")
    if any(is_sharded(p) for p in given) and not (isinstance(combiner, TaskCombiner) and combiner.shards is not None):
        raise UsageError(
            f"{type(combiner).__name__} does not know that these parameters are sharded: take a combiner of tasks, "
            "such as MGDA(shards=...), with the ranks that hold the other shards"
        )
    for parameter in given:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [_local(p.grad) for p in given if p.grad is not None]
    packed = Packed(gradients)
    packed.copy_from(gradients)
    ranks = group_or_all(group, "combine_now")
    if isinstance(combiner, TaskCombiner):
        combiner.start_all(packed.bundles, ranks).wait()
    else:
        for bundle in packed.bundles:
            combiner.start(bundle, ranks).wait()
    packed.copy_to(gradients)


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if is_sharded(gradient) else gradient
