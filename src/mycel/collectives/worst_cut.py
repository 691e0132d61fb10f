"""The worst cut: which set of vertices lacks most for the capacity into it, exactly.

By Newton's method on fractions: test a value by one max-flow to every rank; each rank that falls short shows a set
with a larger ratio. No floating point is involved and two or three rounds are usual.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from mycel.collectives.maxflow import BoolArray, FlowGraph, as_int64, violated_sets
from mycel.compiled import interpreted_while_small
from mycel.errors import SynthesisError

__all__ = ["largest_ratio"]

#: Most cuts that one step of the search for the least looks at; each of them improves on the step before.
_CUTS_A_STEP = 64


def largest_ratio(graph: FlowGraph, capacity: Sequence[int], weights: Sequence[int]) -> tuple[Fraction, BoolArray]:
    """Largest (weight missing in B) / (capacity into B) over sets B that contain a rank, and such a set.

    Args:
        graph: the fabric, oriented so that data spreads along its arcs.
        capacity: of each arc.
        weights: share of each rank as a root; non-negative integers, not all zero.

    Returns:
        The ratio, and the set, shape ``[num_vertices]``.

    Raises:
        SynthesisError: capacities too large or too finely divided for exact 64-bit flows.
    """
    total = sum(weights)
    exact = np.array(capacity, dtype=object)  # sums of capacities may pass 64 bits before they are scaled down
    ranks = graph.ranks

    def ratio(side: BoolArray) -> Fraction:
        missing = total - sum(w for w, inside in zip(weights, side[ranks].tolist(), strict=True) if inside)
        return Fraction(missing, int(exact[~side[graph.tail] & side[graph.head]].sum()))

    into = np.zeros(graph.num_vertices, dtype=object)
    np.add.at(into, graph.head, exact)
    singles = [Fraction(total - w, c) for w, c in zip(weights, into[ranks].tolist(), strict=True)]
    best = max(singles)
    best_side = np.arange(graph.num_vertices) == ranks[singles.index(best)]
    while True:
        # A cut lacks nothing at rate p/q iff p * capacity + q * weight inside >= q * total.
        p, q = best.numerator, best.denominator
        demand = np.zeros(graph.num_vertices, dtype=np.int64)
        demand[ranks] = as_int64([q * w for w in weights])
        as_int64([p * c for c in capacity] + [q * total])
        scaled = as_int64([p * c for c in capacity])
        kernel = interpreted_while_small(violated_sets, len(graph.tail) * len(ranks))
        found, sides = kernel(
            graph.num_vertices, graph.tail, graph.head, scaled, demand, ranks, min(len(ranks), _CUTS_A_STEP)
        )
        if not found:
            return best, best_side
        value, side = max(((ratio(side), side) for side in sides[:found]), key=lambda item: item[0])
        if value <= best:
            raise SynthesisError(f"internal: the bound search found no better cut than {best}")
        best, best_side = value, side
