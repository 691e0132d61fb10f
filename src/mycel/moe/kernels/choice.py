"""Which kernels experts are computed with: Triton's, torch's grouped product, or a loop over experts."""

from __future__ import annotations

import torch
from torch import Tensor

from mycel.errors import UsageError
from mycel.triton_kernels import has_triton, is_interpreted, runs_on

__all__ = ["KERNELS", "chosen_kernels", "triton_runs", "triton_takes", "use_kernels"]

#: What ``use_kernels`` takes.
KERNELS = ("auto", "triton", "grouped_mm", "loop")

_chosen = "auto"


def use_kernels(name: str) -> str:
    """Choose kernels for everything that this process computes from now on.

    ``auto``: Triton's for CUDA tensors in half precision, where Triton is installed and the GPU is an A100 or newer;
    else ``F.grouped_mm`` where that takes the rows; else a loop over experts. A name forces that way for all tensors
    that it takes; the others go the next way, in this order. ``triton`` also takes float32.

    Args:
        name: one of ``KERNELS``.

    Returns:
        What was chosen before.

    Raises:
        UsageError: an unknown name; ``triton`` where it is not installed, or there is neither a GPU nor its
            interpreter (``TRITON_INTERPRET=1``).

    Examples:
        >>> use_kernels("loop")
        'auto'
        >>> use_kernels("auto")
        'loop'
    """
    global _chosen
    if name not in KERNELS:
        raise UsageError(f"no kernels are called {name!r}; known: {', '.join(KERNELS)}")
    if name == "triton" and not (has_triton() and (is_interpreted() or torch.cuda.is_available())):
        raise UsageError("kernels 'triton' need the package triton, and a GPU or its interpreter; use 'auto'")
    before, _chosen = _chosen, name
    return before


def chosen_kernels() -> str:
    """What ``use_kernels`` was given last."""
    return _chosen


def triton_runs(x: Tensor) -> bool:
    """Whether Triton's kernels are chosen and run where a tensor is."""
    if _chosen not in ("auto", "triton"):
        return False
    if x.is_cuda:
        return bool(runs_on(x.device.index or 0))
    return _chosen == "triton" and x.is_cpu and bool(is_interpreted())


def triton_takes(x: Tensor) -> bool:
    """``triton_runs``, and it multiplies such numbers: in half precision; float32 where ``triton`` is forced."""
    narrow = x.dtype in (torch.bfloat16, torch.float16)
    return (narrow or (x.dtype == torch.float32 and _chosen == "triton")) and triton_runs(x)
