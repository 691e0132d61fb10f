"""From what a model needs and a budget: which of its units are near at which moment, and which for good."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from mycel.brief import brief
from mycel.errors import SynthesisError
from mycel.memory.needs import Moment, Needs
from mycel.memory.needs.moments import moment_name
from mycel.memory.residency.plan import Demand, ResidencyPlan, by_next_use, ring

__all__ = ["Parts", "Schedule", "demand_of", "least_budget", "parts_of", "schedule_of", "tightest"]

#: Bytes that a step computes beside a slice of parameters, times the slice's: denominators and their like.
_BESIDE = 3


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A model's parameters in units, as blocks use them.

    Attributes:
        names: of units: blocks' names; of parameters that several blocks have, theirs together.
        parameters: of each unit, names in the model.
        sizes: bytes of each unit's parameters on this rank.
        trained: bytes of those that are trained.
        uses: of each block, indices of its units.
        largest: bytes of the largest parameter.
        buffers: bytes of what stays near whatever happens.
        gathered: whether units are FSDP2's, whose shards are read when they are gathered and not while they compute.
    """

    names: tuple[str, ...]
    parameters: tuple[tuple[str, ...], ...]
    sizes: tuple[int, ...]
    trained: tuple[int, ...]
    uses: Mapping[str, tuple[int, ...]]
    largest: int
    buffers: int
    gathered: bool = False

    __repr__ = brief

    def needed(self, moment: Moment) -> tuple[int, ...]:
        """Indices of the units that have to be near at a moment.

        Args:
            moment: of a step.
        """
        if self.gathered:
            return tuple(self.names.index(name) for name in moment.gathers)
        return self.uses.get(moment.block, ())

    def finished(self, moment: Moment) -> tuple[int, ...]:
        """Indices of the units whose gradients come of it.

        Args:
            moment: of a step.
        """
        return self.uses.get(moment.block, ()) if moment.phase == "backward" else ()


