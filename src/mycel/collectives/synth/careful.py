"""Forests arc by arc: switches removed pair by pair, trees packed with a proof for each of their arcs.

The way of small fabrics, where its few fat links count and its proofs take milliseconds; and, with trees grown whole,
the last resort of large ones.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mycel.collectives.bound import Optimum
from mycel.collectives.maxflow import IntArray
from mycel.collectives.synth.array_forest import Forest
from mycel.collectives.synth.logical_arcs import LogicalArcs, path_lengths
from mycel.collectives.synth.packing import pack_shallow
from mycel.collectives.synth.speculative import pack_speculatively
from mycel.collectives.synth.splitting import remove_switches
from mycel.compiled import compiled
from mycel.topology.model import Topology

__all__ = ["SMALL", "grow_carefully"]

Progress = Callable[[str, int, int], None]

#: Up to this many ranks, trees are packed arc by arc: few fat links, and the best of several packings.
SMALL = 32


def grow_carefully(
    topology: Topology, best: Optimum, capacity: IntArray, demand: IntArray, progress: Progress | None
) -> Forest:
    """Trees within capacities that are balanced at switches and serve every rank, on fabrics of any kind.

    Args:
        topology: the fabric.
        best: its solved bound.
        capacity: whole units of each arc of ``best.graph``.
        demand: whole units of each root.
        progress: called with what is being done, how much of it is done, and how much there is.
    """
    n = topology.num_ranks
    nodes = {v: vertex.node for v, vertex in enumerate(topology.vertices)}
    arcs = remove_switches(best.graph, capacity, demand, nodes=nodes, is_reversed=best.is_reversed, progress=progress)
    # Trees are packed into wide links, one from a rank to another, and then divided among the paths of each.
    is_first = np.ones(len(arcs.tail), dtype=np.bool_)
    is_first[1:] = (np.diff(arcs.tail) != 0) | (np.diff(arcs.head) != 0)
    first = np.flatnonzero(is_first)
    wide = LogicalArcs(
        tail=arcs.tail[first], head=arcs.head[first], capacity=np.add.reduceat(arcs.capacity, first), paths=()
    )
    lengths = np.maximum.reduceat(path_lengths(topology, arcs.paths, is_reversed=best.is_reversed), first)
    trees = None
    if n > SMALL:
        trees = pack_speculatively(n, wide, lengths, demand, progress=progress)
    if trees is None:
        trees = pack_shallow(n, wide, lengths, demand, progress=progress)
    trees = sorted(trees, key=lambda tree: tree.root)
    rows, multiplicities, roots = [], [], []
    left, bounds = arcs.capacity.copy(), np.append(first, len(arcs.tail))
    for tree in trees:
        rest = tree.multiplicity
        while rest:
            part, row = _take_paths(tree.arcs, bounds, left, rest)
            rows.append(row)
            multiplicities.append(part)
            roots.append(tree.root)
            rest -= part
    return Forest(
        topology=topology,
        is_reversed=best.is_reversed,
        weights=best.weights,
        arcs=arcs,
        roots=np.array(roots, dtype=np.int64),
        multiplicities=np.array(multiplicities, dtype=np.int64),
        trees=np.array(rows, dtype=np.int32),
        order=1,
    )


@compiled
def _take_paths(tree: IntArray, bounds: IntArray, left: IntArray, rest: int) -> tuple[int, IntArray]:
    """Of each wide link of a tree, the narrowest path that has ``rest`` left, or else the widest.

    Args:
        tree: wide links.
        bounds: where the paths of each wide link begin, and after them the end.
        left: capacity of each path; what is taken is taken off.
        rest: most that is taken.

    Returns:
        How much was taken, and the paths.
    """
    chosen = np.empty(len(tree), dtype=np.int64)
    part = rest
    for i in range(len(tree)):
        fitting, widest = -1, int(bounds[tree[i]])
        for path in range(bounds[tree[i]], bounds[tree[i] + 1]):
            if left[path] >= rest and (fitting < 0 or left[path] < left[fitting]):
                fitting = path
            if left[path] > left[widest]:
                widest = path
        chosen[i] = fitting if fitting >= 0 else widest
        part = min(part, int(left[chosen[i]]))
    for taken in chosen:
        left[taken] -= part
    return part, chosen
