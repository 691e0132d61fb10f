"""Trains a model whose parameters, gradients and optimizer are far: near is what its schedule says."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from mycel.comm.handle import Handle
from mycel.comm.recomputing import recomputing
from mycel.errors import UsageError
from mycel.memory.needs.blocks import watched
from mycel.memory.needs.groups import watched_groups
from mycel.memory.needs.moments import Phase
from mycel.memory.residency.schedule import Schedule, order_of
from mycel.memory.residency.sharded import shards_of
from mycel.memory.residency.slots import Plain, Slot
from mycel.memory.residency.stepping import Stepping
from mycel.memory.residency.units import Unit
from mycel.memory.tiers import FarMemory, Link

__all__ = ["Residency", "is_resident"]

_MARK = "_mycel_residency"


def is_resident(model: nn.Module) -> bool:
    """Whether a model's parameters come and go by a schedule.

    Args:
        model: the module as it was held.
    """
    return getattr(model, _MARK, None) is not None


class Residency(Handle):
    """Keeps a model's units far and brings each near for when it computes, as a schedule says, until it is closed.

    The model, its loop and its optimizer stay as they are. Outside of passes parameters, gradients and optimizer
    state are plain tensors in far memory of the host: ``state_dict``, clipping and checkpoints see those. Results are
    those of training without it, bit for bit, as long as the optimizer looks at each parameter for itself.

    A pass without gradients brings what training's forward has near: where there is room the next block's parameters
    come while one computes. A pass in another order than the schedule's keeps near what computes and nothing more.

    Of a model that ``fully_shard`` has sharded, units are FSDP2's: this rank's shards are near when FSDP2 gathers
    them. What it gathers, reduces and frees, and when, stays its own business.

    Args:
        model: the module.
        optimizer: that trains it.
        schedule: by ``schedule_of``, for this model.
        blocks: the schedule's blocks, by name: modules, or FSDP2's groups where units are those.
        link: between far and near.
        far: lends far memory.
        device: where near is.

    Attributes:
        peak_bytes: of units near at once, at most.
        waited_s: seconds for which computation stood still for parameters.
        off_schedule: moments that came in another order than planned.

    Where a link fails or far memory is full, the pass fails with the unit's name and leaves nothing near; gradients
    of passes before it are lost with it, so that a step begins again. The next pass works when the cause is gone.

    Raises:
        UsageError: a schedule for another model, a model that has one already, or far memory without room; the model
            is as it was.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        blocks: Mapping[str, Any],
        link: Link,
        *,
        far: FarMemory | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if is_resident(model):
            raise UsageError(f"{type(model).__name__} is held by a schedule already; close that first")
        known = dict(model.named_parameters())
        for unit in schedule.parts.parameters:
            for name in unit:
                if name not in known:
                    raise UsageError(f"the schedule is for another model: {type(model).__name__} has no {name}")
        self.model, self.schedule, self.link = model, schedule, link
        self.far = FarMemory() if far is None else far
        self.peak_bytes, self.waited_s, self.off_schedule = 0, 0.0, 0
        self._places = order_of(schedule.moments)
        self._at = self._looked_at = -1
        phases = [phase for phase, _ in schedule.moments]
        self._first_backward = phases.index("backward") if "backward" in phases else len(phases)
        where = torch.device(device)
        parts = schedule.parts
        self._units: dict[int, Unit] = {}
        with ExitStack() as undo:
            for index, name in enumerate(parts.names):
                if index not in schedule.pinned:
                    self._units[index] = Unit(name, self._slots(index, known, blocks), self.far, where)
                    undo.callback(self._units[index].close)
            far_parameters = {id(slot.parameter) for unit in self._units.values() for slot in unit.slots}
            self._stepping = Stepping(
                optimizer,
                self.far,
                slice_bytes=schedule.parts.largest,
                before=self._ready_to_step,
                after=self._stale,
                is_far=far_parameters.__contains__,
            )
            undo.pop_all()
        self._of_block = {block: [u for u in units if u in self._units] for block, units in parts.uses.items()}
        #: Of units that are gathered: those of a moment, by phase and block.
        self._gathered: dict[tuple[str, str], list[int]] = {}
        for moment, used in zip(schedule.moments, schedule.demand.uses, strict=True):
            ours = self._gathered.setdefault(moment, [])
            ours += [unit for unit in used if unit not in ours]
        if parts.gathered:
            self._watch = watched_groups(dict(blocks), self._begins, self._reads)
        else:
            self._watch = watched(dict(blocks), self._begins)
        self._watch.__enter__()
        self._hooks: list[Any] = []
        for each in self._units.values():
            for place, slot in enumerate(each.slots):
                if slot.parameter.requires_grad:
                    hook = partial(self._accumulated, each, place)
                    self._hooks.append(slot.parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        self._in_pass = self._failed = False
        self._entered: list[int] = []
        self._behind: Unit | None = None
        self._is_open = True
        object.__setattr__(model, _MARK, self)

    def _slots(self, index: int, known: Mapping[str, nn.Parameter], blocks: Mapping[str, Any]) -> list[Slot]:
        parts = self.schedule.parts
        if parts.gathered:
            return list(shards_of(parts.names[index], blocks[parts.names[index]]))
        return [Plain(name, known[name]) for name in parts.parameters[index]]

    # -- moments ------------------------------------------------------------------------------------------------

    def _begins(self, phase: Phase, block: str) -> None:
        """A block begins, or what is between blocks."""
        if not self._is_open:
            raise UsageError("residency was closed between a forward pass and its backward pass")
        if phase == "forward" and self._in_pass and not recomputing():
            self._forget()  # a backward pass that failed
        if phase == "forward":
            self._failed = self._failed and recomputing()
        elif self._failed:
            raise UsageError("memory failed in this pass: begin again with its forward pass")
        with self._whole():
            self._goes(phase, block)

    def _goes(self, phase: Phase, block: str) -> None:
        needed = finished = self._of_block.get(block, [])
        if self.schedule.parts.gathered:
            needed = self._gathered.get((phase, block), [])
        if phase == "forward":
            self._left()
        elif not self._in_pass:
            self._in_pass = True
            Variable._execution_engine.queue_callback(self._end)
        near, at = self._planned(phase, block, needed)
        if phase == "backward":
            self._backward(finished)
        for index, unit in self._units.items():
            if index not in near and index not in needed:
                if index in finished and phase == "backward":
                    unit.drop()  # its gradients are still to come
                else:
                    self._release(unit)
        for index in (*needed, *sorted(near - set(needed))):
            self._units[index].start(self.link)
        held = sum(unit.num_bytes for unit in self._units.values() if unit.is_near)
        self.peak_bytes = max(self.peak_bytes, held)
        begin = time.perf_counter()
        for index in needed:
            self._units[index].enter()
        self.waited_s += time.perf_counter() - begin
        self._at = at
        self._entered = list(needed) if phase == "forward" else []

    def _planned(self, phase: Phase, block: str, needed: list[int]) -> tuple[frozenset[int], int]:
        """What is near at this moment, and its place in the iteration."""
        places = self._places.get((phase, block), [])
        if phase == "forward" and not torch.is_grad_enabled():
            return self._looked_up(places, needed), self._at
        at = next((place for place in places if place > self._at), places[0] if places else None)
        if at is None:
            self.off_schedule += 1
            return frozenset(needed), self._at
        skipped = at != self._at + 1 and not (at == 0 and self._at in (-1, len(self.schedule.moments) - 1))
        self.off_schedule += skipped
        return (frozenset(needed) if skipped else self.schedule.plan.near[at]) - self.schedule.pinned, at

    def _looked_up(self, places: list[int], needed: list[int]) -> frozenset[int]:
        """Without gradients: what the first training forward has near there, where more is held beside it."""
        places = [place for place in places if place < self._first_backward]
        at = next((place for place in places if place > self._looked_at), places[0] if places else None)
        follows = at is not None and at in (0, self._looked_at + 1)
        self._looked_at = -1 if at is None else at
        return self.schedule.plan.near[self._looked_at] - self.schedule.pinned if follows else frozenset(needed)

    def _reads(self, name: str) -> None:
        """A group's shards are read: they are near by now, unless somebody gathers out of turn."""
        index = self.schedule.parts.names.index(name)
        unit = self._units.get(index)
        if unit is None:
            return
        with self._whole():
            unit.start(self.link)
            begin = time.perf_counter()
            unit.enter()
        self.waited_s += time.perf_counter() - begin
        if index not in self._entered:
            self._entered = [*self._entered, index]

    def _left(self) -> None:
        for index in self._entered:
            self._units[index].leave()
        self._entered = []

    def _release(self, unit: Unit) -> None:
        if unit.waiting_for and self._in_pass:  # parameters that got no gradient
            unit.waiting_for = set()
            unit.send(self.link)
        unit.drop()

    # -- backward -----------------------------------------------------------------------------------------------

    def _backward(self, needed: list[int]) -> None:
        for index, unit in self._units.items():
            if unit is not self._behind and index not in needed:
                unit.settle()
        for index in needed:
            self._units[index].expect()
        self._behind = self._units[needed[-1]] if needed else self._behind

    def _accumulated(self, unit: Unit, place: int, parameter: torch.Tensor) -> None:
        with self._whole():
            unit.arrived(place, self.link)

    def _end(self) -> None:
        """A backward pass is over: parameters are far ones, with their gradients."""
        with self._whole():
            for unit in self._units.values():
                unit.send(self.link)
            self._settle()
        self._in_pass = False

    def _settle(self) -> None:
        for unit in self._units.values():
            unit.settle()
            unit.show()
        self._behind = None

    def _ready_to_step(self) -> None:
        """What is near is old after the step, and the step needs room."""
        self._settle()
        for unit in self._units.values():
            unit.drop()

    def _stale(self) -> None:
        """Far parameters have been written: near copies are old."""
        for unit in self._units.values():
            unit.drop()
        self._at = -1

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Where something cannot move, nothing of the pass stays near."""
        try:
            yield
        except Exception:
            self._failed = True
            self._forget()
            raise

    def _forget(self) -> None:
        for unit in self._units.values():
            unit.forget()
        self._in_pass, self._entered, self._behind, self._at = False, [], None, -1

    # -- the end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Parameters, gradients and optimizer state near for good, with the values that they have now."""
        if not self._is_open:
            return
        self._is_open = False
        self._watch.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()
        if self._in_pass:
            self._forget()
        for unit in self._units.values():
            unit.close()
        self._stepping.close()
        object.__delattr__(self.model, _MARK)

    def explain(self) -> str:
        """What is near and what moves, in a few lines."""
        schedule = self.schedule
        units = len(schedule.parts.names)
        return "\n".join(
            (
                f"{units} units, {len(schedule.pinned)} of them near for good; at most {self.peak_bytes} bytes of "
                f"the others near at once",
                f"near memory: {schedule.peak} of {schedule.budget} bytes at the fullest moment",
                f"over the link: {schedule.moved_bytes} bytes a step, planned; {self.link.fetched_bytes} in and "
                f"{self.link.stored_bytes} out so far; computation waited {self.waited_s:.3g} s",
            )
        )
