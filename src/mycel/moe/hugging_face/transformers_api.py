"""The one place that touches Hugging Face transformers: imported when needed, asked for features, not versions."""

from __future__ import annotations

from typing import Any

from mycel.extras import transformers_module

__all__ = ["BACKEND", "default_gate", "expert_parallel_module", "experts_registry", "trainer_callback_class"]

#: Name of our experts backend, as ``model.set_experts_implementation`` takes it.
BACKEND = "mycel"


def experts_registry() -> Any:
    """The registry of experts backends."""
    return transformers_module("transformers.integrations.moe", "ExpertsInterface").ExpertsInterface


def default_gate() -> Any:
    """What experts have for ``_apply_gate`` that bring none of their own; ``None`` where the library has no such."""
    return getattr(
        transformers_module("transformers.integrations.moe", "ExpertsInterface"), "_default_apply_gate", None
    )


def expert_parallel_module() -> Any:
    """The module of the library's own expert parallelism, with its registry of implementations."""
    return transformers_module("transformers.distributed.expert_parallel", "EPImplementationInterface")


def trainer_callback_class() -> Any:
    """The base class of callbacks of ``transformers.Trainer``."""
    return transformers_module("transformers", "TrainerCallback").TrainerCallback
