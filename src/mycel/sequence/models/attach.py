"""Which modules of a model mix tokens, how each is answered over ranks, and which are refused by name.

What a module does with its sequence is read from the names that its own code mentions: registries of attention, torch
functions, caches of states. So a new family needs no entry here as long as it calls what others call.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from mycel.errors import UsageError

__all__ = ["Attached", "find_attached", "names_in"]

#: Functions of torch that are answered over ranks.
_TORCH = {"scaled_dot_product_attention", "multi_head_attention_forward", "conv1d", "_conv_forward"}
#: What layers of ``transformers`` keep between calls: one of these names says that a layer has a state.
_STATES = {
    "update_recurrent_state",
    "get_recurrent_state",
    "set_linear_cache",
    "get_linear_cache",
    "update_ssm_state",
    "ssm_states",
}
#: The one that says a layer looks back by a convolution.
_CONVOLUTIONS = {"update_conv_state", "get_conv_state", "conv_states"}
#: Functions of ``transformers`` that layers with states call by these names, whatever the family.
KERNELS = {"torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan"}
CONVOLUTION = "causal_conv1d_fn"
#: Layers whose state is computed in the body of their ``forward``.
LIGHTNING = {"MiniMaxLightningAttention"}
_REGISTRY = "ALL_ATTENTION_FUNCTIONS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """A module that is answered over ranks.

    Attributes:
        path: in the model.
        module: itself.
        kind: ``attention``, ``state``, ``lightning``, ``convolution`` or ``torch``.
    """

    path: str
    module: nn.Module
    kind: str


def find_attached(model: nn.Module) -> tuple[Attached, ...]:
    """Modules that mix tokens, in the model's order.

    Raises:
        UsageError: one has a state that is not understood, or there are none.
    """
    found = tuple(
        Attached(path=path, module=module, kind=kind)
        for path, module in model.named_modules()
        if (kind := _kind(path, module)) is not None
    )
    if getattr(model, "_is_stateful", False) and not any(
        a.kind in ("state", "lightning", "convolution") for a in found
    ):
        raise UsageError(
            f"{type(model).__name__} has states along its sequence, in no layer of a kind that is understood"
        )
    if not found:
        raise UsageError(
            f"{type(model).__name__} has no attention, scan or convolution to attach to: looked for calls of "
            "scaled_dot_product_attention and conv1d, nn.MultiheadAttention, and layers of transformers"
        )
    return found


def _kind(path: str, module: nn.Module) -> str | None:
    name = type(module).__name__
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        raise UsageError(
            f"{path} ({name}) has a state along the sequence that is not understood; only in one process"
        )
    if isinstance(module, nn.MultiheadAttention):
        return "torch"
    if isinstance(module, nn.Conv1d):
        return "torch" if module.kernel_size[0] > 1 else None
    if name in LIGHTNING:
        return "lightning"
    forward, anywhere = names_in(inspect.unwrap(type(module).forward)), names_in(*_methods(type(module)))
    if _STATES & anywhere:
        if not KERNELS & forward or (_CONVOLUTIONS & anywhere and CONVOLUTION not in forward):
            raise UsageError(
                f"{path} ({name}) has a state along the sequence that is not understood: looked in its forward for "
                f"{', '.join(sorted(KERNELS))}"
            )
        return "state"
    if _CONVOLUTIONS & anywhere:
        if CONVOLUTION not in forward:
            raise UsageError(f"{path} ({name}) looks back by a convolution that is not understood: no {CONVOLUTION}")
        return "convolution"
    if _REGISTRY in forward:
        return "attention"
    if _TORCH & anywhere:
        return "torch"
    if name.endswith("Attention") and not any(_mixes(child) for child in module.modules() if child is not module):
        raise UsageError(
            f"{path} ({name}) computes attention by itself: looked for {_REGISTRY} and scaled_dot_product_attention"
        )
    return None


def _mixes(module: nn.Module) -> bool:
    forward = names_in(inspect.unwrap(type(module).forward))
    return bool((_TORCH | {_REGISTRY}) & forward) or isinstance(module, nn.MultiheadAttention)


def _methods(kind: type) -> Iterator[types.FunctionType]:
    for base in kind.__mro__:
        if base.__module__.startswith("torch.") or base is object:
            return
        for member in vars(base).values():
            function = inspect.unwrap(member) if callable(member) else None
            if isinstance(function, types.FunctionType):
                yield function


def names_in(*functions: object) -> set[str]:
    """Global names and attributes that functions mention, also those within them."""
    found: set[str] = set()
    codes = [f.__code__ for f in functions if isinstance(f, types.FunctionType)]
    while codes:
        code = codes.pop()
        found.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return found
