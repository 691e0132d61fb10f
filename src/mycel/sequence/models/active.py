"""Which applied model computes on this thread, and under which layout: its modules say so as they begin and end.

A call belongs to the modules around it. So two applied models, or one beside another that is not, never see each
other's, and what checkpointing computes again during the backward pass goes through the same hooks as before. There
is one thing that hooks cannot see then: of which forward pass it is, where several are alive. Autograd numbers its
nodes in the order in which they are made, so the node that asks for the computation says it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from mycel.comm.sharing import SharedPass, begin_shared, end_shared
from mycel.errors import UsageError
from mycel.sequence.context import SequenceContext
from mycel.sequence.softmax import Way
from mycel.sequence.softmax.attention import WayName
from mycel.untraced import untraced

__all__ = ["Binding", "here", "tensors_of"]

#: Forward passes that may wait for their backward pass at the same time.
_MOST_ALIVE = 1024


@dataclass(slots=True)
class _Frame:
    """A module at work and everything inside it."""

    binding: Binding
    context: SequenceContext
    owner: nn.Module
    calls: AbstractContextManager[Any]
    first_node: int | None
    depth: int = 1


class _Thread(threading.local):
    def __init__(self) -> None:
        self.frames: list[_Frame] = []


_THREAD = _Thread()


@untraced
def here() -> tuple[Binding, SequenceContext] | None:
    """The applied model that computes on this thread, and its layout; ``None`` where none does."""
    frames = _THREAD.frames
    return (frames[-1].binding, frames[-1].context) if frames else None


@untraced
class Binding:
    """What the modules of one applied model share.

    Attributes:
        name: of the model's class.
        way: of attention.
        context: of the batch that was prepared last.
        is_closed: whether the model is as it was.

    Args:
        name: of the model's class.
        way: of attention.
        calls: torch functions that are answered otherwise under a layout and by a way.
        check: what the model is called with, and the layout: gives what it is called with instead.
        averaged: ranks over whose losses gradients are averaged, for layers whose results are of all tokens.
    """

    def __init__(
        self,
        name: str,
        way: Way | WayName,
        calls: Callable[[SequenceContext, Way | WayName], AbstractContextManager[Any]],
        check: Callable[[SequenceContext, tuple[Any, ...], dict[str, Any]], dict[str, Any]],
        averaged: dist.ProcessGroup | None = None,
    ) -> None:
        self.name = name
        self.way = way
        self.context: SequenceContext | None = None
        self.is_closed = False
        self._calls = calls
        self._check = check
        self._averaged = averaged
        self._prepared: Any = WeakIdKeyDictionary()
        self._alive: deque[tuple[int, int, SequenceContext]] = deque(maxlen=_MOST_ALIVE)

    def __deepcopy__(self, memo: Any) -> Binding:
        """Copies of a model are applied as it is: groups of ranks have no copies."""
        return self

    def prepared(self, tensor: Tensor, context: SequenceContext) -> None:
        """Remember under which layout a tensor of a batch is."""
        self._prepared[tensor] = context

    def is_prepared(self, tensor: Tensor) -> bool:
        """Whether a tensor came from ``prepared``, and needs no look at its values."""
        return bool(tensor in self._prepared)

    def attach(self, model: nn.Module) -> list[RemovableHandle]:
        """Have a model and all modules inside it say when they begin and end."""
        hooks = [model.register_forward_pre_hook(self._begin_model, with_kwargs=True)]
        for module in model.modules():
            hooks.append(module.register_forward_pre_hook(self._begin))
            hooks.append(module.register_forward_hook(self._end, always_call=True))
        hooks.append(model.register_forward_hook(self._watch))
        return hooks

    @contextmanager
    def at_work(self, module: nn.Module) -> Iterator[None]:
        """Have what is done inside be a module's work, where its ``forward`` is called and not the module."""
        frames = _THREAD.frames
        context = None if frames and frames[-1].binding is self else self._recomputed() or self.context
        if context is None:
            yield
            return
        self._push(module, context, depth=1)
        try:
            yield
        finally:
            self._end(module)

    # -- hooks ----------------------------------------------------------------------------------------------------

    def _begin_model(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        known = (self._prepared.get(t) for t in tensors_of((args, kwargs)))
        context = next((c for c in known if c is not None), self.context)
        if context is None:
            raise UsageError(
                f"{self.name} is applied to a sequence over ranks and called with a batch that is not: call it with "
                "handle.shard(batch), or handle.close() first"
            )
        kwargs = self._check(context, args, kwargs)
        self._push(module, context, depth=0)
        return args, kwargs

    def _begin(self, module: nn.Module, _: Any) -> None:
        frames = _THREAD.frames
        if frames and frames[-1].binding is self:
            if frames[-1].owner is module:
                frames[-1].depth += 1
            return
        context = self._recomputed() or self.context
        if context is not None:  # a part of the model that is called by itself before any batch is what it always was
            self._push(module, context, depth=1)

    def _end(self, module: nn.Module, *_: Any) -> None:
        frames = _THREAD.frames
        if not frames or frames[-1].binding is not self or frames[-1].owner is not module:
            return
        frame = frames[-1]
        frame.depth -= 1
        if frame.depth > 0:
            return
        frames.pop()
        end_shared()
        frame.calls.__exit__(None, None, None)
        if frame.first_node is not None:
            self._alive.append((frame.first_node, _next_node(), frame.context))

    def _watch(self, module: nn.Module, _: Any, output: Any) -> None:
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(self._refuse_if_closed)  # type: ignore[no-untyped-call]

    def _refuse_if_closed(self, gradient: Tensor) -> None:
        if self.is_closed:
            raise UsageError(
                f"backward after close(): this pass of {self.name} was over ranks, and its handle is closed; close "
                "between steps"
            )

    # -- underneath -----------------------------------------------------------------------------------------------

    def _push(self, module: nn.Module, context: SequenceContext, *, depth: int) -> None:
        calls = self._calls(context, self.way)
        first = _next_node() if torch.is_grad_enabled() and not _in_backward() else None
        calls.__enter__()
        begin_shared(SharedPass(group=context.group, averaged=self._averaged, num_tokens=context.num_tokens))
        _THREAD.frames.append(_Frame(self, context, module, calls, first, depth))

    def _recomputed(self) -> SequenceContext | None:
        """The layout of the forward pass of which something is computed again."""
        node: Any = torch._C._current_autograd_node()
        number = None if node is None else node._sequence_nr()
        if number is None:
            return None
        found = (context for first, after, context in reversed(self._alive) if first <= number < after)
        return next(found, None)


def _in_backward() -> bool:
    return torch._C._current_autograd_node() is not None


def _next_node() -> int:
    """The number of an autograd node that is made now."""
    with torch.enable_grad(), torch._C.DisableTorchFunction():
        made: Any = torch.empty(0, requires_grad=True).view(0).grad_fn
    return int(made._sequence_nr())


def tensors_of(values: Any) -> Iterator[Tensor]:
    """Tensors in what a module is called with, or gives."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from tensors_of(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_of(value)
