"""Loaded Hugging Face models with mycel's experts: ``apply(model, mesh=mesh)`` and ``restore(model)``.

Nothing here imports transformers before it is used.
"""

from __future__ import annotations

from mycel.moe.hugging_face.applied import Applied, applied_to, apply, restore
from mycel.moe.hugging_face.registry import register_expert_parallel
from mycel.moe.hugging_face.training import trainer_callback

__all__ = [
    "Applied",
    "applied_to",
    "apply",
    "register_expert_parallel",
    "restore",
    "trainer_callback",
]
