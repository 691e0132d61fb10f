"""DDP's communication hook, of which torch lets a model have one for ever: here what it calls can change.

Torch cannot unregister a hook. After a handle is closed the hook does what DDP does without one, the mean by an
all_reduce over the model's process group, and another handle can take its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from mycel.errors import UsageError

__all__ = ["take_hook"]

#: Takes a ``GradBucket``; the future is of the bucket's buffer.
_Target = Callable[[Any], "torch.futures.Future[Tensor]"]


class _Switch:
    def __init__(self, model: DistributedDataParallel) -> None:
        self.group = model.process_group
        self.target: _Target | None = None


# Values must not lead to their models, or no model would ever be given free: handles keep no model.
_switches: WeakKeyDictionary[DistributedDataParallel, _Switch] = WeakKeyDictionary()


def take_hook(model: DistributedDataParallel, target: _Target) -> Callable[[], None]:
    """Have a model's gradient buckets go to ``target``.

    Returns:
        Call it to have DDP's own all_reduce again.

    Raises:
        UsageError: they go to somebody already.
    """
    if model not in _switches:
        switch = _Switch(model)
        model.register_comm_hook(switch, _hook)
        _switches[model] = switch
    switch = _switches[model]
    if switch.target is not None:
        raise UsageError("the model's gradients are compressed or combined already: close() that handle first")
    switch.target = target

    def release() -> None:
        if switch.target is target:
            switch.target = None

    return release


# Without annotations: DDP compares them with classes, and under ``from __future__ import annotations`` they are text.
def _hook(state, bucket):  # type: ignore[no-untyped-def]
    return allreduce_hook(state.group, bucket) if state.target is None else state.target(bucket)
