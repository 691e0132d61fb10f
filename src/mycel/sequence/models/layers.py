"""Layers of transformers with a state or a convolution along the sequence: their own code, with kernels over ranks.

A layer calls its kernel as a function of its module. It gets a copy of its own ``forward`` in which that one name
means ours: nothing that another model shares is changed, and everything else of the layer stays the library's.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn

from mycel.errors import UsageError
from mycel.sequence.models.active import here
from mycel.sequence.models.kernels import KERNELS
from mycel.sequence.models.lightning import lightning_forward
from mycel.untraced import untraced

__all__ = ["replace_forward"]


def replace_forward(module: nn.Module, kind: str) -> Callable[[], None]:
    """Give a layer the forward that it has over ranks.

    Args:
        module: the layer.
        kind: as ``find_attached`` says.

    Returns:
        What gives it its own back.

    Raises:
        UsageError: something else has replaced it before.
    """
    if "forward" in vars(module):
        raise UsageError(
            f"{type(module).__name__}: its forward was replaced before (by hooks of accelerate?); apply before that"
        )
    own = inspect.unwrap(type(module).forward)
    forward = lightning_forward if kind == "lightning" else _with_kernels(own)
    module.forward = types.MethodType(forward, module)  # bound, so that a copy of the layer gets one of its own

    def give_back() -> None:
        del module.forward

    return give_back


def _with_kernels(function: Any) -> Any:
    own = function.__globals__
    names = {
        name: _over_ranks(own[name], kernel)
        for name, kernel in KERNELS.items()
        if name in function.__code__.co_names and name in own
    }
    # Run as it is: torch.compile keeps what it makes of a part in the module's globals, where the rest of a copy that
    # it has taken apart does not look. Code of its own, so that the library's is compiled as ever.
    code = function.__code__.replace()
    copied = types.FunctionType(
        code, {**own, **names}, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return untraced(wraps(function)(copied))


def _over_ranks(original: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        active = here()
        if active is None:
            return original(*args, **kwargs)
        with torch._C.DisableTorchFunction():  # what the library's kernel calls is of one rank
            return kernel(original, active[1], *args, **kwargs)

    return untraced(called)
