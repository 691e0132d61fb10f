"""Carries a memory plan out on an unchanged model: what blocks save is kept, moved or computed again as it says."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from mycel.comm.recomputing import recomputing
from mycel.errors import CommunicationError, MycelError, UsageError
from mycel.memory.swap.mover import Moved, Mover
from mycel.memory.swap.order import Event, backward_order, order_of, outs_of
from mycel.memory.swap.saved import Packed, Record, Stays, moves
from mycel.memory.tiers.far import FarMemory
from mycel.memory.tiers.link import Link
from mycel.memory.tiers.near import Claim, NearMemory, key_of
from mycel.planning.residency import MemoryInstance, MemoryPlan
from mycel.units import format_size

__all__ = ["Pass", "Swapping"]


class Swapping:
    """What ``attach`` did to a model.

    Attributes:
        instance: what was planned.
        plan: that is carried out.
        near: what blocks' activations take: ``held`` now, ``peak`` so far, of ``capacity`` bytes.
        far: where what goes out is: ``used_bytes``, ``peak_bytes``.
        iteration_us: of the latest forward and backward, measured; ``None`` before the first.

    Examples:
        >>> from torch import nn
        >>> from mycel.memory import EmulatedLink, attach, measure
        >>> from mycel.planning.residency import fast_plan
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
        >>> link = EmulatedLink(bandwidth_gbps=1)
        >>> x = torch.randn(32, 64)
        >>> instance = measure(model, list(model), lambda: model(x).sum(), link=link, budget=40_000)
        >>> with attach(model, list(model), instance, fast_plan(instance), link=link) as swapping:
        ...     model(x).sum().backward()
        >>> 0 < swapping.near.peak <= 40_000
        True
        >>> link.close()
    """

    def __init__(
        self,
        instance: MemoryInstance,
        plan: MemoryPlan,
        names: list[str],
        link: Link,
        far: FarMemory,
        deadline_s: float,
    ) -> None:
        self.instance, self.plan, self.far, self.names = instance, plan, far, names
        self.near = NearMemory(instance.capacity)
        self.iteration_us: float | None = None
        self.closed = False
        self.mover = Mover(self.near, far, link, deadline_s)
        self.order, self.outs = order_of(instance, plan), outs_of(plan)
        self.records: weakref.WeakValueDictionary[int, Record] = weakref.WeakValueDictionary()
        self.passes: weakref.WeakSet[Pass] = weakref.WeakSet()
        self._undo: list[Any] = []
        self._current: weakref.ref[Pass] | None = None

    @property
    def moved(self) -> Moved:
        """Bytes that went out, came back, were forwarded or spilled, and seconds that computation waited."""
        return self.mover.moved

    # -- passes ---------------------------------------------------------------------------------------------------

    def enter(self, block: int) -> Pass:
        """The forward pass that this block's forward belongs to.

        Args:
            block: that begins.

        Raises:
            CommunicationError: what an iteration before sent does not get to far memory.
        """
        current = None if self._current is None else self._current()
        if current is None or block <= current.latest:
            if not self.passes:  # graphs that were let go without a backward pass are over too
                self.mover.iteration_over()
            try:
                self.mover.begin_iteration()
            except CommunicationError as error:
                raise CommunicationError(f"block {block} ({self.names[block]}): {error}") from error
            current = Pass(self)
            self._current = weakref.ref(current)
            self.passes.add(current)
        current.latest = block
        return current

    def record_of(self, x: Tensor) -> tuple[Record, bool]:
        """The record of a tensor's storage, and whether it is new."""
        key = key_of(x)
        record = self.records.get(key)
        if record is not None and self.near.knows(key):
            if record.near is None:
                if record.same(x):  # let go here, alive elsewhere
                    record.near = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
                    self.moved.forwarded_bytes += record.num_bytes
                    return record, False
            elif record.near.untyped_storage()._cdata == key:
                return record, False
        record = Record(x, self.far)
        self.records[key] = record
        return record, True

    def spare(self, active: int | None) -> Iterator[Record]:
        """What could be moved for others, what is needed last first."""
        alive = [(block, record) for one in list(self.passes) for block, record in one.alive() if block != active]
        alive.sort(key=lambda each: each[0])
        for _, record in alive:
            if active is None or active not in record.blocks:
                yield record

    # -- the end --------------------------------------------------------------------------------------------------

    def on_close(self, undo: Any) -> None:
        """Have something undone by ``close``."""
        self._undo.append(undo)

    def close(self) -> None:
        """Blocks compute as they did before. Graphs that are still there cannot be gone through any more."""
        if self.closed:
            return
        self.closed = True
        for undo in self._undo:
            undo()
        self._undo = []
        self.mover.close()
        with self.near.changed:
            for one in list(self.passes):
                for _, record in one.alive():
                    record.drop()

    def __enter__(self) -> Swapping:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def explain(self) -> str:
        """What happens to which block, what that takes by the plan, and what it took."""
        lines = [
            f"{len(self.names)} blocks: {', '.join(f'{n} {policy}' for policy, n in self.plan.counts.items())}; "
            f"planned {self.plan.iteration_us / 1000:.3g} ms an iteration, {self.instance.ideal_us / 1000:.3g} ms "
            "with nothing moved and nothing computed again"
        ]
        for name, block, policy in zip(self.names, self.instance.blocks, self.plan.policy, strict=True):
            lines.append(f"  {name}: {policy}, saves {format_size(block.saved)}")
        moved = self.moved
        if self.iteration_us is not None:
            lines.append(f"measured {self.iteration_us / 1000:.3g} ms in the latest iteration")
        lines.append(
            f"near {format_size(self.near.peak)} at most, of {format_size(self.near.capacity)}; "
            f"far {format_size(self.far.peak_bytes)} at most; out {format_size(moved.out_bytes)}, "
            f"in {format_size(moved.in_bytes)}, still near when asked for {format_size(moved.forwarded_bytes)}, "
            f"against the plan {format_size(moved.spilled_bytes)}; waited {moved.waited_s:.3g} s"
        )
        return "\n".join(lines)


