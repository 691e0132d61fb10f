"""Gather and scatter: the least time of a flow from one source, and a flow in whole units that takes it.

What one rank sends to all others, each its own block, is a flow of one commodity: the least time is that of a cut,
found by Newton's method on fractions as all cuts are (``mycel.collectives.bound``), and with capacities and demands
in whole units there is a whole-numbered flow (Ford and Fulkerson). So the optimum is always exact, and reached.

References:
    L. R. Ford, D. R. Fulkerson, "Flows in Networks", 1962, chapter I (whole-numbered flows).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from mycel.collectives.maxflow import IntArray, as_int64, build_rows, push_flow
from mycel.topology.model import Topology

__all__ = ["least_time", "whole_flow"]


def least_time(fabric: Topology, source: int, demand: Sequence[int]) -> tuple[Fraction, list[int]]:
    """The least time in which a source can send every rank its own, and the links that say so.

    Args:
        fabric: the topology.
        source: a rank, with a demand of 0.
        demand: units that each rank wants; not all 0.

    Returns:
        Units over capacity, exactly, and the links of a cut that cannot be passed faster.

    Raises:
        SynthesisError: capacities or demands are too large for 64-bit flows.
    """
    inside = np.ones(len(fabric.vertices), dtype=np.bool_)
    inside[fabric.ranks[source]] = False
    while True:
        cut = [i for i, link in enumerate(fabric.links) if inside[link.dst] and not inside[link.src]]
        wanted = sum(units for units, vertex in zip(demand, fabric.ranks, strict=True) if inside[vertex])
        time = Fraction(wanted, sum(fabric.links[i].capacity for i in cut))
        lacking, distance, _ = _push(fabric, source, demand, time)
        if not lacking:
            return time, cut
        inside = distance[:-1] >= 0


def whole_flow(fabric: Topology, source: int, demand: Sequence[int], time: Fraction) -> IntArray:
    """Whole units over each link that serve every rank, ``time.denominator`` of them for each unit of demand.

    Args:
        fabric: the topology.
        source: a rank.
        demand: units that each rank wants.
        time: ``least_time``, or more.
    """
    return _push(fabric, source, demand, time)[2]


def _push(fabric: Topology, source: int, demand: Sequence[int], time: Fraction) -> tuple[int, IntArray, IntArray]:
    """A maximum flow: what it lacks, how far each vertex is from the sink in what is left, and units of each link."""
    sink = len(fabric.vertices)
    tail = np.array([*(link.src for link in fabric.links), *fabric.ranks], dtype=np.int64)
    head = np.array([*(link.dst for link in fabric.links), *(sink for _ in fabric.ranks)], dtype=np.int64)
    capacity = as_int64(
        [*(link.capacity * time.numerator for link in fabric.links), *(units * time.denominator for units in demand)]
    )
    start, slot, ends = build_rows(sink + 1, tail, head)
    residual = np.zeros(2 * len(tail), dtype=np.int64)
    residual[::2] = capacity
    is_source = np.zeros(sink + 1, dtype=np.bool_)
    is_source[fabric.ranks[source]] = True
    distance = np.empty(sink + 1, dtype=np.int64)
    work = np.empty((3, sink + 2), dtype=np.int64)
    total = sum(demand) * time.denominator
    pushed = push_flow(start, slot, ends, residual, is_source, sink, total, distance, work)
    return total - int(pushed), distance, (capacity - residual[::2])[: len(fabric.links)]
