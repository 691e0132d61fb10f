"""Gradients combined at once, for models without a wrapper, whole or sharded; of several tasks on a rank, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.arguments import the
from mycel.comm.bundle import Packed
from mycel.comm.sharded import is_sharded
from mycel.comm.start import group_or_all
from mycel.data_parallel.combine.base import Combiner, check_combiner
from mycel.data_parallel.combine.tasks.base import TaskCombiner
from mycel.data_parallel.combine.tasks.by_loss import ByLoss
from mycel.errors import UsageError

__all__ = ["combine_now", "combine_tasks"]


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
    given = _checked(parameters, combiner, "combine_now")
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


def combine_tasks(
    losses: Tensor | Sequence[Tensor],
    parameters: Iterable[Tensor],
    combiner: TaskCombiner,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Backward passes of several tasks that this rank holds; what they share gets one gradient of all ranks' tasks.

    For fewer ranks than tasks, down to one. Each task has a backward pass of its own, so memory holds a version of
    the shared gradient for each. Task ``t`` of rank ``r`` is number ``r * len(losses) + t``, where the combiner was
    not told other numbers. Combiners that weigh losses are told them here.

    Args:
        losses: of each of this rank's tasks, or of its only one; as many on every rank.
        parameters: what all tasks share, the same ones in the same order on every rank; gradients that they have are
            not looked at. Others, such as heads, get the gradients that the backward passes give them.
        combiner: for example ``MGDA()``.
        group: the ranks; by default all.

    Raises:
        UsageError: no losses, a combiner that is not one of tasks, or what ``combine_now`` refuses.

    Examples:
        >>> from mycel.data_parallel.combine.tasks import PCGrad
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank, for show
        >>> trunk = torch.nn.Parameter(torch.zeros(2))
        >>> combine_tasks([trunk @ torch.tensor([2.0, 0.0]), trunk @ torch.tensor([-1.0, 1.0])], [trunk], PCGrad())
        >>> trunk.grad.tolist()  # of each what is not against the other: (1, 1) and (0, 1)
        [1.0, 2.0]
        >>> dist.destroy_process_group()
    """
    if not isinstance(combiner, TaskCombiner):
        raise UsageError(
            f"combine_tasks: expected a combiner of tasks, such as MGDA(), got {type(combiner).__name__}"
        )
    tasks = [the(torch.Tensor, loss, "a loss") for loss in ([losses] if isinstance(losses, Tensor) else losses)]
    if not tasks:
        raise UsageError("combine_tasks: no losses were given; give one for each task of this rank")
    given = _checked(parameters, combiner, "combine_tasks")
    if isinstance(combiner, ByLoss):
        combiner.tell(tasks)
    versions: list[Packed] = []
    gradients: list[Tensor] = []
    for number, loss in enumerate(tasks):
        for parameter in given:
            parameter.grad = None
        loss.backward(retain_graph=number < len(tasks) - 1)  # type: ignore[no-untyped-call]  # tasks may share a part
        for parameter in given:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [_local(p.grad) for p in given if p.grad is not None]
        versions.append(Packed(gradients))
        versions[-1].copy_from(gradients)
    combiner.start_versions([packed.bundles for packed in versions], group_or_all(group, "combine_tasks")).wait()
    versions[0].copy_to(gradients)


def _checked(parameters: Iterable[Tensor], combiner: Combiner, caller: str) -> list[Tensor]:
    """The parameters, if there are some and the combiner can do with them."""
    given = [the(torch.Tensor, parameter, "a parameter") for parameter in parameters]
    if not given:
        raise UsageError(f"{caller}: no parameters were given; give those that all ranks share")
    if any(is_sharded(p) for p in given) and not (isinstance(combiner, TaskCombiner) and combiner.shards is not None):
        raise UsageError(
            f"{type(combiner).__name__} does not know that these parameters are sharded: take a combiner of tasks, "
            "such as MGDA(shards=...), with the ranks that hold the other shards"
        )
    return given


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if is_sharded(gradient) else gradient
