"""Growing: the ways from capacities to a forest, and which of them a fabric gets.

All meet the same capacities, so that what counts is few steps and few trees. Up to 8 ranks, few fat links count more
than either (decision 0005), and switches are removed pair by pair. Up to 32 ranks that is one way among others, where
these give many trees or deep ones, and above what remains where all others fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import inf, log2

import numpy as np

from mycel.collectives.bound import Optimum
from mycel.collectives.maxflow import IntArray
from mycel.collectives.synth.along_links import grow_along_links
from mycel.collectives.synth.array_forest import Forest, grow_forest
from mycel.collectives.synth.careful import SMALL, grow_carefully
from mycel.collectives.synth.shortest_paths import grow_shortest
from mycel.collectives.synth.speculative import longest_way
from mycel.topology.model import Topology

__all__ = ["depth_of", "grow_shallow", "grow_trees"]

Progress = Callable[[str, int, int], None]

#: Up to so many ranks, switches become rings of fat links: a rank that receives from all others at once over TCP
#: loses a quarter of its link.
_FAT = 8
#: Links of strides are taken as they are where their trees are at most so much deeper than a binomial tree.
_NEAR = 4
#: Trees for each root that are few.
_FEW = 1.5


def grow_trees(
    topology: Topology,
    best: Optimum,
    capacity: IntArray,
    demand: IntArray,
    progress: Progress | None = None,
    *,
    with_symmetry: bool = True,
) -> Forest:
    """Trees within capacities that are balanced at switches and serve every rank.

    Args:
        topology: the fabric.
        best: its solved bound.
        capacity: whole units of each arc of ``best.graph``.
        demand: whole units of each root.
        progress: called with what is being done, how much of it is done, and how much there is.
        with_symmetry: look for a symmetry, and grow one tree of each of its orbits where there is one.

    Raises:
        SynthesisError: the capacities do not admit a forest.
    """
    n = topology.num_ranks
    if n <= _FAT:
        return _merged(grow_carefully(topology, best, capacity, demand, progress))
    shortest = grow_shortest(topology, best, capacity, demand)
    if shortest is not None and n > SMALL:
        return shortest
    strided = grow_forest(topology, best, capacity, demand, with_symmetry=with_symmetry, progress=progress)
    if strided is not None and n > SMALL and strided.depth() <= log2(n) + _NEAR:
        return strided
    found = [shortest, strided]
    if strided is None or strided.depth() > log2(n) + _NEAR:
        found.append(grow_along_links(topology, best, capacity, demand, progress=progress))
    if n <= SMALL:
        found = [None if forest is None else _merged(forest) for forest in found]
    if not any(forest is not None and (n > SMALL or _is_fine(forest, demand)) for forest in found):
        found.append(grow_carefully(topology, best, capacity, demand, progress))
    return min((_merged(forest) for forest in found if forest is not None), key=_cost)


def grow_shallow(
    topology: Topology, best: Optimum, capacity: IntArray, demand: IntArray, progress: Progress | None = None
) -> Forest:
    """The same with the least depth that is found, however many links that takes; arguments as ``grow_trees``."""
    shortest = grow_shortest(topology, best, capacity, demand)
    if shortest is not None:
        return shortest
    linked = grow_along_links(topology, best, capacity, demand, progress=progress)
    if linked is not None and linked.depth() <= log2(topology.num_ranks):
        return linked
    other = grow_trees(topology, best, capacity, demand, progress)
    if linked is None:
        return other
    return min(_merged(linked), other, key=lambda forest: (depth_of(forest), forest.num_trees))


def _is_fine(forest: Forest, demand: IntArray) -> bool:
    """Whether trees packed arc by arc would hardly be fewer or shallower, and those take most of the time."""
    few = _FEW * int(np.count_nonzero(demand))
    return forest.num_trees <= few and depth_of(forest) <= log2(len(demand)) + 1


def _merged(forest: Forest) -> Forest:
    """The same with equal trees of a root as one."""
    place: dict[tuple[int, bytes], int] = {}
    rows = zip(forest.roots.tolist(), np.sort(forest.trees, axis=1), strict=True)
    names = np.array([place.setdefault((root, row.tobytes()), len(place)) for root, row in rows])
    if len(place) == forest.num_trees:
        return forest
    first = np.unique(names, return_index=True)[1]
    multiplicities = np.zeros(len(place), dtype=np.int64)
    np.add.at(multiplicities, names, forest.multiplicities)
    return replace(forest, roots=forest.roots[first], trees=forest.trees[first], multiplicities=multiplicities)


def depth_of(forest: Forest) -> float:
    """The longest way from a root: by latency where any link has one, in steps otherwise."""
    latency = forest.topology.latency_s
    if not any(latency.values()):
        return forest.depth()
    paths = [path[::-1] if forest.is_reversed else path for path in forest.arcs.paths]
    lengths = np.array([round(1e12 * sum(latency[hop] for hop in pairwise(path))) for path in paths], dtype=np.int64)
    arcs, n = forest.arcs, forest.topology.num_ranks
    return max(
        (
            longest_way(n, arcs.tail, arcs.head, lengths, root, row)
            for root, row in zip(forest.roots.tolist(), forest.trees, strict=True)
        ),
        default=inf,
    )


def _cost(forest: Forest) -> float:
    """(depth of the deepest tree)^2 x (number of trees): every step costs a latency, every tree shortens messages."""
    return depth_of(forest) ** 2 * forest.num_trees
