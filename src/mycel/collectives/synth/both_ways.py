"""All-reduce where links carry as much one way as the other: one forest, along which is added up and spread.

Turned round, a forest that spreads is one that adds up; together both load each link as much as its opposite. So
where links are alike both ways, half of the mean of a division and of itself turned round is as good as the division
(both are feasible, and what is feasible is convex), and one forest within it serves for both directions. Which rank
is a tree's root is then free as well: as many links are used whichever rank it is, so that trees are rooted in their
middle, at half of their depth.

Trees by levels (``mycel.collectives.level_trees``) are tried first, as none are less deep. Where they stay behind:
it is of no importance to whom the programme gave a link. A fabric whose links hold whole trees, T of them in all,
can be oriented such that every rank is reached by T (Frank's theorem on orientations); what the programme found says
how, about. It is rounded, each link's two ways summing up to all that it has; rounding is mended at switches, and by
turning round single ways from a rank that can do without to one that cannot. So few trees suffice, where the
programme's fractions may have tens of thousands of parts.

References:
    A. Frank, "On disjoint trees and arborescences", 1978 (orientations that have rooted trees). C. Nash-Williams and
    W. Tutte, 1961 (how many trees an undirected graph holds).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np

from mycel.collectives.allreduce_bound import Division
from mycel.collectives.bound import Optimum
from mycel.collectives.level_trees import LevelTrees
from mycel.collectives.maxflow import FlowGraph
from mycel.collectives.orientation import ENOUGH, is_alike_both_ways, level_forests, numbers_of_trees, orient
from mycel.collectives.synth.along_links import grow_along_links
from mycel.collectives.synth.array_forest import Forest
from mycel.collectives.synth.logical_arcs import LogicalArcs
from mycel.collectives.synth.middles import rooted_in_the_middle
from mycel.topology.model import Topology

__all__ = ["grow_both_ways"]

Progress = Callable[[str, int, int], None]


def grow_both_ways(
    topology: Topology, division: Division, *, within: Fraction, progress: Progress | None = None
) -> tuple[Forest, Forest] | None:
    """A forest that spreads, and the same turned round; ``None`` where links differ one way, or none is found.

    Args:
        topology: the fabric.
        division: how its links are divided, with shares.
        within: share of what is reached without it that is enough; below 1, the shallowest forest found of those.
        progress: called with what is being done, how much of it is done, and how much there is.
    """
    if not is_alike_both_ways(topology):
        return None
    nearly: list[Forest] = []
    for by_levels, scale in level_forests(topology, division, fewest_first=within < 1):
        share = len(by_levels.roots) / (division.limit * scale)
        if share == 1:
            return _both(_by_levels(topology, by_levels))
        if share * division.limit >= within * max(ENOUGH * division.limit, division.reached):
            nearly.append(_by_levels(topology, by_levels))
            break
    found: list[Forest] = []
    share = ENOUGH
    for trees, scale, is_exact in numbers_of_trees(topology, division):
        if nearly and trees < division.limit * scale:
            break
        if is_exact and found:
            continue
        least = Fraction(trees) if is_exact else within * share * division.limit * scale
        forest = _grow(topology, division, scale, trees, least, progress)
        if forest is None:
            continue
        found.append(forest)
        share = max(share, sum(forest.weights) / (division.limit * scale))
        if within == 1:
            break
    found += nearly if within < 1 or not found else []
    if not found:
        return None
    return _both(min(found, key=lambda forest: (forest.depth(), forest.num_trees)))


def _both(forest: Forest) -> tuple[Forest, Forest]:
    return forest, replace(forest, is_reversed=True)


def _by_levels(topology: Topology, trees: LevelTrees) -> Forest:
    """The same trees as a forest, each tree's links outwards."""
    is_root = trees.entered_by < 0
    used = np.unique(trees.entered_by[~is_root])
    outwards = np.argsort(trees.levels, axis=1, kind="stable")[:, 1:]
    loads = np.bincount(trees.entered_by[~is_root])
    links = [(topology.links[link].src, topology.links[link].dst) for link in used.tolist()]
    rank_of = {vertex: rank for rank, vertex in enumerate(topology.ranks)}
    return Forest(
        topology=topology,
        is_reversed=False,
        weights=tuple(np.bincount(trees.roots, minlength=topology.num_ranks).tolist()),
        arcs=LogicalArcs.of(dict(zip(links, loads[used].tolist(), strict=True)), rank_of),
        roots=np.sort(trees.roots, kind="stable"),
        multiplicities=np.ones(len(trees.roots), dtype=np.int64),
        trees=np.searchsorted(used, np.take_along_axis(trees.entered_by, outwards, axis=1))[
            np.argsort(trees.roots, kind="stable")
        ].astype(np.int32),
        order=1,
    )


def _grow(
    topology: Topology,
    division: Division,
    scale: Fraction,
    trees: int,
    least: Fraction,
    progress: Progress | None,
) -> Forest | None:
    """A forest of whole units at a scale, rooted in the middle; ``None`` where fewer than the least are found."""
    oriented = orient(topology, division, scale=scale, wanted=trees, least=least)
    if oriented is None:
        return None
    inverse = 1 / scale
    best = Optimum(
        graph=FlowGraph.of(topology),
        is_reversed=False,
        weights=tuple(oriented.roots.tolist()),
        inverse_x=inverse,
        capacities=tuple(units * inverse for units in oriented.capacity.tolist()),
        inverse_x_achieved=inverse,
        arcs=(),
        by_dual=True,
    )
    forest = grow_along_links(topology, best, oriented.capacity, oriented.roots, progress=progress)
    return None if forest is None else rooted_in_the_middle(forest)
