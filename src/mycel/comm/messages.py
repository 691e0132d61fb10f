"""Messages between two ranks of a group, both ways at once; and two collectives that torch has renamed."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

__all__ = ["all_gather_single", "receive", "reduce_scatter_single", "send", "swap"]

# Torch 2.13 renamed both, and warns of the old names.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def swap(outgoing: Tensor, incoming: Tensor, partner: int, group: dist.ProcessGroup) -> None:
    """Send to a partner and receive what it sends; both are contiguous, ``partner`` counts within the group."""
    operations = []
    if incoming.numel():
        operations.append(dist.P2POp(dist.irecv, incoming, group=group, group_peer=partner))
    if outgoing.numel():
        operations.append(dist.P2POp(dist.isend, outgoing, group=group, group_peer=partner))
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def send(tensor: Tensor, partner: int, group: dist.ProcessGroup) -> None:
    """Send to a partner, which receives."""
    dist.send(tensor, group=group, group_dst=partner)


def receive(tensor: Tensor, partner: int, group: dist.ProcessGroup) -> None:
    """Receive what a partner sends."""
    dist.recv(tensor, group=group, group_src=partner)
