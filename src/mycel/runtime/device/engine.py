"""The engine for devices: runs a rank's program on tensors, step by step, on a lane beside the caller's work.

Nothing here waits for the device: a call queues its copies, groups of messages and additions, and returns. What
belongs together in time is put in order by the lane (a stream): each group comes after the additions of the step
before, and they come after their group.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from mycel.collectives.lower import RankTemplate
from mycel.runtime.calls import Call
from mycel.runtime.device.lane import Lane
from mycel.runtime.device.steps import Message, Prepared, prepare
from mycel.runtime.device.transport import End, Transport
from mycel.runtime.device.work import DeviceWork
from mycel.runtime.planner import Planner
from mycel.runtime.reduce_kernels import ReduceOp

__all__ = ["DeviceEngine"]

Tensor = torch.Tensor

_COMBINE: dict[int, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


class DeviceEngine:
    """This rank's end of a group, on one device.

    Args:
        size: ranks of the group; at least two.
        planner: of the group, for devices.
        transport: moves bytes between the ranks.
        lane: where work is queued.
    """

    def __init__(self, *, size: int, planner: Planner[Prepared], transport: Transport, lane: Lane) -> None:
        self.size = size
        self._planner = planner
        self._transport = transport
        self._lane = lane
        self._order = threading.Lock()

    def start(self, call: Call, result: list[Tensor], settle: Callable[[], None] | None = None) -> DeviceWork:
        """Queue a collective.

        Args:
            call: its ``keep`` holds the buffers, vectors on the device: OUTPUT, and INPUT where there is one. Its
                addresses do not matter here, and it must know the lengths of all blocks.
            result: the tensors that hold the result afterwards.
            settle: copies the result to where the caller wants it; queued as well.
        """
        buffers = [_real(tensor, call.item_bytes) for tensor in call.keep if isinstance(tensor, Tensor)]
        output, given = buffers[0], buffers[-1] if len(buffers) > 1 else buffers[0][:0]
        with self._order, torch.no_grad(), self._lane.enter([output, given, *result]):
            if call.num_elements:
                self._run(call, self._prepare(call), given, output)
            if settle is not None:
                settle()
            return DeviceWork(self._lane, self._lane.mark(), result)

    def _prepare(self, call: Call) -> Prepared:
        def lay_out(plan: RankTemplate, elements: int) -> Prepared:
            program = plan.expand(call.num_elements, elements, block_elements=call.block_elements)
            steps = plan.steps(call.num_elements, elements, block_elements=call.block_elements)
            return prepare(program, steps, call.item_bytes)

        choice = self._planner.choice(call.name, call.root, call.num_elements * call.item_bytes)
        return self._planner.prepared(call, choice, lay_out)

    def _run(self, call: Call, prepared: Prepared, given: Tensor, output: Tensor) -> None:
        """Queue a program's work on the lane, which is current."""
        scratch = torch.empty(prepared.scratch_elements, dtype=output.dtype, device=output.device)
        staging = torch.empty(prepared.staging_elements, dtype=output.dtype, device=output.device)
        buffers = (given, output, scratch, staging)
        memory = [buffer.view(torch.uint8) for buffer in buffers]
        for copy in prepared.copies:
            target = buffers[copy.buffer][copy.offset : copy.offset + copy.count]
            source = buffers[copy.source][copy.source_offset : copy.source_offset + copy.count]
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)

        def ends(messages: tuple[Message, ...]) -> list[End]:
            return [(memory[m.buffer][m.start : m.stop], m.peer) for m in messages]

        combine = _COMBINE[call.reduce_op]
        divisor = _Divisor(output, self.size) if call.average else None
        for step in prepared.steps:
            self._transport.exchange(ends(step.sends), ends(step.receives))
            for a in step.additions:
                target = buffers[a.buffer][a.offset : a.offset + a.count]
                operand = buffers[a.operand][a.operand_offset : a.operand_offset + a.count]
                combine(operand, staging[a.staging_offset : a.staging_offset + a.count], out=target)
                if a.final and divisor is not None:
                    divisor.divide(target)


class _Divisor:
    """Divides sums in place, as ``mycel.runtime.reduce_kernels.scale`` does."""

    def __init__(self, like: Tensor, divisor: int) -> None:
        self._by: Any = divisor
        self._options: dict[str, str] = {}
        if like.dtype in (torch.float32, torch.float64):
            # By a number on the host, a GPU multiplies by its reciprocal instead. 16-bit floats are divided in
            # float32 either way, and could not hold every divisor.
            self._by = torch.full((), divisor, dtype=like.dtype, device=like.device)
        elif not like.is_floating_point():
            self._options = {"rounding_mode": "trunc"}
        self._truths = like.dtype == torch.bool

    def divide(self, tensor: Tensor) -> None:
        if not self._truths:  # the average of a set of truths is their "or"
            torch.div(tensor, self._by, out=tensor, **self._options)


def _real(tensor: Tensor, item_bytes: int) -> Tensor:
    """The same memory as a vector of elements of ``item_bytes``: complex numbers are added in their parts."""
    vector = tensor.detach().view(-1)
    return vector if vector.element_size() == item_bytes else torch.view_as_real(vector).view(-1)
