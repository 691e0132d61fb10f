"""An optimizer whose parameters are far steps a few of them at a time, and its state is made far as well."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

from mycel.errors import UsageError
from mycel.memory.residency.slots import local
from mycel.memory.residency.units import far_like
from mycel.memory.tiers import FarMemory

__all__ = ["Stepping"]


class Stepping:
    """Takes an optimizer's place at ``step``, until ``close``.

    Parameters step in slices, so that state that is made, and what a step computes beside it, is near for a slice
    only. Every optimizer whose parameters do not look at each other gives the same bits as without this.

    Args:
        optimizer: of torch, or one like it.
        far: lends memory for its state.
        slice_bytes: of parameters that step together, at most, but for one that is larger.
        before: is called before a step.
        after: is called after it.
        is_far: tells parameters whose state goes far, by identity.

    Raises:
        UsageError: an optimizer that needs all parameters at once, or far memory without room for its state.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        far: FarMemory,
        *,
        slice_bytes: int,
        before: Callable[[], None],
        after: Callable[[], None],
        is_far: Callable[[int], bool],
    ) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError("LBFGS looks at all parameters at once; those that are far step a few at a time")
        self.optimizer, self.far, self.slice_bytes = optimizer, far, slice_bytes
        self.before, self.after, self.is_far = before, after, is_far
        self._moved: dict[tuple[int, str], Tensor] = {}
        step: Any = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)
        self._raw = step
        mine = self

        def stepped(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return mine.step(closure)

        bound: Any = types.MethodType(stepped, optimizer)
        stepped._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # a scheduler looks for its own mark
        self._had = optimizer.__dict__.get("step")
        optimizer.step = bound  # type: ignore[method-assign]
        try:
            self._move_state()
        except UsageError:
            self.close()
            raise

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As the optimizer's.

        Args:
            closure: that computes the loss again.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        optimizer: Any = self.optimizer
        optimizer._opt_called = True
        self.before()
        globally = torch_optimizer._global_optimizer_pre_hooks.values()
        for hook in chain(globally, optimizer._optimizer_step_pre_hooks.values()):
            hook(optimizer, (), {})
        for slice_ in self._slices():
            with _only(optimizer, slice_):
                self._raw(optimizer)
            self._move_state(slice_)
        after = torch_optimizer._global_optimizer_post_hooks.values()
        for hook in chain(optimizer._optimizer_step_post_hooks.values(), after):
            hook(optimizer, (), {})
        self.after()
        return result

    def _slices(self) -> Iterator[set[int]]:
        """Parameters that step together, by identity."""
        slice_: set[int] = set()
        size = 0
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                num_bytes = local(parameter).nbytes
                if slice_ and size + num_bytes > self.slice_bytes:
                    yield slice_
                    slice_, size = set(), 0
                slice_.add(id(parameter))
                size += num_bytes
        if slice_:
            yield slice_

    def _move_state(self, slice_: set[int] | None = None) -> None:
        """State that is not far goes there: once, as optimizers write it in place."""
        for parameter, state in self.optimizer.state.items():
            if (slice_ is not None and id(parameter) not in slice_) or not self.is_far(id(parameter)):
                continue
            for name, value in state.items():
                if not isinstance(value, Tensor) or value.dim() == 0:
                    continue
                if self._moved.get((id(parameter), name)) is local(value):
                    continue
                try:
                    there = far_like(self.far, local(value).contiguous())
                except UsageError as error:
                    raise UsageError(
                        f"{name} of a parameter of {tuple(parameter.shape)}, {local(value).nbytes} bytes of the "
                        f"optimizer's state, did not get to far memory: {error}; if this was in a step, parameters "
                        "before this one have made it and those after it have not"
                    ) from error
                self._moved[id(parameter), name] = there
                _hold(state, name, there)

    def close(self) -> None:
        """The optimizer's own ``step`` again, and state in plain memory."""
        if self._had is None:
            self.optimizer.__dict__.pop("step", None)
        else:
            self.optimizer.step = self._had  # type: ignore[method-assign]
        for parameter, state in self.optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and self._moved.get((id(parameter), name)) is local(value):
                    _hold(state, name, local(value).to(parameter.device, copy=True))
        self._moved = {}


def _hold(state: dict[str, Any], name: str, numbers: Tensor) -> None:
    """Have a state's value be these numbers: as it is, or as this rank's part of it."""
    value = state[name]
    if local(value) is value:
        state[name] = numbers
    else:
        value._local_tensor = numbers


@contextmanager
def _only(optimizer: torch.optim.Optimizer, slice_: set[int]) -> Iterator[None]:
    """While it is entered, the optimizer has these parameters and no others."""
    groups = optimizer.param_groups
    whole = [group["params"] for group in groups]
    for group, parameters in zip(groups, whole, strict=True):
        group["params"] = [parameter for parameter in parameters if id(parameter) in slice_]
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        for group, parameters in zip(groups, whole, strict=True):
            group["params"] = parameters
        optimizer.param_groups = groups
