"""Schedules of one's own, for the calls of a process group."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mycel.collectives.language import Written
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import CollectiveName
from mycel.errors import UsageError
from mycel.runtime.communicator import Communicator
from mycel.runtime.registered import Registered
from mycel.runtime.registering import Size, register_with, unregister_with
from mycel.runtime.tensor_group import TensorGroup, tensor_group

__all__ = ["register", "unregister"]


def register(
    schedule: Schedule | Written | Mapping[str, Any] | str | Path,
    *,
    for_: CollectiveName | None = None,
    sizes: tuple[Size, Size] = (0, None),
    group: dist.ProcessGroup | None = None,
    always: bool = True,
) -> Registered:
    """Have a schedule serve a group's calls of a collective, by DDP and everybody else. Every rank calls this.

    Calls that are under way keep theirs. When a link is lost and the group goes on without it, the schedule is
    dropped, for it was made for the fabric with it; rank 0 says so. Tensors on GPUs go their usual ways.

    Args:
        schedule: over as many ranks as the group has; or a written collective (``mycel.collectives.language``), which
            is built on the group's fabric; or an MSCCL++ execution plan as a JSON object, which runs here as
            programs of its operations; or a file that holds a schedule or a plan.
        for_: the collective that it is for; the schedule's own, or the first that a written one serves, if not given.
        sizes: bytes of the whole array, from and to, ends included, as numbers or as ``"64KB"``; ``None`` for no end.
        group: the group; the default one if not given.
        always: whether it serves all of these calls; otherwise it is one of those that the cost model chooses from.

    Returns:
        What has been registered; ``unregister`` takes it.

    Raises:
        UsageError: the schedule is for another collective or number of ranks, or cannot run over the group's fabric.
        VerificationError: it is wrong; or its ranks would hold sums of different bits.
        MismatchError: ranks have come with different ones; the message says which rank with which.
        CommunicationError: a rank has not come within the time-out; the message names it.

    Examples:
        A collective of one's own, under unchanged training code::

            from mycel.collectives.language import collective

            @collective("all_reduce")
            def all_pairs(array):
                for owner, chunk in enumerate(array.cut(array.num_ranks)):
                    others = [rank for rank in array.ranks if rank != owner]
                    for rank in others:
                        chunk.add(rank, owner)
                    for rank in others:
                        chunk.copy(owner, rank)

            mycel.runtime.register(all_pairs, sizes=("64KB", None))
    """
    chosen = tensor_group(group)
    made = register_with(_communicator(chosen), schedule, for_=for_, sizes=sizes, always=always)
    chosen.forget_shortcuts()
    return made


def unregister(registered: Registered | str, group: dist.ProcessGroup | None = None) -> None:
    """Have a schedule serve no more calls of a group. Every rank calls this.

    Args:
        registered: what ``register`` gave, or its ``method``.
        group: the group; the default one if not given.

    Raises:
        UsageError: no such schedule is registered.
        MismatchError: ranks have come with different ones.
        CommunicationError: a rank has not come within the time-out.

    Examples:
        For one part of a training only::

            registered = mycel.runtime.register(schedule)
            ...
            mycel.runtime.unregister(registered)
    """
    chosen = tensor_group(group)
    unregister_with(_communicator(chosen), registered)
    chosen.forget_shortcuts()


def _communicator(group: TensorGroup) -> Communicator:
    if group.communicator is None:
        raise UsageError("a group of one rank moves nothing; schedules are registered with groups of several")
    return group.communicator
