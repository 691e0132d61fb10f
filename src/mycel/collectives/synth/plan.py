"""Plans: forests as arrays on fabrics of any kind and size, with no schedule made of them.

A schedule of 1,024 ranks is a million transfers; a plan of it is a table of a million small numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from itertools import pairwise
from math import gcd, lcm

import numpy as np

from mycel.collectives.bound import find_division, find_optimum
from mycel.collectives.maxflow import IntArray
from mycel.collectives.synth.array_forest import Forest, Progress
from mycel.collectives.synth.forest import FEW_RANKS, build_forest, grow_divided, grow_optimum
from mycel.topology.model import Topology

__all__ = ["both_ways", "plan_all_reduce", "plan_forest"]

_WHOLE = Fraction(1)


def plan_forest(
    topology: Topology,
    weights: Sequence[int],
    *,
    is_reversed: bool,
    k: int | None = None,
    within: Fraction = _WHOLE,
    with_symmetry: bool = True,
    progress: Progress | None = None,
) -> Forest:
    """The forest that ``synthesize`` makes a schedule of.

    Args:
        topology: the fabric.
        weights: share of each rank as a root.
        is_reversed: turn every link round first (collectives that reduce).
        k: trees a unit of weight; the fewest that were found to meet the bound if not given.
        within: share of the bound that is enough; below 1, the shallowest forest found that reaches it.
        with_symmetry: look for a symmetry, and grow one tree of each of its orbits where there is one.
        progress: called with what is being done, how much of it is done, and how much there is.

    Raises:
        SynthesisError: see ``mycel.collectives.bound.bound``.

    Examples:
        >>> from mycel.topology.builders import dgx_a100
        >>> forest = plan_forest(dgx_a100(num_nodes=4), (1,) * 32, is_reversed=False)
        >>> forest.order, forest.check()
        (4, (Fraction(3, 25), 5))
    """
    return build_forest(
        topology,
        weights,
        is_reversed=is_reversed,
        k=k,
        within=within,
        with_symmetry=with_symmetry,
        progress=progress,
    )


def plan_all_reduce(
    topology: Topology,
    *,
    within: Fraction = _WHOLE,
    with_symmetry: bool = True,
    progress: Progress | None = None,
) -> tuple[Forest, Forest, Fraction]:
    """Two forests for all_reduce, one that spreads and one, turned round, along which is added up.

    Equal shares are tried first; where both phases one after the other are proved not to be optimal, each forest has
    its part of the links and the shares that the linear programme gives (``allreduce_bound``). Switches that copy
    and add are used as switches that forward.

    Args:
        topology: the fabric.
        within: as for ``plan_forest``.
        with_symmetry: as for ``plan_forest``.
        progress: as for ``plan_forest``.

    Returns:
        The forests, and the array's rate (``algbw``) from the loads of both on every link, every tree checked.

    Raises:
        SynthesisError: see ``mycel.collectives.bound.bound``.
    """
    division, composition = find_division(topology)
    grow = partial(grow_optimum, topology, within=within, with_symmetry=with_symmetry, progress=progress)
    grow_both = partial(
        grow_divided, topology, division, within=within, with_symmetry=with_symmetry, progress=progress
    )
    if division.algbw > composition and topology.num_ranks > FEW_RANKS:
        down, up = grow_both()
        return down, up, _joint_rate(down, up)
    weights = (1,) * topology.num_ranks
    spread, reduce = (find_optimum(topology, weights, is_reversed=turned) for turned in (False, True))
    down, up = (grow(best) for best in (spread, reduce))
    rate = _joint_rate(down, up)
    if rate < within * division.algbw:
        down, up = grow_both()
        rate = _joint_rate(down, up)
    return down, up, rate


def _joint_rate(down: Forest, up: Forest) -> Fraction:
    """``algbw`` of an array that is added up along one forest and spread along the other at the same time."""
    (one, _), (two, _) = down.loads(), up.loads()
    common = lcm(down.units, up.units)
    size = down.topology.capacity
    pairs = {
        (one.get(link, 0) * (common // down.units) + two.get(link, 0) * (common // up.units), size[link])
        for link in one.keys() | two.keys()
    }
    return sum(down.weights) * common / max(Fraction(load, capacity) for load, capacity in pairs)


def both_ways(down: Forest, up: Forest) -> tuple[int, int | None]:
    """How deep an all_reduce along two forests is, and the units that each root has of its array.

    A unit that a rank is the root of is added up along one tree of it and spread along another, so that the deepest
    trees of both directions add up only where they carry the same units.

    Args:
        down: along which copies spread.
        up: along which is added up, turned round.

    Returns:
        Steps of the longest way, there and back; and units of each root, ``None`` if shares differ.
    """
    common = lcm(down.units, up.units)
    parts: list[dict[int, list[tuple[int, int]]]] = []
    for forest in (down, up):
        depths, factor = _depths(forest), common // forest.units
        reached = [0] * len(forest.weights)
        ends: dict[int, list[tuple[int, int]]] = {}
        for i in np.argsort(forest.roots, kind="stable").tolist():
            root = int(forest.roots[i])
            reached[root] += int(forest.multiplicities[i]) * factor
            ends.setdefault(root, []).append((reached[root], int(depths[i])))
        parts.append(ends)
    depth, lengths, shares = 0, [0], []
    for root in parts[0].keys() | parts[1].keys():
        ways = [ends.get(root, []) for ends in parts]
        cuts = sorted({0, *(stop for ends in ways for stop, _ in ends)})
        for low, high in pairwise(cuts):
            depth = max(depth, sum(next((steps for stop, steps in ends if stop > low), 0) for ends in ways))
            lengths.append(high - low)
        shares.append(cuts[-1])
    alike = len(shares) == len(down.weights) and len(set(shares)) == 1
    return depth, shares[0] // gcd(*lengths) if alike else None


def _depths(forest: Forest) -> IntArray:
    """Steps of each tree, shape ``[trees]``."""
    trees = np.arange(forest.num_trees)
    level = np.zeros((forest.num_trees, forest.topology.num_ranks), dtype=np.int16)
    for arcs in forest.trees.T:  # a rank's own arc stands before those that leave it
        level[trees, forest.arcs.head[arcs]] = level[trees, forest.arcs.tail[arcs]] + 1
    depths: IntArray = level.max(axis=1).astype(np.int64)
    return depths
