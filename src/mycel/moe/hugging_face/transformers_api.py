"""The one place that touches Hugging Face transformers: imported when needed, asked for features, not versions."""

from __future__ import annotations

import importlib
from typing import Any

from mycel.errors import UsageError

__all__ = ["BACKEND", "default_gate", "expert_parallel_module", "experts_registry", "trainer_callback_class"]

#: Name of our experts backend, as ``model.set_experts_implementation`` takes it.
BACKEND = "mycel"


def _module(name: str, attribute: str) -> Any:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"Hugging Face transformers with {name} is needed, which could not be imported ({error}); "
            "pip install 'transformers>=5.0'"
        ) from error
    if not hasattr(module, attribute):
        raise UsageError(f"{name} has no {attribute}; this transformers is too old or too new: looked for both")
    return module


def experts_registry() -> Any:
    """The registry of experts backends."""
    return _module("transformers.integrations.moe", "ExpertsInterface").ExpertsInterface


def default_gate() -> Any:
    """What experts have for ``_apply_gate`` that bring none of their own; ``None`` where the library has no such."""
    return getattr(_module("transformers.integrations.moe", "ExpertsInterface"), "_default_apply_gate", None)


def expert_parallel_module() -> Any:
    """The module of the library's own expert parallelism, with its registry of implementations."""
    return _module("transformers.distributed.expert_parallel", "EPImplementationInterface")


def trainer_callback_class() -> Any:
    """The base class of callbacks of ``transformers.Trainer``."""
    return _module("transformers", "TrainerCallback").TrainerCallback
