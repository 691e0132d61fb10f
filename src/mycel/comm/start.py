"""What every method needs at its start: a group of ranks, and tensors that are the same on all of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.errors import UsageError

__all__ = ["agree", "group_or_all"]


def group_or_all(group: dist.ProcessGroup | None, wanted_by: str) -> dist.ProcessGroup:
    """The group, or that of all ranks.

    Raises:
        UsageError: there is none yet.
    """
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise UsageError(f"{wanted_by}: no process group; call torch.distributed.init_process_group first")
    return found


@torch.no_grad()
def agree(tensors: Iterable[Tensor], group: dist.ProcessGroup, *, rank: int = 0) -> None:
    """One rank's tensors become everybody's. All ranks of the group call it with as many tensors of the same shapes.

    Args:
        rank: whose, counted within the group.
    """
    for tensor in tensors:
        values = tensor.detach().contiguous()
        dist.broadcast(values, group=group, group_src=rank)
        tensor.detach().copy_(values)
