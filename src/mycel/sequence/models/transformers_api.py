"""The one place that touches Hugging Face transformers: imported when needed, asked for features, not versions."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from mycel.extras import transformers_module

__all__ = ["IMPLEMENTATION", "activated", "is_pretrained", "own_configs", "register_attention"]

#: Name of our attention among those of ``config._attn_implementation``.
IMPLEMENTATION = "mycel_sequence"


def is_pretrained(model: nn.Module) -> bool:
    """Whether a model is of transformers; does not import it."""
    module = sys.modules.get("transformers.modeling_utils")
    return module is not None and isinstance(model, module.PreTrainedModel)


def register_attention(attend: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Have ``IMPLEMENTATION`` stand for two functions in the library's registries.

    Args:
        attend: what attention layers call.
        mask: what models make masks with.
    """
    transformers_module("transformers.modeling_utils", "AttentionInterface").AttentionInterface.register(
        IMPLEMENTATION, attend
    )
    name = "transformers.masking_utils"
    transformers_module(name, "AttentionMaskInterface").AttentionMaskInterface.register(IMPLEMENTATION, mask)


def activated(x: Tensor, name: str) -> Tensor:
    """A function by the library's name for it, of each number."""
    result: Tensor = transformers_module("transformers.activations", "ACT2FN").ACT2FN[name](x)
    return result


def own_configs(model: nn.Module) -> Callable[[], None]:
    """Give a model copies of its configurations that say ``IMPLEMENTATION``; several models may share the originals.

    Returns:
        What gives the originals back.
    """
    base = transformers_module("transformers.configuration_utils", "PreTrainedConfig").PreTrainedConfig
    memo: dict[int, Any] = {}
    replaced: list[tuple[nn.Module, str, Any]] = []
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, base):
                own = copy.deepcopy(value, memo)
                own._attn_implementation = IMPLEMENTATION
                replaced.append((module, name, value))
                setattr(module, name, own)

    def give_back() -> None:
        for module, name, original in replaced:
            setattr(module, name, original)

    return give_back
