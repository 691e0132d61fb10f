"""A backend whose all_reduce does nothing: what torch itself takes for a call of the same kind."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from mycel.runtime.backend import is_called_by_torch

__all__ = ["empty_group"]

_Base: Any = Backend if is_called_by_torch() else dist.ProcessGroup


class _Over(dist.Work):
    """A work that is over."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


class _Empty(_Base):
    """Takes every all_reduce for done."""

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        return _Over()

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "empty"

    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False
    supports_reconfigure = supports_abort_hooks = supports_window = False


def _made(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return _Empty(rank, size)


def empty_group(timeout: timedelta) -> dist.ProcessGroup:
    """A group of all ranks over the empty backend."""
    if "empty" not in dist.Backend.backend_list:
        dist.Backend.register_backend("empty", _made, devices=["cpu"])
    return dist.new_group(backend="empty", timeout=timeout)
