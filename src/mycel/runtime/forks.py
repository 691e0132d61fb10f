"""What a forked child does with its parent's groups: nothing, and it holds none of their sockets.

A child that ``os.fork`` makes (``multiprocessing`` with ``fork``, workers of a ``DataLoader``) has copies of its
parent's descriptors and objects, but none of its threads. If it wrote to the sockets, the parent's sums would be
wrong; if it kept them open, other ranks would not notice that the parent has died. So whatever holds descriptors,
threads or locks of a group is registered here, and lets go in the child: it closes its descriptors (the connections
go on in the parent; no goodbye is said), renews its locks, which a thread that is not there may have held, and
refuses further calls.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any, Protocol

__all__ = ["Inherited", "keep_in_children", "let_go_in_children"]


class Inherited(Protocol):
    """Something that a forked child inherits and must not use."""

    def after_fork_in_child(self) -> None:
        """Let go. Runs in the child, in its only thread; neither sends anything nor waits for anything."""


#: Both may be changed while a child is made: it sees them as they were then.
_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()
_kept: weakref.WeakSet[Any] = weakref.WeakSet()
_hooked = False


def let_go_in_children(owner: Inherited) -> None:
    """Have ``owner.after_fork_in_child()`` called in every child that is forked from now on.

    Args:
        owner: is not kept alive by this.
    """
    _hook()
    _inherited.add(owner)


def keep_in_children(made: object) -> None:
    """Have forked children never destroy an object.

    For what ends threads when it is destroyed, as torch's own process groups do: in a child, where there are no such
    threads, they would be waited for without end.

    Args:
        made: is not kept alive in this process; must allow weak references.
    """
    _hook()
    _kept.add(made)


def _hook() -> None:
    global _hooked
    if not _hooked:
        _hooked = True
        os.register_at_fork(after_in_child=_let_go)


def _let_go() -> None:
    for made in tuple(_kept):
        # A reference that nobody gives back; one in a module would be, when the interpreter ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
    _kept.clear()
    owners = tuple(_inherited)
    _inherited.clear()
    for owner in owners:
        owner.after_fork_in_child()
