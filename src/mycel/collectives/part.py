"""A vertex's part of a schedule: its own transfers, found without looking at all others each time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mycel.collectives.columns import BoolArray, Columns, IntArray, Transfer
from mycel.collectives.orbit import Orbit
from mycel.collectives.slots import Slots
from mycel.compiled import compiled, interpreted_while_small

__all__ = ["Part", "Parts"]

#: Most steps of the pipeline that a piece takes on a thin channel: programs have room for every step.
_MOST_STEPS = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """What one vertex sends and receives.

    Attributes:
        transfers: by their number in the schedule, in order.
        levels: of each of them, the step of the pipeline in which its first piece moves; see ``Parts``.
        final: those after which a place of this vertex first holds everyone's contribution, where an average is to be
            divided.
    """

    transfers: dict[int, Transfer]
    levels: dict[int, int]
    final: frozenset[int]


class Parts:
    """All vertices' parts.

    What waits for a transfer comes one step of the pipeline after it, or more where its channel is a thin one: in a
    step, a channel moves a piece if it carries as much as the longest chunk, and half of one if it carries half of
    that. Without it, messages of thin channels would stand in an order in which they cannot come, and what goes the
    same way would wait for them (decision 0092).

    Args:
        columns: the schedule's transfers; those of rank 0's chunks if there is an orbit.
        orbit: what the schedule was made of, if it was.
        num_ranks: vertices that hold a contribution of their own.
        owner: of each of these chunks, the only vertex whose sum counts, or -1 for all; ``None`` if nothing is added.
        units: of each of these chunks.
        is_timed: channels keep the order of the transfers instead of going by depth (``Schedule.is_timed``).
    """

    def __init__(
        self,
        columns: Columns,
        orbit: Orbit | None,
        num_ranks: int,
        owner: IntArray | None,
        units: IntArray,
        *,
        is_timed: bool = False,
    ) -> None:
        self._columns, self._orbit, self._num_ranks, self._owner = columns, orbit, num_ranks, owner
        self._units, self._is_timed = units, is_timed

    def of(self, vertex: int) -> Part:
        """One vertex's part."""
        if self._orbit is None:
            numbers = which = self._index[1][self._index[0][vertex] : self._index[0][vertex + 1]]
            found = self._columns.some(which.tolist())
        else:
            which, move = self._orbit.at(vertex)
            numbers = which * self._num_ranks + move
            found = self._orbit.some(which, move)
        levels, final = self._levels[which].tolist(), self._final[which].tolist()
        names = numbers.tolist()
        return Part(
            transfers=dict(zip(names, found, strict=True)),
            levels=dict(zip(names, levels, strict=True)),
            final=frozenset(
                number for number, t, last in zip(names, found, final, strict=True) if last and t.dst == vertex
            ),
        )

    @cached_property
    def _index(self) -> tuple[IntArray, IntArray]:
        """Where each vertex's transfers begin among those sorted by vertex, and these."""
        c = self._columns
        both = np.stack([c.src, c.dst], axis=1).reshape(-1)
        order = np.argsort(both, kind="stable")
        first = np.concatenate([[0], np.cumsum(np.bincount(both))])
        # A vertex that is never used has no transfers; the last ones need a place to look it up, too.
        return np.append(first, np.full(len(c) + self._num_ranks, first[-1])), order // 2

    @cached_property
    def _slots(self) -> Slots:
        return Slots.of(self._columns)

    @cached_property
    def _levels(self) -> IntArray:
        c = self._columns
        longest = int(self._units.max(initial=0))
        if self._orbit is not None or not len(c) or longest == self._units.min():
            return c.order_levels(is_timed=self._is_timed)
        channel = c.channels
        carried = np.bincount(channel, weights=self._units[c.chunk])
        duration = np.ceil(np.minimum(longest / np.maximum(carried, 1.0), _MOST_STEPS)).astype(np.int64)
        return c.order_levels(np.maximum(duration, 1)[channel], is_timed=self._is_timed)

    @cached_property
    def _final(self) -> BoolArray:
        """Whether each transfer completes a sum where it counts."""
        c, slots = self._columns, self._slots
        if self._owner is None:
            return np.zeros(len(c), dtype=np.bool_)
        width = 1 + int(max(slots.source.max(initial=0), slots.target.max(initial=0)))
        base = np.where(slots.base < 0, slots.target, slots.base)  # what is empty adds nothing
        places = np.concatenate([c.chunk * width + slot for slot in (slots.source, slots.target, base)])
        known, place = np.unique(places, return_inverse=True)
        vertex, at = np.divmod(known % width, slots.width)
        held = ((vertex < self._num_ranks) & (at == 0)).astype(np.int64)
        counts = self._owner[c.chunk]
        matters = c.reduce & ((counts < 0) | (counts == c.dst))
        source, target, base = place.reshape(3, -1).astype(np.int64)
        return interpreted_while_small(_completed, len(c))(
            source, target, base, c.reduce, matters, held, self._num_ranks
        )


@compiled
def _completed(
    source: IntArray,
    target: IntArray,
    base: IntArray,
    reduce: BoolArray,
    matters: BoolArray,
    held: IntArray,
    num_ranks: int,
) -> BoolArray:
    """Which transfers make a place hold everyone's contribution.

    ``held``: how many each place holds before; ``base``: the place from which each sum starts, or its own.
    """
    last = np.zeros(len(source), dtype=np.bool_)
    for t in range(len(source)):
        sent = max(held[source[t]], 1)  # a switch holds nothing before, and sends nothing until it does
        if reduce[t]:
            before = max(held[target[t]], held[base[t]])
            held[target[t]] = before + sent
            last[t] = matters[t] and before > 0 and before + sent == num_ranks
        else:
            held[target[t]] = sent
    return last
