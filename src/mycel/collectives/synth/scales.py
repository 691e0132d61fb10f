"""Scales: how many trees a root, and how many of them each link may carry.

At a scale U a link of capacity b carries floor(U * b) trees. The optimum needs U = k / x for k trees a root, and what
a link has beyond whole trees is not needed wherever every rank is still served: so the fewest k is found by trying
k = 1, 2, ... with one flow to every rank each, after a glance at the sets that refused smaller ones.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from fractions import Fraction
from math import ceil, gcd, lcm

import numpy as np

from mycel.collectives.bound import Optimum
from mycel.collectives.maxflow import IntArray, as_int64, violated_sets
from mycel.collectives.synth.splitting import trim_to_balance
from mycel.collectives.synth.units import UnitQuestions, Units, Verdict, least_scale
from mycel.topology.model import Topology

__all__ = ["fewest", "least_for", "scale", "scales_within"]

_log = logging.getLogger(__name__)

#: Most trees a root that are tried before the scale at which all capacities are whole, and most work for it: links
#: times ranks, each time that flows to all ranks are solved.
_MOST_TREES = 64
_MOST_WORK = 300_000_000
#: Links times ranks up to which capacity is taken from unbalanced switches step by step.
_TRIMMED = 20_000
#: Sets that are kept from one test, and numbers of trees that are given for a share of the bound.
_SETS = 8
_WITHIN = 3


def scale(best: Optimum) -> tuple[IntArray, IntArray]:
    """Smallest scale at which capacities and demands are whole numbers."""
    x = 1 / best.inverse_x_achieved
    values = [*best.capacities, *(x * w for w in best.weights)]
    unit = lcm(*(v.denominator for v in values))
    whole = [v.numerator * (unit // v.denominator) for v in values]
    divisor = gcd(*whole)
    whole = [v // divisor for v in whole]
    as_int64(whole)
    count = len(best.capacities)
    return as_int64(whole[:count]), as_int64(whole[count:])


def fewest(best: Optimum) -> tuple[IntArray, IntArray]:
    """Units of each arc, and of each root, with the fewest trees a root that were found to meet the optimum."""
    found = next(_holding(best, Fraction(1)), None)
    return scale(best) if found is None else found


def scales_within(best: Optimum, share: Fraction) -> Iterator[tuple[IntArray, IntArray]]:
    """Units of arcs and roots at which at least a share of the optimum is reached, the fewest trees a root first.

    Args:
        best: the solved bound.
        share: above 0, up to 1.
    """
    given = 0
    for units in _holding(best, share):
        yield units
        given += 1
        if given == _WITHIN:
            return
    if not given:
        yield scale(best)


def _holding(best: Optimum, share: Fraction) -> Iterator[tuple[IntArray, IntArray]]:
    """Numbers of trees a root, from 1 on, for which the whole parts of links serve every rank and are balanced."""
    graph = best.graph
    weights = as_int64(best.weights)
    whole, demand = scale(best)
    own_k = int(demand.sum()) // int(weights.sum())
    work = 0
    refused: list[tuple[IntArray, int]] = []  # arcs into a set, and the weight outside it
    if best.arcs:
        into = np.array(best.arcs, dtype=np.int64)
        refused.append((into, ceil(best.inverse_x * sum(best.capacities[a] for a in best.arcs))))
    for k in range(1, min(own_k, _MOST_TREES) + 1):
        if k == own_k and share == 1:
            yield whole, demand
            return
        factor = k * best.inverse_x_achieved / share
        capacity = as_int64([int(factor * c) for c in best.capacities])
        if any(capacity[into].sum() < k * outside for into, outside in refused):
            continue
        if work > _MOST_WORK:
            return
        work += len(graph.tail) * len(graph.ranks)
        wanted = np.zeros(graph.num_vertices, dtype=np.int64)
        wanted[graph.ranks] = k * weights
        found, sets = violated_sets(graph.num_vertices, graph.tail, graph.head, capacity, wanted, graph.ranks, _SETS)
        for side in sets[:found]:
            into = np.flatnonzero(~side[graph.tail] & side[graph.head])
            refused.append((into, int(weights[~side[graph.ranks]].sum())))
        if found:
            continue
        balanced = _balanced(best, capacity, k * weights)
        if balanced is not None:
            yield balanced, k * weights


def _balanced(best: Optimum, capacity: IntArray, demand: IntArray) -> IntArray | None:
    """The same where every switch sends on as much as it receives, or less of it; ``None`` where none was found."""
    graph = best.graph
    excess = np.zeros(graph.num_vertices, dtype=np.int64)
    np.add.at(excess, graph.head, capacity)
    np.subtract.at(excess, graph.tail, capacity)
    excess[graph.ranks] = 0
    if not excess.any():
        return capacity
    if len(graph.tail) * len(graph.ranks) > _TRIMMED:
        return None
    return trim_to_balance(graph, capacity, demand)


def least_for(best: Optimum, topology: Topology, k: int) -> tuple[IntArray, IntArray]:
    """Least scale U at which the whole parts of U * capacity hold k trees a unit of weight, and what they use.

    Taking capacity away from unbalanced switches step by step is quick and may miss what is there; where it fails,
    an integer programme decides.

    Args:
        best: the solved bound.
        topology: its fabric.
        k: trees a unit of weight.
    """
    demand = as_int64([k * w for w in best.weights])
    optimal_capacity, optimal_demand = scale(best)
    own_k = int(optimal_demand.sum()) // sum(best.weights)
    copies = ceil(Fraction(k, own_k))  # copies * own_k >= k trees fit, balanced
    questions = UnitQuestions([best.graph], demand=demand.tolist(), total=int(demand.sum()))

    def ask(whole: IntArray) -> tuple[Verdict, Units | None]:
        if best.graph.check(whole, demand)[0].any():
            return "no", None
        trimmed = trim_to_balance(best.graph, whole, demand)
        return questions.ask(whole) if trimmed is None else ("yes", Units(demand=demand, parts=(trimmed,)))

    capacity = [link.capacity for link in topology.links]
    low, high = k * best.inverse_x, copies * own_k * best.inverse_x_achieved
    units, is_proved = least_scale(ask, capacity, low=low, high=high)
    if not is_proved:
        _log.info("%s: better forests of %d trees a root may exist", topology.name, k)
    return (optimal_capacity * copies if units is None else units.parts[0]), demand