def parts_of(model: nn.Module, blocks: Mapping[str, nn.Module]) -> Parts:
    """Units of a model: a block's own parameters are one, and each set that several blocks share is another.

    Args:
        model: the module.
        blocks: that hold all its parameters, by name.

    Examples:
        >>> first, last = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        >>> last.weight = first.weight
        >>> model = nn.Sequential(first, nn.Linear(4, 4), last)
        >>> parts = parts_of(model, dict(model.named_children()))
        >>> parts.names, parts.uses["2"]
        (('0 and 2', '1'), (0,))
    """
    owners: dict[int, list[str]] = {}
    for block, module in blocks.items():
        for parameter in module.parameters():
            owners.setdefault(id(parameter), []).append(block)
    units: dict[tuple[str, ...], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        units.setdefault(tuple(owners[id(parameter)]), []).append((name, parameter))
    keys = list(units)
    every = [parameter for unit in units.values() for _, parameter in unit]
    return Parts(
        names=tuple(" and ".join(key) for key in keys),
        parameters=tuple(tuple(name for name, _ in unit) for unit in units.values()),
        sizes=tuple(sum(-(-_nbytes(p) // 64) * 64 for _, p in unit) for unit in units.values()),
        trained=tuple(sum(_nbytes(p) for _, p in unit if p.requires_grad) for unit in units.values()),
        uses={block: tuple(i for i, key in enumerate(keys) if block in key) for block in blocks},
        largest=max((_nbytes(p) for p in every), default=0),
        buffers=sum(b.numel() * b.itemsize for b in model.buffers()),
    )


def _nbytes(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.itemsize


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What the executor does at which moment.

    Attributes:
        moments: phase and block of each, as hooks say them, of all passes of a step.
        parts: the units.
        demand: of a step, without units that are near for good.
        plan: for it.
        pinned: indices of units that are near for good, with gradients and optimizer state.
        budget: bytes of near memory.
        peak: bytes of near memory that are used at most.
        moved_bytes: over the link, both ways, a step.
    """

    moments: tuple[tuple[str, str], ...]
    parts: Parts
    demand: Demand
    plan: ResidencyPlan
    pinned: frozenset[int]
    budget: int
    peak: int
    moved_bytes: int

    __repr__ = brief

    def to_json(self) -> dict[str, Any]:
        """As an object of JSON."""
        return {
            "version": 1,
            "budget": self.budget,
            "peak": self.peak,
            "moved_bytes": self.moved_bytes,
            "pinned": [self.parts.names[unit] for unit in sorted(self.pinned)],
            "moments": [list(moment) for moment in self.moments],
            "plan": self.plan.to_json(),
        }


def demand_of(
    needs: Needs, parts: Parts, budget: int, *, pinned: frozenset[int] = frozenset(), accumulates: bool = False
) -> tuple[tuple[tuple[str, str], ...], Demand]:
    """The moments that hooks tell apart, and what each leaves to parameters.

    Args:
        needs: of the model's step.
        parts: its units.
        budget: bytes of near memory.
        pinned: units that are near for good.
        accumulates: whether gradients of a pass before are there, as with several micro-batches.

    Raises:
        SynthesisError: a moment does not fit; the message says by how much.
    """
    always = parts.buffers + sum(_whole(needs, parts, unit) - parts.trained[unit] for unit in pinned)
    first, last = _finishes(needs, parts)
    moments: list[tuple[str, str]] = []
    working: list[int] = []
    uses: list[tuple[int, ...]] = []
    carried, going = 0, 0
    for place, moment in enumerate(needs.moments):
        if moment.phase == "step":
            continue
        is_told = bool(moment.block) or (moment.phase == "forward" and bool(moments))
        if not is_told and not moments:
            carried = moment.working
            continue
        if not is_told:  # the loss's own backward, before any block's
            working[-1] = max(working[-1], moment.working)
            continue
        needed = tuple(unit for unit in parts.needed(moment) if unit not in pinned)
        moments.append((moment.phase, moment.block))
        # Of units near for good, gradients that are there; of units that several blocks share, what has been summed.
        there = sum(
            parts.trained[unit]
            for unit in range(len(parts.sizes))
            if (unit in pinned and (accumulates or first[unit] < place)) or first[unit] < place <= last[unit]
        )
        working.append(max(moment.working, carried) + there + (going if moment.phase == "backward" else 0))
        uses.append(needed)
        carried = 0
        # Gradients of this block are on their way while the next one computes.
        going = sum(parts.trained[unit] for unit in parts.finished(moment) if unit not in pinned)
    sizes = tuple(0 if unit in pinned else size for unit, size in enumerate(parts.sizes))
    room = tuple(budget - always - held for held in working)
    try:
        demand = Demand(names=parts.names, sizes=sizes, uses=tuple(uses), room=room)
    except SynthesisError as error:
        raise SynthesisError(f"a budget of {budget} bytes: {error}") from None
    return tuple(moments), demand


def _finishes(needs: Needs, parts: Parts) -> tuple[list[int], list[int]]:
    """Places of the first and the last moment in which a unit's gradients come, far off where none do."""
    first, last = [len(needs.moments)] * len(parts.sizes), [-1] * len(parts.sizes)
    for place, moment in enumerate(needs.moments):
        for unit in parts.finished(moment):
            first[unit], last[unit] = min(first[unit], place), place
    return first, last


def least_budget(needs: Needs, parts: Parts) -> int:
    """Bytes of near memory below which no schedule fits: one block at a time, and the step on one parameter.

    Args:
        needs: of the model's step.
        parts: its units.
    """
    return tightest(needs, parts)[0]


def tightest(needs: Needs, parts: Parts) -> tuple[int, str]:
    """Bytes of near memory below which no schedule fits, and the moment that needs them.

    Args:
        needs: of the model's step.
        parts: its units.
    """
    far_off = 1 << 60
    moments, demand = demand_of(needs, parts, far_off)
    step = parts.buffers + _step_bytes(needs, parts), "the step on the largest parameter"
    held = (
        (far_off - room + sum(demand.sizes[unit] for unit in units), moment_name(phase, block))
        for (phase, block), units, room in zip(moments, demand.uses, demand.room, strict=True)
    )
    return max((step, *held), key=lambda each: each[0])


def schedule_of(
    needs: Needs, parts: Parts, budget: int, *, micro_batches: int = 1, slots: int | None = None
) -> Schedule:
    """The schedule that moves least, as long as everything fits.

    Units are pinned, gradients and optimizer state with them, one after the other for as long as fewer bytes move:
    what a pinned unit takes is missing for others' copies.

    Args:
        needs: of the model's step.
        parts: its units.
        budget: bytes of near memory.
        micro_batches: backward passes of a step.
        slots: of a ring of units, all of which come and go; what moves least if not given.

    Raises:
        SynthesisError: not even one unit at a time fits, or not so many slots; the message says by how much.
        UsageError: fewer than two slots.

    References:
        Fang et al., "PatrickStar", TPDS 2023, section 6.2 (optimizer's chunks on the device by the margin that
        activations leave).
    """
    best: Schedule | None = None
    step = _step_bytes(needs, parts)
    order = sorted(range(len(parts.sizes)), key=lambda unit: -parts.sizes[unit])
    for count in range(len(order) + 1 if slots is None else 1):
        pinned = frozenset(order[:count])
        pinned_bytes = parts.buffers + sum(_whole(needs, parts, unit) for unit in pinned)
        over = pinned_bytes + step - budget
        if over > 0 and count == 0:
            raise SynthesisError(
                f"a budget of {budget} bytes: the optimizer's step on the largest parameter alone, of "
                f"{parts.largest}, needs {pinned_bytes + step}: {over} bytes too little"
            )
        if over > 0:
            break
        try:
            moments, once = demand_of(needs, parts, budget, pinned=pinned, accumulates=micro_batches > 1)
        except SynthesisError:
            if count == 0:
                raise
            break
        demand = once.repeated(micro_batches)
        plan = by_next_use(demand.with_ahead()) if slots is None else ring(demand, slots=slots)
        gradients = sum(size for unit, size in enumerate(parts.trained) if unit not in pinned)
        moved = plan.loaded_bytes + micro_batches * gradients
        if best is None or moved < best.moved_bytes:
            held = (
                sum(demand.sizes[unit] for unit in near) + budget - room
                for near, room in zip(plan.near, demand.room, strict=True)
            )
            best = Schedule(
                moments=moments * micro_batches,
                parts=parts,
                demand=demand,
                plan=plan,
                pinned=pinned,
                budget=budget,
                peak=max(*held, pinned_bytes + step),
                moved_bytes=moved,
            )
    if best is None:  # count 0 either raised or was kept
        raise SynthesisError(f"a budget of {budget} bytes: nothing fits")
    return best


def _state_share(needs: Needs, parts: Parts) -> float:
    trained = sum(parts.trained)
    return needs.most("optimizer") / trained if trained else 0.0


def _whole(needs: Needs, parts: Parts, unit: int) -> int:
    """Bytes of a unit near for good: parameters, gradients, optimizer state."""
    return parts.sizes[unit] + round(parts.trained[unit] * (1.0 + _state_share(needs, parts)))


def _step_bytes(needs: Needs, parts: Parts) -> int:
    """Near memory that a slice of the step takes: state on its way to far memory, and what is computed beside it."""
    if not sum(parts.trained):
        return 0
    return round(parts.largest * (_state_share(needs, parts) + _BESIDE))


def order_of(moments: Sequence[tuple[str, str]]) -> dict[tuple[str, str], list[int]]:
    """Indices of each moment in an iteration.

    Args:
        moments: phase and block of each.
    """
    found: dict[tuple[str, str], list[int]] = {}
    for index, moment in enumerate(moments):
        found.setdefault(moment, []).append(index)
    return found
