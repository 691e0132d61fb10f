"""Whether a forward pass runs again in the middle of a backward pass."""

from __future__ import annotations

import torch

__all__ = ["recomputing"]


def recomputing() -> bool:
    """Whether a backward pass runs, so that what is called now is called again; not known to ``torch.compile``."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
