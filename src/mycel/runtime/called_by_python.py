"""What a program's calls become from torch 2.14 on.

There torch dispatches every call itself, so that modes, traces, profiles and tensors of every kind are its affair,
and its kernels call the backend. They wrap the work of a backend that is written in Python, and the wrapper knows
neither whether the call is over nor who a message came from: whoever polls ``is_completed()`` waits for ever. So what
a function of ``torch.distributed`` has called is taken one step before these kernels, and its work is handed on as
it is. That needs somebody in Python to hold it; calls from C++ (DDP's reducer, functional collectives) get the
wrapper.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import ProcessGroup

from mycel.runtime.dispatched import BELOW, FIELDS, OPERATORS, SPLITS, WITH_MEMORY, install, is_special, over
from mycel.runtime.held import HeldWork, hold
from mycel.untraced import untraced

__all__ = ["route"]

#: Whose calls are a program's own: the functions of ``torch.distributed``.
_CALLERS = c10d.__file__
_OPERATOR_CALLS = torch._ops.__file__
_c10d: Any = torch._C._distributed_c10d  # its type information lacks a function


def route() -> None:
    """From now on, what a program calls over backends that have a ``tensor_group`` is run by it without a wrapper."""
    install(_run)


def _run(name: str, operator: Any) -> Callable[..., Any]:
    arguments = operator._schema.arguments
    defaults = [argument.default_value for argument in arguments]
    at = [argument.name for argument in arguments].index("process_group")
    method, kind = OPERATORS[name]
    as_called = _caller(name, [argument.name for argument in arguments[at + 1 :]])
    several = len(operator._schema.returns) == 2

    def run(keys: Any, *given: Any) -> Any:
        caller = sys._getframe().f_back
        is_called_by_program = caller is not None and caller.f_code.co_filename == _CALLERS
        is_part = not is_called_by_program and kind is not None and _is_part(operator, caller)
        tensors = _behind(given[at], given[:at]) if is_called_by_program or is_part else None
        if tensors is None:
            return operator.redispatch(keys & BELOW, *given)
        rest = (*given[at + 1 :], *defaults[len(given) :])
        work = getattr(tensors, method)(*as_called(given[:at], rest))
        if is_part:
            handed = over(work, given[:at])
        else:
            if isinstance(work, HeldWork):
                hold(work)
            handed = work.boxed()
        return (given[0], handed) if several else handed

    untraced(run)
    return run


def _caller(name: str, rest: list[str]) -> Callable[[tuple[Any, ...], tuple[Any, ...]], tuple[Any, ...]]:
    """What makes the arguments of a method from those of its operator; most is decided once."""
    kind = OPERATORS[name][1]
    if kind is None:  # between two ranks: who, and which tag
        return lambda tensors, values: (*tensors, *values)
    made = getattr(c10d, kind)
    fields = [(FIELDS[key], i) for i, key in enumerate(rest) if key in FIELDS and hasattr(made(), FIELDS[key])]
    splits = [i for i, key in enumerate(rest) if key in SPLITS]
    reduction = rest.index("reduce_op") if "reduce_op" in rest else None
    timeout = rest.index("timeout") if "timeout" in rest else None
    reductions: Any = dist.ReduceOp
    unboxed = reductions.unbox
    leaves_tensor = name == "barrier"

    def as_called(tensors: tuple[Any, ...], values: tuple[Any, ...]) -> tuple[Any, ...]:
        opts = made()
        for field, i in fields:
            if values[i] is not None:
                setattr(opts, field, values[i])
        if reduction is not None:
            opts.reduceOp = unboxed(values[reduction])
        if timeout is not None and values[timeout] >= 0:
            opts.timeout = timedelta(milliseconds=values[timeout])
        if leaves_tensor:
            return (opts,)
        return (*tensors, *(values[i] for i in splits), opts) if splits else (*tensors, opts)

    return as_called


def _is_part(operator: Any, caller: Any) -> bool:
    """Whether a tensor made of others calls an operator for one of them; the program gets one's work, of several."""
    if caller is None or caller.f_code.co_filename != _OPERATOR_CALLS or caller.f_locals.get("self") is not operator:
        return False
    while caller is not None and caller.f_code.co_filename != _CALLERS:
        caller = caller.f_back
    return caller is not None and any(map(_has_special, caller.f_locals.values()))


def _has_special(given: Any) -> bool:
    kind: Any = type(given)
    return any(map(_has_special, given)) if kind is list else is_special(kind)


def _behind(boxed: Any, tensors: tuple[Any, ...]) -> Any:
    """What runs a call of one of torch's groups; ``None`` where that is not mycel, or torch has to do it."""
    first = tensors[0]
    while type(first) is list and first:
        first = first[0]
    if type(first) is list:  # nothing where this rank is not the root
        first = _first(tensors)
    device = getattr(first, "device", None)
    if device is None or device.type not in WITH_MEMORY or _c10d._allow_inflight_collective_as_graph_input():
        return None  # in the last case torch would keep the work, but not its Python side
    try:
        backend = ProcessGroup.unbox(boxed)._get_backend(device)
    except RuntimeError:  # torch says better what is missing
        return None
    return getattr(backend, "tensor_group", None)


def _first(given: Any) -> Any:
    """The first tensor in nested lists."""
    if not isinstance(given, list | tuple):
        return given
    return next((found for each in given if (found := _first(each)) is not None), None)
