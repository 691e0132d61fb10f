"""The Gloo group inside a process group, at the address where the rank is reached anyway.

Left alone, Gloo looks up the machine's own name, which Debian maps to 127.0.1.1, or wants ``GLOO_SOCKET_IFNAME``.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import Store

__all__ = ["make_gloo"]


def make_gloo(store: Store, rank: int, size: int, timeout: timedelta, ip: str) -> Any:
    """A Gloo group.

    Args:
        store: where its ranks find each other; nothing else may use its keys.
        rank, size: in the group.
        timeout: for connecting and for its collectives.
        ip: this rank's own address.

    Raises:
        RuntimeError: Gloo cannot connect.
    """
    gloo: Any = ProcessGroupGloo  # its type information lacks the options
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=ip)]
    options._threads = 2
    return gloo(store, rank, size, options)
