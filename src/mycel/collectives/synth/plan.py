"""Plans: forests as arrays on fabrics of any kind and size, with no schedule made of them.

A schedule of 1,024 ranks is a million transfers; a plan of it is a table of a million small numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mycel.collectives.bound import Optimum, find_optimum
from mycel.collectives.synth.array_forest import Forest, Progress, grow_forest
from mycel.collectives.synth.bulk import LogicalArcs
from mycel.collectives.synth.forest import RoutedTree, build_forest, scale
from mycel.topology.model import Topology

__all__ = ["plan_forest"]


def plan_forest(
    topology: Topology,
    weights: Sequence[int],
    *,
    is_reversed: bool,
    with_symmetry: bool = True,
    progress: Progress | None = None,
) -> Forest:
    """A forest that meets the bound, as arrays; see ``forest.build_forest`` for the same as objects.

    Args:
        topology: the fabric.
        weights: share of each rank as a root.
        is_reversed: turn every link round first (collectives that reduce).
        with_symmetry: look for a symmetry, and grow one tree of each of its orbits where there is one.
        progress: called with what is being done, how much of it is done, and how much there is.

    Raises:
        SynthesisError: see ``mycel.collectives.bound.bound``.

    Examples:
        >>> from mycel.topology.builders import dgx_a100
        >>> forest = plan_forest(dgx_a100(num_boxes=4), (1,) * 32, is_reversed=False)
        >>> forest.order, forest.check()
        (4, (Fraction(3, 25), 5))
    """
    best = find_optimum(topology, weights, is_reversed=is_reversed)
    forest = grow_forest(topology, best, *scale(best), with_symmetry=with_symmetry, progress=progress)
    if forest is not None:
        return forest
    trees = build_forest(topology, weights, is_reversed=is_reversed, progress=progress)
    return _as_arrays(topology, best, trees)


def _as_arrays(topology: Topology, best: Optimum, trees: Sequence[RoutedTree]) -> Forest:
    carried: dict[tuple[int, ...], int] = {}
    for tree in trees:
        for _, _, path in tree.edges:
            carried[path] = carried.get(path, 0) + tree.multiplicity
    paths = sorted(carried)
    place = {path: i for i, path in enumerate(paths)}
    return Forest(
        topology=topology,
        is_reversed=best.is_reversed,
        weights=best.weights,
        arcs=LogicalArcs(
            tail=np.array([topology.rank_of[path[0]] for path in paths], dtype=np.int64),
            head=np.array([topology.rank_of[path[-1]] for path in paths], dtype=np.int64),
            capacity=np.array([carried[path] for path in paths], dtype=np.int64),
            paths=tuple(paths),
        ),
        roots=np.array([tree.root for tree in trees], dtype=np.int64),
        multiplicities=np.array([tree.multiplicity for tree in trees], dtype=np.int64),
        trees=np.array([[place[path] for _, _, path in tree.edges] for tree in trees], dtype=np.int32),
        order=1,
    )
