"""Keeps ``torch.compile`` away from the code of a process group.

After a graph break, torch compiles whatever Python runs next. Backends in C++ have none; ours is full of addresses
and sockets, and torch ends with an error at the first access to a process group's own attributes.
"""

from __future__ import annotations

import types
from typing import Any, TypeVar

import torch

__all__ = ["untraced"]

_Class = TypeVar("_Class", bound=type)


def untraced(cls: _Class) -> _Class:
    """Have torch run the methods of a class, and whatever they call, as they are.

    This is what ``torch.compiler.disable`` comes to, for which torch's compiler would have to be imported; that costs
    a second. A torch without this entry, which is not a public one, gets no marks.
    """
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    mark = getattr(frames, "set_code_exec_strategy", None)
    if mark is not None:
        skip = frames._FrameAction.SKIP
        for member in vars(cls).values():
            function = member.fget if isinstance(member, property) else member
            if isinstance(function, types.FunctionType):
                mark(function.__code__, frames._FrameExecStrategy(skip, skip))
    return cls
