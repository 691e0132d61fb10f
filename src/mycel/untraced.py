"""Keeps ``torch.compile`` away from code that it cannot trace.

After a graph break, torch compiles whatever Python runs next. Process groups in C++ have none; ours is full of
addresses and sockets, and torch ends with an error at the first access to its own attributes. Exchanges whose sizes
are data break a graph at every collective anyway.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["untraced"]

_Marked = TypeVar("_Marked", bound=type | Callable[..., Any])


def untraced(marked: _Marked) -> _Marked:
    """Have torch run a function, or the methods of a class, and whatever they call, as they are.

    This is what ``torch.compiler.disable`` comes to, for which torch's compiler would have to be imported; that costs
    a second. A torch without this entry, which is not a public one, gets no marks.
    """
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    mark = getattr(frames, "set_code_exec_strategy", None)
    if mark is None:
        return marked
    skip = frames._FrameAction.SKIP
    for member in vars(marked).values() if isinstance(marked, type) else [marked]:
        function = member.fget if isinstance(member, property) else member
        if isinstance(function, types.FunctionType):
            mark(function.__code__, frames._FrameExecStrategy(skip, skip))
    if isinstance(marked, types.FunctionType):
        marked._torchdynamo_disable = True  # type: ignore[attr-defined]  # callers that are traced do not look inside
    return marked
