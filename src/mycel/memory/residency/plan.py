"""Which units of a model's parameters are near at which moment: by next use, under the room of each moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mycel.brief import brief
from mycel.errors import SynthesisError, UsageError
from mycel.memory.tiers import SectionRing

__all__ = ["Demand", "ResidencyPlan", "by_next_use", "check_residency", "fixed_set", "least_recently_used", "ring"]


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What an iteration asks of near memory.

    Attributes:
        names: of units.
        sizes: bytes of each unit's parameters.
        uses: of each moment, indices of the units that compute then.
        room: of each moment, bytes that parameters may take: the budget without activations and all else.
        fresh: whether copies of the iteration before may be used again, as between micro-batches of one step. After
            an optimizer's step far from the device they are old.

    Raises:
        UsageError: lengths that differ, or a unit that is not there.
        SynthesisError: a moment whose units do not fit; the message says which, and by how much.

    Examples:
        >>> demand = Demand(names=("a", "b"), sizes=(4, 4), uses=((0,), (1,), (1,), (0,)), room=(4, 4, 4, 4))
        >>> by_next_use(demand).loads
        ((0,), (1,), (), (0,))
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    uses: tuple[tuple[int, ...], ...]
    room: tuple[int, ...]
    fresh: bool = False

    __repr__ = brief

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes) or len(self.uses) != len(self.room):
            raise UsageError(
                f"{len(self.names)} names of {len(self.sizes)} units, {len(self.uses)} moments with room for "
                f"{len(self.room)}: they must be as many"
            )
        for moment, units in enumerate(self.uses):
            wrong = [unit for unit in units if not 0 <= unit < len(self.sizes)]
            if wrong:
                raise UsageError(f"moment {moment} uses unit {wrong[0]}, and there are {len(self.sizes)}")
        worst = max(range(len(self.uses)), key=self.overshoot, default=None)
        if worst is not None and self.overshoot(worst) > 0:
            needed = ", ".join(self.names[unit] for unit in self.uses[worst])
            raise SynthesisError(
                f"moment {worst} needs {needed or 'no parameters'} near, {self._needed(worst)} bytes, and has room "
                f"for {self.room[worst]}: {self.overshoot(worst)} bytes too little"
            )

    def overshoot(self, moment: int) -> int:
        """Bytes by which what a moment needs is larger than its room.

        Args:
            moment: its index.
        """
        return self._needed(moment) - self.room[moment]

    def _needed(self, moment: int) -> int:
        return sum(self.sizes[unit] for unit in self.uses[moment])

    def repeated(self, count: int) -> Demand:
        """Several iterations one after the other, the first of them with nothing near: the passes of one step.

        Args:
            count: at least 1.
        """
        return replace(self, uses=self.uses * count, room=self.room * count, fresh=False)

    def with_ahead(self) -> Demand:
        """The same, where each moment also has the next ones' units near if they fit, so that they come in time.

        Between two blocks there are moments that use none: units of the second come while the first computes.
        """
        count = len(self.uses)
        uses = list(self.uses)
        for moment, units in enumerate(self.uses):
            left = count if self.fresh else count - moment
            later = ((moment + step) % count for step in range(1, left))
            following = next((each for each in later if self.uses[each]), None)
            if following is None:
                continue
            both = tuple(dict.fromkeys((*units, *self.uses[following])))
            beside = range(moment + 1, following) if following > moment else range(moment + 1, moment + 1)
            ahead = sum(self.sizes[unit] for unit in self.uses[following])
            if sum(self.sizes[unit] for unit in both) <= self.room[moment] and all(
                ahead <= self.room[each] for each in beside
            ):
                uses[moment] = both
        return replace(self, uses=tuple(uses))


@dataclass(frozen=True, kw_only=True)
class ResidencyPlan:
    """What comes near, and what stays, of an iteration in its steady state.

    Attributes:
        way: how it was found.
        near: of each moment, the units that are near, from its beginning to its end.
        loads: of each moment, those that come for it, or with it for the next.
        loaded_bytes: of parameters, an iteration.
        peak_bytes: of parameters near at once.
    """

    way: str
    near: tuple[frozenset[int], ...]
    loads: tuple[tuple[int, ...], ...]
    loaded_bytes: int
    peak_bytes: int

    __repr__ = brief

    def to_json(self) -> dict[str, Any]:
        """As an object of JSON."""
        return {
            "version": 1,
            "way": self.way,
            "near": [sorted(units) for units in self.near],
            "loads": [list(units) for units in self.loads],
            "loaded_bytes": self.loaded_bytes,
            "peak_bytes": self.peak_bytes,
        }


#: Of the units that could go, which goes first: the one for which this is largest.
_Rank = Callable[[int, int], float]


def by_next_use(demand: Demand) -> ResidencyPlan:
    """What is needed latest goes first: with units of one size nothing loads less often.

    Args:
        demand: of an iteration.

    References:
        L. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 1966;
        Fang et al., "PatrickStar", TPDS 2023, section 6.3 (eviction by the moments that one iteration has shown).
    """
    count = len(demand.uses)
    at: list[list[int]] = [[] for _ in demand.sizes]
    for moment, units in enumerate(demand.uses):
        for unit in units:
            at[unit].append(moment)

    def farthest(unit: int, moment: int) -> float:
        later = next((use for use in at[unit] if use > moment), None)
        if later is not None:
            return later
        return at[unit][0] + count if demand.fresh and at[unit] else float("inf")

    return _played(demand, farthest, "by next use")


def least_recently_used(demand: Demand) -> ResidencyPlan:
    """What was used longest ago goes first.

    Args:
        demand: of an iteration.
    """
    last = [-1.0] * len(demand.sizes)
    clock = [0.0]

    def age(unit: int, moment: int) -> float:
        return -last[unit]

    def used(unit: int) -> None:
        clock[0] += 1
        last[unit] = clock[0]

    return _played(demand, age, "least recently used", used)


def ring(demand: Demand, *, slots: int) -> ResidencyPlan:
    """What computes is near with the units that are used next; what has computed gives its slot to another.

    The backward pass turns the ring the other way. As many units are near at every moment, whatever else there is
    room for: more moves than by next use, and what memory takes is known before, as is what the link has to do in
    the time of one block.

    Args:
        demand: of an iteration.
        slots: units that are near, of whatever size.

    Raises:
        UsageError: fewer than two slots.
        SynthesisError: so many units do not fit at some moment; the message says by how much.

    References:
        See ``mycel.memory.tiers.SectionRing``.

    Examples:
        >>> uses = ((0,), (1,), (2,), (2,), (1,), (0,))
        >>> demand = Demand(names=("a", "b", "c"), sizes=(4, 4, 4), uses=uses, room=(8,) * 6)
        >>> ring(demand, slots=2).loads
        ((0, 1), (2,), (), (), (0,), ())
    """
    sections = SectionRing(slots)
    near: list[frozenset[int]] = []
    for moment in range(len(demand.uses)):
        held = sections.near(demand.uses, moment, again=demand.fresh)
        size = sum(demand.sizes[unit] for unit in held)
        if size > demand.room[moment]:
            raise SynthesisError(
                f"moment {moment}: a ring of {slots} slots has {size} bytes near, and there is room for "
                f"{demand.room[moment]}: {size - demand.room[moment]} bytes too little"
            )
        near.append(frozenset(held))
    return _plan(demand, f"in a ring of {slots} slots", near)


def fixed_set(demand: Demand) -> ResidencyPlan:
    """Units that are near for good, the most bytes of them that leave room at every moment, and the others as needed.

    Args:
        demand: of an iteration.
    """
    chosen: set[int] = set()
    for unit in sorted(range(len(demand.sizes)), key=lambda unit: -demand.sizes[unit]):
        more = chosen | {unit}
        if all(
            sum(demand.sizes[each] for each in more | set(units)) <= room
            for units, room in zip(demand.uses, demand.room, strict=True)
        ):
            chosen = more
    near = [frozenset(chosen | set(units)) for units in demand.uses]
    return _plan(demand, "fixed set", near)


def _played(demand: Demand, rank: _Rank, way: str, used: Callable[[int], None] = lambda unit: None) -> ResidencyPlan:
    """Iterations, until one ends as it began."""
    held: set[int] = set()
    seen: list[frozenset[int]] = []
    for _ in range(len(demand.sizes) + 2):
        begun = frozenset(held)
        seen = []
        for moment, units in enumerate(demand.uses):
            held |= set(units)
            size = sum(demand.sizes[unit] for unit in held)
            spare = sorted(held - set(units), key=lambda unit: -rank(unit, moment))
            for unit in spare:
                if size <= demand.room[moment] and rank(unit, moment) != float("inf"):
                    break
                held.discard(unit)
                size -= demand.sizes[unit]
            for unit in units:
                used(unit)
            seen.append(frozenset(held))
        if not demand.fresh:
            break
        if frozenset(held) == begun:
            break
    return _plan(demand, way, seen)


def _plan(demand: Demand, way: str, near: Sequence[frozenset[int]]) -> ResidencyPlan:
    """Loads that follow from what is near."""
    before: frozenset[int] = near[-1] if demand.fresh and near else frozenset()
    loads = []
    for units in near:
        loads.append(tuple(sorted(units - before)))
        before = units
    sizes = [sum(demand.sizes[unit] for unit in units) for units in near]
    return ResidencyPlan(
        way=way,
        near=tuple(near),
        loads=tuple(loads),
        loaded_bytes=sum(demand.sizes[unit] for units in loads for unit in units),
        peak_bytes=max(sizes, default=0),
    )


def check_residency(demand: Demand, plan: ResidencyPlan) -> int:
    """Bytes that a plan loads, counted again by the rules alone.

    Args:
        demand: of an iteration.
        plan: for it.

    Raises:
        SynthesisError: what a moment uses is not near, more is near than there is room for, or something is near that
            was not loaded.
    """
    held: set[int] = set(plan.near[-1]) if demand.fresh else set()
    loaded = 0
    for moment, (units, near, loads) in enumerate(zip(demand.uses, plan.near, plan.loads, strict=True)):
        held |= set(loads)
        loaded += sum(demand.sizes[unit] for unit in loads)
        if not near <= held:
            raise SynthesisError(f"moment {moment}: {demand.names[min(near - held)]} is near and was not loaded")
        held = set(near)
        if not set(units) <= held:
            missing = demand.names[min(set(units) - held)]
            raise SynthesisError(f"moment {moment}: {missing} is used and not near")
        size = sum(demand.sizes[unit] for unit in held)
        if size > demand.room[moment]:
            raise SynthesisError(
                f"moment {moment}: {size} bytes are near, {size - demand.room[moment]} more than there is room for"
            )
    return loaded
