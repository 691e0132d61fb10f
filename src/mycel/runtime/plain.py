"""Tensors that stand for others: a process group needs the memory itself.

Torch's dispatcher opens such tensors before its own backends see them; a process group written in Python is called
without it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["on_plain_tensors"]

_Method = TypeVar("_Method", bound=Callable[..., Any])
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def on_plain_tensors(method: _Method) -> _Method:
    """Have a method see plain tensors where it was given results of functional collectives; these are waited for.

    Raises:
        TypeError: (the method) a tensor is made of others in another way, as a DTensor is.
    """

    @functools.wraps(method)
    def opened(self: Any, *arguments: Any, **named: Any) -> Any:
        if not any(map(_stands_for_others, (*arguments, *named.values()))):  # nearly always, so found fast
            return method(self, *arguments, **named)
        found = [_open(argument, method.__name__) for argument in arguments]
        return method(self, *found, **{key: _open(value, method.__name__) for key, value in named.items()})

    return opened  # type: ignore[return-value]


def _stands_for_others(given: Any) -> bool:
    kind: Any = type(given)
    return any(map(_stands_for_others, given)) if kind is list else _is_special(kind)


@functools.lru_cache(maxsize=1024)
def _is_special(kind: Any) -> bool:
    return issubclass(kind, torch.Tensor) and kind not in _PLAIN


def _open(given: Any, name: str) -> Any:
    if isinstance(given, list):
        return [_open(part, name) for part in given]
    kind: Any = type(given)
    if not _is_special(kind):
        return given
    if hasattr(given, "trigger_wait"):  # torch's AsyncCollectiveTensor: in place, too, what it holds is meant
        return given.trigger_wait()
    if is_traceable_wrapper_subclass(given):
        raise TypeError(
            f"{name} needs plain tensors and got a {type(given).__name__}, which is made of others; pass what "
            "it holds (a DTensor's to_local()), or use functional collectives"
        )
    return given
