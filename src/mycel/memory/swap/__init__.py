"""Activations that are kept, moved far or computed again by a plan, on unchanged models."""

from __future__ import annotations

from mycel.memory.swap.attach import attach
from mycel.memory.swap.executor import Swapping
from mycel.memory.swap.measure import measure
from mycel.memory.swap.mover import Moved
from mycel.memory.swap.selective import offload_contexts

__all__ = ["Moved", "Swapping", "attach", "measure", "offload_contexts"]
