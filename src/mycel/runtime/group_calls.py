"""What the calls of a tensor group have in common: who serves them, and how they are started."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from mycel.runtime.communicator import Call, Communicator, Ticket
from mycel.runtime.device.group import DeviceGroup
from mycel.runtime.fallback import Fallback
from mycel.runtime.p2p import PointToPoint
from mycel.runtime.reduce_kernels import DType, ReduceOp
from mycel.runtime.shortcut import FEW, Shortcut
from mycel.runtime.tensors import BITWISE, COMPLEX, DTYPES, OPS
from mycel.runtime.timeouts import given_s
from mycel.runtime.work import MycelWork, span_of

__all__ = ["GroupCalls"]

Tensor = torch.Tensor


#: Elements of a tensor that is small, for what a call costs in Python would show: between machines, inside one.
_SMALL, _SMALL_HERE = 1 << 16, 1 << 20
_NO_TIME = timedelta(0)


def _held(tensor: Tensor) -> tuple[int, object] | None:
    """Where a tensor's elements are, and what holds the memory, whatever becomes of the tensor meanwhile.

    ``None``: a signal handler, or another thread, has given it other memory in between.
    """
    address, memory = tensor.data_ptr(), tensor.untyped_storage()  # a tenth of what ``detach`` takes
    return (address, memory) if tensor.data_ptr() == address else None


class GroupCalls:
    """The ground of ``TensorGroup``; its parts by kind add the collectives.

    Args:
        rank, size: in the group.
        timeout: default time-out of a collective.
        communicator: runs schedules; ``None`` in a group of one rank.
        fallback: torch's own group for what is not scheduled.
        devices: for tensors on GPUs; ``None`` where there are none.
    """

    _most_small = _SMALL  # elements, of groups that are not formed yet, too

    def __init__(
        self,
        rank: int,
        size: int,
        timeout: timedelta,
        communicator: Communicator | None,
        fallback: Fallback,
        devices: DeviceGroup | None,
    ) -> None:
        self._rank, self._size = rank, size
        self._timeout = timeout
        self._communicator = communicator
        self._fallback = fallback
        self._devices = devices
        self._messages = PointToPoint(communicator)
        if communicator is not None and communicator.is_local:
            self._most_small = _SMALL_HERE
        self._no_tensor = torch.zeros(1, dtype=torch.int32)
        #: Small calls that have been run before, by kind.
        self._shortcuts: dict[Hashable, Shortcut] = {}

    def rank(self) -> int:
        """This process's rank in the group."""
        return self._rank

    def size(self) -> int:
        """How many ranks the group has."""
        return self._size

    def _takes(self, tensors: Sequence[Tensor], *, exchange: bool = False) -> bool:
        """Whether a call on these tensors runs over schedules; all ranks must come to the same answer."""
        if self._communicator is None:
            return False
        if self._devices is not None and not self._on_host(tensors):
            return self._devices.takes(tensors, exchange=exchange)
        return all(t.is_cpu and t.layout == torch.strided for t in tensors)

    def _on_host(self, tensors: Sequence[Tensor]) -> bool:
        return not tensors or tensors[0].is_cpu

    def _backend_of(self, tensors: Sequence[Tensor]) -> ProcessGroup:
        """Torch's own backend for tensors like these; made now, if it is Gloo's first call."""
        if self._devices is None or self._on_host(tensors):
            return self._fallback.gloo
        backend: ProcessGroup = self._devices.backend
        return backend

    def _reduction(self, tensors: Sequence[Tensor], opts: Any) -> tuple[ReduceOp, bool, DType] | None:
        """How the tensors are reduced here; ``None``: Gloo's turn."""
        op = OPS.get(opts.reduceOp.op)
        alike = bool(tensors) and len({t.dtype for t in tensors}) == 1
        if op is None or not alike or not self._takes(tensors):
            return None
        of = tensors[0].dtype
        if op[0] in BITWISE and (of.is_floating_point or of.is_complex):
            raise ValueError(f"{op[0].name} is for integers and bool; these tensors are {of}")
        dtype = COMPLEX.get(of) if op[0] is ReduceOp.SUM else None
        dtype = DTYPES.get(of, dtype)
        return None if dtype is None else (*op, dtype)

    def _together(self, issue: Callable[[], dist.Work], *, is_one: bool) -> dist.Work:
        """Issue a call that takes several collectives, unless it is one: signal handlers come after all of them."""
        communicator = self._communicator
        return issue() if is_one or communicator is None else communicator.together(issue)

    def _is_small(self, tensor: Tensor, opts: Any) -> bool:
        """Whether a tensor, of a blocking call without a time-out of its own, is small and in one piece of memory."""
        if getattr(opts, "asyncOp", True) or not tensor.is_cpu or tensor.numel() > self._most_small:
            return False
        return tensor.layout is torch.strided and tensor.is_contiguous() and not opts.timeout > _NO_TIME

    def _kind_of_parts(self, name: str, output: Tensor, input: Tensor, opts: Any, *rest: int) -> Hashable | None:
        """What a blocking call from one small tensor to another is known by; ``None`` for others."""
        if not self._is_small(output, opts) or not self._is_small(input, opts):
            return None
        if output.is_conj() or output.is_neg() or input.is_conj() or input.is_neg():
            return None
        return name, output.dtype, input.dtype, output.shape, input.shape, *rest

    def _has_run_again(self, kind: Hashable, output: Tensor, input: Tensor | None = None) -> bool:
        """Run a call that has been run before, if it has."""
        shortcut, communicator = self._shortcuts.get(kind), self._communicator
        if shortcut is None or communicator is None:
            return False
        to = _held(output)
        by = (0, None) if input is None else _held(input)
        if to is None or by is None:
            return False
        return communicator.run_again(shortcut, (by[0], to[0]), (to[1], by[1]))

    def _remember(self, kind: Hashable, ticket: Ticket) -> None:
        """Keep a call that has gone well, to run it again."""
        if self._communicator is None or len(self._shortcuts) >= FEW:
            return
        shortcut = self._communicator.shortcut(ticket)
        if shortcut is not None:
            self._shortcuts[kind] = shortcut

    def forget_shortcuts(self) -> None:
        """Have all calls take the long way once more: other schedules serve them now."""
        self._shortcuts.clear()

    def _issue(
        self,
        call: Call,
        opts: Any,
        result: list[Tensor],
        settle: Callable[[], None] | None,
        kind: Hashable | None = None,
    ) -> dist.Work:
        """Start a call, or run it if it is a blocking one.

        Args:
            call: what to run.
            opts: torch's, with its time-out.
            result: tensors that hold the result afterwards.
            settle: puts the results to where the caller wants them.
            kind: what calls are known by that may be run again as this one was, if it goes well; see ``shortcut``.
        """
        communicator = self._communicator
        if communicator is None:
            raise RuntimeError("a group of one rank has no communicator")
        buffer = call.keep[0]
        if self._devices is not None and isinstance(buffer, Tensor) and not self._on_host([buffer]):
            with span_of(call.title or call.name, call.num_elements * call.item_bytes) or nullcontext():
                return self._devices.start(call, buffer.device, result, settle)
        timeout_s, span = given_s(opts.timeout), span_of(call.title or call.name, call.num_elements * call.item_bytes)
        if span is not None:
            span.__enter__()  # type: ignore[no-untyped-call]
        if getattr(opts, "asyncOp", True):
            work = MycelWork(communicator, communicator.start(call, timeout_s=timeout_s, settle=settle), result)
            if span is not None:  # it ends when the collective does, wherever that is seen
                span._call_end_callbacks_on_future(work.get_future())
            return work
        try:
            ticket = communicator.run(call, timeout_s=timeout_s, settle=settle)
        finally:
            if span is not None:
                span.__exit__(None, None, None)
        if kind is not None and settle is None:
            self._remember(kind, ticket)
        return MycelWork(communicator, None, result)
