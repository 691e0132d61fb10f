"""Slots: every place of every vertex under one number, for what goes through a schedule's transfers one by one.

Where partners add each other's sums, a vertex has several places for a chunk, one a sum that it forms (see
``mycel.collectives.schedule``). Slot ``vertex * width + place`` is one of them; where no vertex has more than one
place, slots are vertices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mycel.collectives.columns import Columns, IntArray

__all__ = ["Slots"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slots:
    """Where transfers read and write.

    Attributes:
        width: places that each vertex has at most.
        source, target: slot that each transfer reads, and that it writes; shape ``[num_transfers]``.
        base: for the first addition to a place after the first, the slot of the place before, whose content it adds
            to; -1 of all others. Shape ``[num_transfers]``.
        previous: the addition at the destination that comes right before, -1 of a first one. Additions of a chunk to
            places of one vertex follow each other in the order of the schedule: a vertex keeps that order by itself.
            Where vertices have one place, all are -1, for additions to it commute. Shape ``[num_transfers]``.
    """

    width: int
    source: IntArray
    target: IntArray
    base: IntArray
    previous: IntArray

    @classmethod
    def of(cls, columns: Columns) -> Slots:
        """The slots of a schedule's transfers."""
        nothing = np.full(len(columns), -1, dtype=np.int64)
        if columns.places is None:
            return cls(width=1, source=columns.src, target=columns.dst, base=nothing, previous=nothing)
        read, written = columns.places.T
        width = 1 + int(columns.places.max(initial=0))
        target = columns.dst * width + written
        base, previous = nothing, nothing.copy()
        last: dict[tuple[int, int], int] = {}  # addition to a chunk's slot
        rows = zip(columns.chunk.tolist(), target.tolist(), written.tolist(), columns.reduce.tolist(), strict=True)
        for number, (chunk, slot, place, adds) in enumerate(rows):
            if not adds:
                continue
            before = last.get((chunk, slot))
            if before is None and place:
                base[number] = slot - 1
                before = last.get((chunk, slot - 1))
            previous[number] = -1 if before is None else before
            last[chunk, slot] = number
        return cls(width=width, source=columns.src * width + read, target=target, base=base, previous=previous)