class Pass:
    """One forward pass, and what of the plan has been done in it.

    Held by the graph that it made, and gone with it.
    """

    def __init__(self, swapping: Swapping) -> None:
        self.swapping = swapping
        self.latest = -1
        self.at: int | None = None
        #: What went wrong. The exception itself holds frames, which hold the graph, which holds this.
        self.wrong = ""
        self.begun_s = time.perf_counter()
        self._saved: list[list[weakref.ref[Record]]] = [[] for _ in swapping.instance.blocks]
        self._ended: set[int] = set()
        self._outs = list(swapping.outs)
        self._left = list(reversed(swapping.order))
        self._claims: dict[int, Claim] = {}
        self._again = False
        self._advancing = False

    def alive(self) -> Iterator[tuple[int, Record]]:
        """Blocks and what they saved, where that still lives."""
        for block, saved in enumerate(self._saved):
            for found in saved:
                record = found()
                if record is not None:
                    yield block, record

    def _of(self, block: int) -> list[Record]:
        return [record for found in self._saved[block] if (record := found()) is not None]

    # -- the order of the plan ------------------------------------------------------------------------------------

    def _advance(self, event: Event) -> None:
        """Do what the plan has before an event, waiting for room where there is none."""
        with self.swapping.near.changed:
            if event not in self._left:
                return
            self._advancing = True  # the link's thread begins nothing meanwhile: one of two takes what is next
        try:
            while (turn := self._left.pop()) != event:
                if turn.kind == "in":
                    self._bring(turn.block, must=True)
                elif turn.kind == "backward end":
                    self._let_go(turn.block)
        finally:
            self._advancing = False

    def ahead(self) -> None:
        """Begin the transfers that the plan has next, as far as there is room."""
        with self.swapping.near.changed:
            if self.swapping.closed or self.wrong or self._advancing:
                return
            while self._left and self._left[-1].kind == "in":
                if not self._bring(self._left[-1].block, must=False):
                    return
                self._left.pop()

    def _bring(self, block: int, *, must: bool) -> bool:
        swapping = self.swapping
        if block in self._outs:  # it did not even go out
            if must:
                self._outs.remove(block)
            return must
        coming = [r for r in self._of(block) if r.near is None or r.going]
        return swapping.mover.fetch(coming, block=block, must=must, spare=swapping.spare(block), check=self._check)

    def _let_go(self, block: int) -> None:
        """A block's backward is over: what somebody's graph still holds need not be near."""
        with self.swapping.near.changed:
            for record in self._of(block):
                if record.has_copy and not record.kept and min(record.blocks) >= block and record.coming is None:
                    record.drop()

    def _check(self) -> None:
        if self.swapping.closed:
            raise UsageError("swapping was closed between a forward pass and its backward pass")
        if self.wrong:
            raise CommunicationError(self.wrong)

    # -- forward --------------------------------------------------------------------------------------------------

    def forward(self, block: int, stays: Stays) -> None:
        """A block's forward begins.

        Args:
            block: which.
            stays: knows its arguments.
        """
        self._check()
        swapping = self.swapping
        self._advance(Event("forward", block))
        who = f"block {block} ({swapping.names[block]})"
        here = sum(size for key, size in stays.inputs.items() if swapping.near.knows(key))
        needed = max(0, swapping.instance.blocks[block].saved - here)
        self._claims[block] = swapping.mover.room(needed, who, swapping.spare(block), self._check)
        self.ahead()

    def forward_end(self, block: int, *, whole: bool) -> None:
        """It is over.

        Args:
            block: which.
            whole: whether it came to its end.
        """
        swapping = self.swapping
        claim = self._claims.pop(block, None)
        if claim is not None:
            swapping.near.release(claim)
        if not whole:
            return
        self._advance(Event("forward end", block))
        self._ended.add(block)
        while self._outs and self._outs[0] in self._ended:
            self._send(self._outs.pop(0))
        self.ahead()

    def _send(self, block: int) -> None:
        here = weakref.ref(self)

        def told(wrong: str) -> None:
            one = here()
            if one is None:
                return
            if wrong:
                one.wrong = f"block {block} ({one.swapping.names[block]}): {wrong}"
            try:
                one.ahead()
            except Exception as error:
                one.wrong = f"what comes back for a later block: {error}"

        try:
            self.swapping.mover.send(self._of(block), told)
        except MycelError as error:
            kind = CommunicationError if isinstance(error, CommunicationError) else UsageError
            raise kind(f"block {block} ({self.swapping.names[block]}): {error}") from error

    # -- saved tensors --------------------------------------------------------------------------------------------

    def pack(self, x: Tensor, block: int, stays: Stays) -> Any:
        """What the graph holds of a tensor that a block saves."""
        if not moves(x) or x in stays:
            return x.detach()
        swapping = self.swapping
        with swapping.near.changed:
            record, new = swapping.record_of(x)
            if new:
                self.count(x, block)
            if block not in record.blocks:
                record.blocks.add(block)
                self._saved[block].append(weakref.ref(record))
            if swapping.plan.policy[block] in ("keep", "recompute"):
                record.kept = True
            return Packed(x, record, block, self)

    def count(self, x: Tensor, block: int) -> None:
        """A storage that a block made is held from now on.

        Raises:
            UsageError: it does not fit.
        """
        near = self.swapping.near
        near.count(x, self._claims.get(block))
        over = near.held + near.claimed - near.capacity
        if over > 0:
            planned = self.swapping.instance.blocks[block].saved
            raise UsageError(
                f"block {block} ({self.swapping.names[block]}) saves more than the {planned} bytes of the plan, and "
                f"near memory is {over} bytes above its {near.capacity}: measure with inputs of this size, and plan "
                "for them"
            )

    def unpack(self, packed: Any) -> Tensor:
        """The tensor of what ``pack`` gave."""
        if isinstance(packed, Tensor):
            return packed
        self._check()
        record, block = packed.record, packed.block
        swapping = self.swapping
        if recomputing() and (self.at is None or block < self.at):  # its output has no gradient that could tell
            self.backward(block)
        while record.near is None or record.coming is not None:
            if record.near is None:
                self._check()
                found = {id(r): r for r in [record, *self._of(block)]}
                swapping.mover.fetch(
                    found.values(), block=block, must=True, spare=swapping.spare(block), check=self._check
                )
            try:
                swapping.mover.arrive(record, block)
            except CommunicationError as error:
                self.wrong = str(error)
                raise
        if record.written(packed.saving):
            raise UsageError(
                f"block {block} ({swapping.names[block]}): a tensor of shape {list(packed.size)} that it saved for "
                "its gradients was modified in place afterwards"
            )
        made: Tensor = packed.tensor()
        return made

    # -- backward -------------------------------------------------------------------------------------------------

    def backward(self, block: int) -> None:
        """A block's backward begins, and that of later ones is over."""
        self._check()
        if self.at is None:
            if self._again:  # a graph that was kept is gone through again
                with self.swapping.near.changed:
                    self._left = list(reversed(backward_order(self.swapping.order)))
            self._again = True
            here = weakref.ref(self)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: _over(here))
        elif block >= self.at:
            return
        self.at = block
        if self.swapping.plan.policy[block] in ("recompute", "recompute_swap"):
            self._advance(Event("recompute", block))
        else:
            self._advance(Event("backward", block))
        self.ahead()

    def recompute(self, block: int) -> None:
        """A block is computed again."""
        self._check()
        swapping = self.swapping
        of, who = swapping.instance.blocks[block], f"computing block {block} ({swapping.names[block]}) again"
        self._claims[block] = swapping.mover.room(of.saved - of.input, who, swapping.spare(block), self._check)
        self.ahead()

    def recomputed(self, block: int) -> None:
        """A block was computed again, or that failed."""
        claim = self._claims.pop(block, None)
        if claim is not None:
            self.swapping.near.release(claim)
        self._advance(Event("backward", block))
        self.ahead()

    def over(self) -> None:
        """A backward pass came to its end."""
        self.at = None
        self.swapping.iteration_us = (time.perf_counter() - self.begun_s) * 1e6
        with self.swapping.near.changed:
            self._left = []
        for block in range(len(self._saved)):
            self._let_go(block)
        self.swapping.mover.iteration_over()


def _over(here: weakref.ref[Pass]) -> None:
    one = here()
    if one is not None:
        one.over()
