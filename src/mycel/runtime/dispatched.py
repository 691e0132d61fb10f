"""Collectives as torch's dispatcher sees them, before torch 2.14.

Torch calls the methods of a process group written in Python directly, so that nobody who listens at the dispatcher
hears of them. Where somebody does, ``MycelProcessGroup`` lets torch's own base class dispatch the operator
(``c10d::allreduce_`` and so on) with the group as its argument. Modes see it, traces record it, fake and meta tensors
end there, wrappers open themselves. Beneath all of these the operator arrives here, one step before torch's kernels
for CPUs and GPUs, and whatever belongs to a group of mycel's is done by that group; so is a traced graph that is
replayed later. Operators of other groups go on to torch's kernels.

A rank may be looked at while the others are not: the same call runs in either case. For what happens from torch 2.14
on, see ``mycel.runtime.called_by_python``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import ProcessGroup

__all__ = [
    "BELOW",
    "FIELDS",
    "OPERATORS",
    "SPLITS",
    "WITH_MEMORY",
    "install",
    "is_for_dispatcher",
    "is_special",
    "over",
    "remembered",
    "route",
]

#: Of each operator, the method that it stands for, and what holds its options.
OPERATORS: dict[str, tuple[str, str | None]] = {
    "allreduce_": ("allreduce", "AllreduceOptions"),
    "allreduce_coalesced_": ("allreduce_coalesced", "AllreduceCoalescedOptions"),
    "broadcast_": ("broadcast", "BroadcastOptions"),
    "reduce_": ("reduce", "ReduceOptions"),
    "_allgather_base_": ("all_gather_single", "AllgatherOptions"),
    "allgather_": ("allgather", "AllgatherOptions"),
    "allgather_into_tensor_coalesced_": ("all_gather_single_coalesced", "AllgatherOptions"),
    "allgather_coalesced_": ("allgather_coalesced", "AllgatherOptions"),
    "_reduce_scatter_base_": ("reduce_scatter_single", "ReduceScatterOptions"),
    "reduce_scatter_": ("reduce_scatter", "ReduceScatterOptions"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter_single_coalesced", "ReduceScatterOptions"),
    "barrier": ("barrier", "BarrierOptions"),
    "alltoall_base_": ("all_to_all_single", "AllToAllOptions"),
    "alltoall_": ("alltoall", "AllToAllOptions"),
    "gather_": ("gather", "GatherOptions"),
    "scatter_": ("scatter", "ScatterOptions"),
    "send": ("send", None),
    "recv_": ("recv", None),
    "recv_any_source_": ("recv_anysource", None),
}
#: Names of operators' arguments, and of the same in options.
FIELDS = {
    "root_rank": "rootRank",
    "root_tensor": "rootTensor",
    "asyncOp": "asyncOp",
    "async_op": "asyncOp",
    "device_ids": "device_ids",
    "sparse_indices": "sparseIndices",
}
#: Operators' arguments that are no options.
SPLITS = ("output_split_sizes", "input_split_sizes")
#: Kinds of devices whose tensors have memory; meta tensors have none.
WITH_MEMORY = frozenset(("cpu", "cuda"))
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_num_modes = torch._C._len_torch_dispatch_stack
_is_profiling = torch._C._autograd._profiler_enabled
#: The keys of torch's own kernels.
BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
_c10d: Any = torch._C._distributed_c10d  # its type information lacks a function
_routing = threading.Lock()
_called = threading.local()
_libraries: list[Any] = []


# -- the way in -------------------------------------------------------------------------------------------------


def is_for_dispatcher(arguments: Iterable[Any]) -> bool:
    """Whether a call has to go through torch's dispatcher; nearly always not, and that is found in a microsecond.

    Args:
        arguments: of the call: tensors, lists of these, lists of lists, and others.
    """
    if _num_modes() or _is_profiling():
        return True
    for given in arguments:
        kind: Any = type(given)
        if kind is list:
            if is_for_dispatcher(given):
                return True
        elif kind in _PLAIN:
            if given.is_meta:
                return True
        elif is_special(kind):
            return True
    return False


def is_plain(tensors: Any) -> bool:
    """Whether ``tensors`` is a list of one tensor that is memory and nothing else, and nobody is looking.

    Of such a call ``is_for_dispatcher`` is false, unless the tensor is on a device without memory.
    """
    if type(tensors) is not list or len(tensors) != 1:
        return False
    return type(tensors[0]) in _PLAIN and not _num_modes() and not _is_profiling()


@functools.lru_cache(maxsize=1024)
def is_special(kind: Any) -> bool:
    """Whether tensors of a class see operators before torch's kernels do.

    Args:
        kind: the class.
    """
    disabled: Any = torch._C._disabled_torch_dispatch_impl
    return issubclass(kind, torch.Tensor) and getattr(kind, "__torch_dispatch__", disabled) is not disabled


@contextmanager
def remembered(arguments: tuple[Any, ...]) -> Iterator[None]:
    """Holds what an operator cannot carry, while one is dispatched.

    That is the factor of a reduction, and the Python side of a work: torch hands on its C++ side alone, and a work
    whose Python side is gone can no longer be waited for.

    Args:
        arguments: of the call that is dispatched.
    """
    before = getattr(_called, "now", None)
    _called.now = _Called(next((a.reduceOp for a in arguments if hasattr(a, "reduceOp")), None), [])
    try:
        yield
        if len(_called.now.works) > 1:  # of a tensor made of several, of which the caller gets one's work only
            for work in _called.now.works:
                work.wait()
    finally:
        _called.now = before


class _Called(NamedTuple):
    """A call that is being dispatched by this thread."""

    reduction: Any
    works: list[dist.Work]


# -- the way out ------------------------------------------------------------------------------------------------


def route() -> None:
    """From now on, operators of groups that have a ``tensor_group`` are run by it; before torch 2.14."""
    install(_run_here)


def install(runner: Callable[[str, Any], Callable[..., Any]]) -> None:
    """Put kernels of ours one step before torch's; once a process.

    Args:
        runner: makes the kernel, of an operator's name and the operator.
    """
    with _routing:
        if _libraries:
            return
        library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        for name in OPERATORS:
            operator = getattr(torch.ops.c10d, name).default
            library.impl(name, runner(name, operator), "BackendSelect", with_keyset=True)
        _libraries.append(library)


def _run_here(name: str, operator: Any) -> Callable[..., Any]:
    arguments = operator._schema.arguments
    names = [argument.name for argument in arguments]
    at = names.index("process_group")
    several = len(operator._schema.returns) == 2

    def run(keys: Any, *given: Any) -> Any:
        whole = (*given, *(argument.default_value for argument in arguments[len(given) :]))
        boxed = whole[at]
        group = ProcessGroup.unbox(boxed) if isinstance(boxed, torch.ScriptObject) else boxed
        tensors = getattr(group, "tensor_group", None)
        if tensors is None or not all(map(_is_memory, whole[:at])):
            return operator.redispatch(keys & BELOW, *given)
        method = getattr(tensors, OPERATORS[name][0])
        values = dict(zip(names[at + 1 :], whole[at + 1 :], strict=True))
        work = method(*_as_called(name, whole[:at], values))
        handed = _handed_on(work, whole[:at])
        return (whole[0], handed) if several else handed

    return run


def _is_memory(given: Any) -> bool:
    if isinstance(given, list | tuple):
        return all(map(_is_memory, given))
    return given.device.type in WITH_MEMORY


def _as_called(name: str, tensors: tuple[Any, ...], rest: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a method, from those of its operator."""
    kind = OPERATORS[name][1]
    if kind is None:  # between two ranks: who, and which tag
        return (*tensors, *rest.values())
    opts = getattr(c10d, kind)()
    for key, value in rest.items():
        if key == "timeout":
            opts.timeout = timedelta(milliseconds=value)
        elif key == "reduce_op":
            opts.reduceOp = _reduction(value)
        elif key in FIELDS and value is not None and hasattr(opts, FIELDS[key]):
            setattr(opts, FIELDS[key], value)
    if name == "barrier":
        return (opts,)
    splits = [rest[key] for key in SPLITS if key in rest]
    return (*tensors, *splits, opts)


def _handed_on(work: dist.Work, tensors: tuple[Any, ...]) -> Any:
    """A work as operators give it. Where nobody in Python holds it, the call is over before it is handed on."""
    now: _Called | None = getattr(_called, "now", None)
    if now is not None:
        now.works.append(work)
        return work.boxed()
    return over(work, tensors)


def over(work: dist.Work, tensors: tuple[Any, ...]) -> Any:
    """What an operator gives of a work that nobody in Python will hold: one that is over.

    Args:
        work: of the call.
        tensors: the operator's.
    """
    work.wait()
    over: torch.futures.Future[Any] = torch.futures.Future()
    over.set_result(list(tensors))
    return _c10d._create_work_from_future(over).boxed()


def _reduction(boxed: Any) -> Any:
    """What an operator's reduction is.

    Raises:
        TypeError: it multiplies first, and this is not the call that said by what.
    """
    now: _Called | None = getattr(_called, "now", None)
    if now is not None and now.reduction is not None:
        return now.reduction
    kind = dist.ReduceOp.RedOpType(boxed.op())
    if kind == dist.ReduceOp.PREMUL_SUM:
        raise TypeError("a traced reduction with a factor cannot be run again: the trace does not hold the factor")
    return dist.ReduceOp(kind)
