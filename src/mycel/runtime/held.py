"""Works written in Python, held while torch hands them on."""

from __future__ import annotations

import threading

import torch.distributed as dist

__all__ = ["HeldWork", "hold"]

_last = threading.local()


class HeldWork(dist.Work):
    """A work written in Python. Torch hands on its C++ side alone: without the other it could not be waited for."""

    def let_go(self) -> None:
        """The caller has the work: nobody else need hold it, nor its tensors. Called when it is first asked."""
        if getattr(_last, "work", None) is self:
            _last.work = None


def hold(work: HeldWork) -> None:
    """Hold a work until its caller has it, or this thread makes another call.

    Args:
        work: which torch is about to hand on.
    """
    _last.work = work
