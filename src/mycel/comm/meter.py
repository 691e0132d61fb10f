"""Counts the bytes that one rank sends to each other one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch.distributed as dist

__all__ = ["ByteMeter"]


class ByteMeter:
    """Bytes sent, by exchange and by receiver. What a rank keeps for itself does not count.

    Collectives that are not exchanges count as their direct form would send them: all_gather the own part to each
    rank, reduce_scatter each rank its part, all_reduce both for a share of the tensor.

    Attributes:
        sent: bytes by name of the exchange and global rank of the receiver.

    Examples:
        >>> meter = ByteMeter()
        >>> meter.sent["all_to_all", 1] += 4096  # as ``add`` does for what goes to rank 1
        >>> meter.sent["all_gather", 2] += 512
        >>> meter.total(), meter.total(["all_gather"])
        (4608, 512)
    """

    def __init__(self) -> None:
        self.sent: Counter[tuple[str, int]] = Counter()

    def add(self, name: str, bytes_to: Sequence[int], group: dist.ProcessGroup) -> None:
        """Count one exchange.

        Args:
            name: of the exchange.
            bytes_to: for each rank of the group.
            group: in whose order ``bytes_to`` is.
        """
        peers = dist.get_process_group_ranks(group)
        own = peers[group.rank()]
        for peer, num_bytes in zip(peers, bytes_to, strict=True):
            if peer != own:
                self.sent[name, peer] += num_bytes

    def add_even(self, name: str, num_bytes: int, group: dist.ProcessGroup) -> None:
        """Count as many bytes to every rank of the group."""
        self.add(name, [num_bytes] * dist.get_world_size(group), group)

    def total(self, names: Iterable[str] | None = None) -> int:
        """Bytes sent.

        Args:
            names: of the exchanges that count; ``None``: all.
        """
        wanted = None if names is None else set(names)
        return sum(n for (name, _), n in self.sent.items() if wanted is None or name in wanted)

    def between(self, nodes: Sequence[Sequence[int]]) -> int:
        """Bytes sent to ranks of other nodes.

        Args:
            nodes: global ranks of each node.
        """
        own = dist.get_rank()
        inside = {rank for node in nodes if own in node for rank in node}
        return sum(n for (_, peer), n in self.sent.items() if peer not in inside)

    def reset(self) -> None:
        """Begin at zero."""
        self.sent.clear()
