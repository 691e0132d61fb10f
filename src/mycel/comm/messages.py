"""Messages between two ranks of a group, both ways at once."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

__all__ = ["receive", "send", "swap"]


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
