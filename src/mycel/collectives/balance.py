"""Switches that receive more than they can send on, or the reverse: which part of each link is of use.

A switch forwards and neither copies nor adds, so what enters it leaves it. Where its links in and out do not add
up to the same capacity, the cut bound can promise what no schedule delivers. The exact optimum is a linear
programme: capacities ``c <= b``, balanced at every switch, that make the cut bound over ``c`` as good as possible.
It is one phase of ``mycel.collectives.cutting_planes``, in which all roots have shares of one rate. Optimality is
proved by a cut of ``b`` or by the prices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

import numpy as np

from mycel.collectives.cutting_planes import TOLERANCE, CuttingPlanes, Phase
from mycel.collectives.maxflow import FlowGraph
from mycel.errors import SynthesisError

__all__ = ["Balanced", "balance"]

_ROUNDS = 500


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Balanced:
    """Balanced capacities and the rate they allow.

    Attributes:
        x: units a second each unit of weight can be sent at, over ``capacities``; exact and verified by flows.
        capacities: of each arc, balanced at every switch.
        x_limit: proved upper bound of ``x`` over all balanced capacities; equal to ``x`` in every case known.
        binding: arcs with a positive price in the dual solution behind ``x_limit``.
    """

    x: Fraction
    capacities: tuple[Fraction, ...]
    x_limit: Fraction
    binding: tuple[int, ...]


def balance(graph: FlowGraph, capacity: Sequence[int], weights: Sequence[int], *, x_cut: Fraction) -> Balanced:
    """The best capacities that are balanced at switches.

    Args:
        graph: the fabric, oriented so that data spreads along its arcs.
        capacity: of each arc.
        weights: share of each rank as a root, integers, not all zero.
        x_cut: an upper bound of the rate, from the cuts of ``capacity``.

    Raises:
        SynthesisError: no balanced part of the capacities connects the ranks, or the floating-point optimum could
            not be made exact.
    """
    # A forest of rate x crosses a link at most once for each edge of each tree. Clipping what can never be used keeps
    # the numbers of the programme within a few orders of magnitude of each other.
    useful = ceil((len(weights) - 1) * sum(weights) * x_cut)
    rate = len(capacity)  # the variable after those of the arcs: all roots have their share of one rate
    everything = Phase(
        graph=graph,
        first_arc=0,
        roots=np.full(len(weights), rate, dtype=np.int64),
        weights=np.array(weights, dtype=np.int64),
    )
    programme = CuttingPlanes([everything], [min(c, useful) for c in capacity], {rate: 1}, "balances switches")
    programme.add_single(0, graph.ranks.tolist(), both_sides=False)
    solution = programme.optimise(most_rounds=_ROUNDS)
    if not solution.is_optimal:
        raise SynthesisError(f"balancing the switches took more than {_ROUNDS} rounds of cuts")
    if solution.values[rate] <= TOLERANCE:
        raise SynthesisError("no part of the links that is balanced at every switch connects all ranks")
    exact = programme.make_exact(solution.values)
    x_limit, binding = programme.price_bound(solution)
    return Balanced(x=exact[rate], capacities=tuple(exact[:rate]), x_limit=x_limit, binding=binding)
