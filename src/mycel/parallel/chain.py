"""Which modules a model passes its input through, one after the other, seen by running it on tensors without numbers.

A model can be cut into stages between two modules where the one gets what the other gave and nothing else of the
model is done on the way. The model is run once on *fake* tensors, which have shapes and memory of their own but no
numbers; what a module got is what another gave if both have the same memory. A forward that looks at numbers, as
some mixtures of experts do, is run on one short sequence of real ones instead, where the model has real parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call

from mycel.errors import UsageError
from mycel.names import nearest

__all__ = ["Call", "Watched", "check_chain", "first_tensor", "module_of", "options_of", "watch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a module.

    Attributes:
        name: as ``named_modules`` gives it.
        got: memory of the first tensor that it was given; ``None`` where there was none.
        gave: memory of the first tensor of its result.
        shape: of that.
    """

    name: str
    got: int | None
    gave: int | None
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A model's forward, as its modules were called.

    Attributes:
        calls: in the order in which they ended.
        got: memory of the model's first argument.
        gave: of its result.
        is_fake: whether nothing was computed.
    """

    calls: tuple[Call, ...]
    got: int | None
    gave: int | None
    is_fake: bool


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor in a module's arguments or result, also in lists, tuples, and Hugging Face's outputs.

    Args:
        value: of any kind.
    """
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Mapping) and isinstance(value.get("logits"), Tensor):
        return value["logits"]  # type: ignore[no-any-return]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    for part in parts:
        found = first_tensor(part)
        if found is not None:
            return found
    return None


def options_of(model: nn.Module) -> dict[str, Any]:
    """What a model's forward is told besides its input: Hugging Face's keep keys and values for generation otherwise.

    Args:
        model: or a part of one.
    """
    names = model.forward.__code__.co_varnames if hasattr(model.forward, "__code__") else ()
    wrapped = getattr(model.forward, "__wrapped__", None)
    while wrapped is not None:
        names = (*names, *getattr(getattr(wrapped, "__code__", None), "co_varnames", ()))
        wrapped = getattr(wrapped, "__wrapped__", None)
    return {"use_cache": False} if "use_cache" in names else {}


def module_of(model: nn.Module, name: str) -> nn.Module:
    """A module of a model by name.

    Args:
        model: the whole.
        name: as ``named_modules`` gives it.

    Raises:
        UsageError: there is none; the message has the nearest.
    """
    found: nn.Module | None = dict(model.named_modules()).get(name)
    if found is None:
        names = [known for known, _ in model.named_modules() if known]
        raise UsageError(f"{type(model).__name__} has no module {name!r}{nearest(name, names)}")
    return found


def watch(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    around: Callable[[Mapping[str, nn.Module]], AbstractContextManager[object]] | None = None,
) -> Watched:
    """Run a model once without computing anything, and note how its modules are called.

    Args:
        model: on any device, also ``meta``.
        args: of its forward; of tensors only shapes and types matter.
        kwargs: of its forward.
        around: entered around the run, given modules by name.

    Raises:
        UsageError: it cannot be run so; the message has the model's own error.
    """
    given = {**options_of(model), **(kwargs or {})}
    attempts: list[tuple[bool, torch.dtype | None]] = [(True, None), (True, torch.bfloat16)]
    if all(tensor.device.type == "cpu" for tensor in model.parameters()):
        attempts.append((False, None))
    problem: Exception | None = None
    for is_fake, dtype in attempts:
        try:
            return _run(model, args, given, around, is_fake=is_fake, dtype=dtype)
        except Exception as error:  # whatever a user's forward may raise
            problem = problem or error
    raise UsageError(
        f"{type(model).__name__} cannot be run on tensors of shape "
        f"{[tuple(a.shape) for a in args if isinstance(a, Tensor)]}: {type(problem).__name__}: "
        f"{str(problem).splitlines()[0] if str(problem) else ''}; give an example that it takes"
    ) from problem


def _run(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    around: Callable[[Mapping[str, nn.Module]], AbstractContextManager[object]] | None,
    *,
    is_fake: bool,
    dtype: torch.dtype | None,
) -> Watched:
    calls: list[Call] = []
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        stack.enter_context(_quiet())
        for name, module in model.named_modules():
            handle = module.register_forward_hook(_noting(name, calls), with_kwargs=True)
            stack.callback(handle.remove)
        tensors: dict[str, Tensor] = {}
        if is_fake:
            stack.enter_context(mode)
            whole = [*model.named_parameters(), *model.named_buffers()]
            tensors = {name: _hollow(tensor, dtype) for name, tensor in whole}
            args = tuple(_hollow(a, None) if isinstance(a, Tensor) else a for a in args)
            kwargs = {k: _hollow(a, None) if isinstance(a, Tensor) else a for k, a in kwargs.items()}
        stack.enter_context(around(dict(model.named_modules())) if around else nullcontext())
        result = functional_call(model, tensors, args, dict(kwargs))
        return Watched(
            calls=tuple(calls[:-1]),
            got=_memory(first_tensor((args, list(kwargs.values())))),
            gave=_memory(first_tensor(result)),
            is_fake=is_fake,
        )


@contextmanager
def _quiet() -> Any:
    """Torch logs whatever fails on fake tensors, and failing is one of the answers here."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _hollow(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=kind, device="cpu", requires_grad=tensor.requires_grad)


def _memory(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.untyped_storage()._cdata


def _noting(name: str, calls: list[Call]) -> Callable[..., None]:
    def note(_: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        got, gave = first_tensor((args, list(kwargs.values()))), first_tensor(result)
        shape = tuple(gave.shape) if gave is not None else ()
        calls.append(Call(name=name, got=_memory(got), gave=_memory(gave), shape=shape))

    return note


def check_chain(model: nn.Module, names: Sequence[str], args: tuple[Any, ...]) -> Watched:
    """That a model passes its input through these modules, and does nothing else to it.

    Args:
        model: the whole.
        names: of modules, in order of execution.
        args: of the model's forward; of tensors only shapes and types matter.

    Returns:
        The run that shows it.

    Raises:
        UsageError: a module that is not there or not called once; something between two that would be done again in
            every stage; parameters outside of all modules. The message names the place.
    """
    for name in names:
        module_of(model, name)
    inside = tuple(f"{name}." for name in names)
    for name, _ in model.named_parameters():
        if not name.startswith(inside):
            raise UsageError(f"parameter {name} is in no module of any stage: the plan names {', '.join(names)}")
    watched = watch(model, args)
    chosen = set(names)
    calls = [call for call in watched.calls if call.name in chosen]
    seen = [call.name for call in calls]
    if seen != list(names):
        odd = next((name for name in names if seen.count(name) != 1), None)
        what = (
            f"{odd} is called {seen.count(odd)} times" if odd else f"they are called in the order {', '.join(seen)}"
        )
        raise UsageError(f"stages are cut between {', '.join(names)}, and in a forward {what}; each is called once")
    ends = [("the model's input", watched.got), *((call.name, call.gave) for call in calls)]
    starts = [*((call.name, call.got) for call in calls), ("the model's result", watched.gave)]
    for (before, gave), (after, got) in zip(ends, starts, strict=True):
        if gave != got:
            raise UsageError(
                f"between {before} and {after} the forward of {type(model).__name__} does something that belongs to "
                "no module, and every stage would do it again: put it into a module, and name that"
            )
    return watched
