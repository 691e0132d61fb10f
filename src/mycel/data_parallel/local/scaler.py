"""Steps that a gradient scaler skips: they count, so that ranks that overflowed meet the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["watch_scaler"]


def watch_scaler(
    scaler: Any, optimizer: torch.optim.Optimizer, steps: Callable[[], int], skipped: Callable[[], None]
) -> Callable[[], None]:
    """Call ``skipped`` whenever ``scaler.step`` leaves the optimizer's step out.

    Args:
        scaler: ``torch.amp.GradScaler``, or what has such a ``step(optimizer)``.
        optimizer: the one whose steps are counted; what wraps it is seen through.
        steps: how many have been counted.
        skipped: counts one more.

    Returns:
        Takes the watch off again.
    """
    original = scaler.step

    def step(stepped: Any, *args: Any, **kwargs: Any) -> Any:
        before = steps()
        result = original(stepped, *args, **kwargs)
        inner = stepped
        while inner is not optimizer and isinstance(getattr(inner, "optimizer", None), torch.optim.Optimizer):
            inner = inner.optimizer
        if inner is optimizer and steps() == before:
            skipped()
        return result

    scaler.step = step

    def release() -> None:
        if scaler.__dict__.get("step") is step:
            del scaler.step

    return release
