"""The engine for devices: runs a rank's program on tensors, step by step, on a lane beside the caller's work.

Nothing here waits for the device: a call queues its copies, groups of messages and additions, and returns. What
belongs together in time is put in order by the lane (a stream): each group comes after the additions of the step
before, and they come after their group.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mycel.collectives.cost import Choice
from mycel.collectives.lower import RankTemplate
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import CollectiveName
from mycel.runtime.communicator import Call
from mycel.runtime.device.choice import choose_for_steps
from mycel.runtime.device.lane import Lane
from mycel.runtime.device.steps import Message, Prepared, prepare
from mycel.runtime.device.transport import End, Transport
from mycel.runtime.device.work import DeviceWork
from mycel.runtime.reduce_kernels import ReduceOp

__all__ = ["DeviceEngine"]

Tensor = torch.Tensor

#: Messages of prepared programs that are kept; the least recently used programs go first.
_CACHE_MESSAGES = 200_000
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
        rank, size: in the group; at least two ranks.
        schedules: verified schedules of a collective by method, the same on every rank.
        prove: returns if programs of a schedule are right for a call in pieces of so many elements.
        transport: moves bytes between the ranks.
        lane: where work is queued.
        piece_bytes: a piece size to use instead of the model's.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        schedules: Callable[[CollectiveName, int | None], Mapping[str, Schedule]],
        prove: Callable[[Schedule, Call, int], None],
        transport: Transport,
        lane: Lane,
        piece_bytes: int | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self._schedules, self._prove = schedules, prove
        self._transport = transport
        self._lane = lane
        self._piece_bytes = piece_bytes
        self._order = threading.Lock()
        self._plans: dict[tuple[str, int | None, str], RankTemplate] = {}
        self._choices: dict[tuple[str, int | None, int], Choice] = {}
        self._prepared: OrderedDict[tuple[object, ...], Prepared] = OrderedDict()
        self._num_messages = 0

    def choice(self, name: CollectiveName, root: int | None, num_bytes: int) -> Choice:
        """Which schedule and piece size serve a collective of ``num_bytes`` (of the whole array) best."""
        key = (name, root, num_bytes)
        if key not in self._choices:
            found = choose_for_steps(self._schedules(name, root), num_bytes, piece_bytes=self._piece_bytes)
            self._choices[key] = found
        return self._choices[key]

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
        choice = self.choice(call.name, call.root, call.num_elements * call.item_bytes)
        shape = (call.num_elements, call.item_bytes, call.block_elements)
        key = (call.name, call.root, choice.method, choice.piece_bytes, *shape)
        if key in self._prepared:
            self._prepared.move_to_end(key)
            return self._prepared[key]
        plan_key = (call.name, call.root, choice.method)
        if plan_key not in self._plans:
            self._plans[plan_key] = RankTemplate(self._schedules(call.name, call.root)[choice.method], self.rank)
        plan, piece = self._plans[plan_key], max(1, choice.piece_bytes // call.item_bytes)
        self._prove(plan.schedule, call, piece)
        made = prepare(
            plan.expand(call.num_elements, piece, block_elements=call.block_elements),
            plan.steps(call.num_elements, piece, block_elements=call.block_elements),
            call.item_bytes,
        )
        self._prepared[key] = made
        self._num_messages += made.num_messages
        while self._num_messages > _CACHE_MESSAGES and len(self._prepared) > 1:
            _, dropped = self._prepared.popitem(last=False)
            self._num_messages -= dropped.num_messages
        return made

    def _run(self, call: Call, prepared: Prepared, given: Tensor, output: Tensor) -> None:
        """Queue a program's work on the lane, which is current."""
        for copy in prepared.copies:
            target = output[copy.offset : copy.offset + copy.count]
            source = given[copy.source_offset : copy.source_offset + copy.count]
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)
        scratch = torch.empty(prepared.scratch_elements, dtype=output.dtype, device=output.device)
        staging = torch.empty(prepared.staging_elements, dtype=output.dtype, device=output.device)
        buffers = (given, output, scratch, staging)
        memory = [buffer.view(torch.uint8) for buffer in buffers]

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
