"""Whether the pass that runs on this thread is one of several: other ranks have other tokens of the same sequences.

Layers whose results are of all tokens of a batch, as losses of balance are, ask for it; what divides sequences says
it. Neither knows the other.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.brief import brief
from mycel.comm.exchange import there_and_back
from mycel.comm.pending import Pending, communicate
from mycel.untraced import untraced

__all__ = ["SharedPass", "begin_shared", "end_shared", "shared_pass", "sum_for_each"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPass:
    """A forward pass over this rank's tokens of sequences that several ranks share.

    Attributes:
        group: ranks that share these sequences; ``None``: this one has them alone.
        averaged: ranks over whose losses gradients are averaged; ``None``: this one.
        num_tokens: of a row, here; with 0, what the model computes on is a stand-in that counts for nothing.
    """

    group: dist.ProcessGroup | None
    averaged: dist.ProcessGroup | None
    num_tokens: int

    __repr__ = brief


class _Thread(threading.local):
    def __init__(self) -> None:
        self.passes: list[SharedPass] = []


_THREAD = _Thread()
_lock = threading.Lock()
_count = 0
#: Whether there is one on any thread: code that is traced looks no further where there is none.
_any = False


@untraced
def begin_shared(shared: SharedPass) -> None:
    """From now on, on this thread, until its ``end_shared``."""
    _THREAD.passes.append(shared)
    _change(+1)


@untraced
def end_shared() -> None:
    """The latest that began is over."""
    _THREAD.passes.pop()
    _change(-1)


def _change(by: int) -> None:
    global _any, _count
    with _lock:
        _count += by
        _any = _count > 0


def shared_pass() -> SharedPass | None:
    """The one that runs on this thread; ``None``: what is computed is of this rank alone."""
    return _latest() if _any else None


@untraced
def _latest() -> SharedPass | None:
    passes = _THREAD.passes
    return passes[-1] if passes else None


@untraced
def sum_for_each(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The ranks' sum on all of them, each of which uses it for itself: gradients are added up as well.

    Args:
        x: of one shape on all ranks.
        group: the ranks; ``None``: this one.
    """
    if group is None or group.size() == 1:
        return x

    def reduced(part: Tensor) -> Tensor:
        def launch() -> Pending[Tensor]:
            summed = part.contiguous().clone()
            dist.all_reduce(summed, group=group)
            return Pending.done(summed)

        return communicate(launch).wait()

    if not torch.is_grad_enabled() or not x.requires_grad:
        return reduced(x.detach())
    (summed,) = there_and_back([x], reduced, reduced)
    return summed
