"""What every method needs at its start: a group of ranks, and tensors that are the same on all of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.errors import UsageError

__all__ = ["agree", "group_or_all"]

#: Bytes that travel in one message, as torch's DDP has it: many small tensors share one, and the copy stays small.
_MESSAGE_BYTES = 25 << 20


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
    """One rank's tensors become everybody's. All ranks of the group call it with as many tensors of the same
    shapes, types and kinds of device.

    Args:
        rank: whose, counted within the group.
    """
    values = [tensor.detach() for tensor in tensors]
    if values:
        dist._broadcast_coalesced(group, values, _MESSAGE_BYTES, rank)  # type: ignore[attr-defined]
