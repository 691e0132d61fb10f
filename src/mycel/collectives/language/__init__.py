"""A language for schedules: a function says, over chunks and ranks, how a collective moves.

::

    from mycel.collectives.language import collective

    @collective("all_reduce")
    def ring(array):
        for owner, chunk in enumerate(array.cut(array.num_ranks)):
            turn = [(owner + step) % array.num_ranks for step in range(1, array.num_ranks + 1)]
            chunk.add(*turn)
            chunk.copy(owner, *turn[:-1])

    schedule = ring.on(mycel.load_topology("two_boxes:ranks=8"))

What waits for what follows from the order of the statements. The schedule is verified, simulated, lowered, exported
and run as any other; errors name the author's line.
"""

from __future__ import annotations

from mycel.collectives.language.array import Array, Span, Spans
from mycel.collectives.language.load import load_written
from mycel.collectives.language.statement import Statement, Where
from mycel.collectives.language.written import Built, Written, collective

__all__ = ["Array", "Built", "Span", "Spans", "Statement", "Where", "Written", "collective", "load_written"]
