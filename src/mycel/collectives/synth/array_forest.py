"""Forest as arrays: what synthesis makes of a fabric too large for a million transfers as objects, and its check.

``grow_forest`` strings the fast steps together: find a symmetry (``symmetry``), replace all switches (``bulk``),
pack trees (``speculative``); first with the symmetry, then without. ``Forest.check`` trusts none of them: it walks
every tree and adds up every link.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mycel.brief import brief
from mycel.collectives.bound import Optimum
from mycel.collectives.maxflow import IntArray
from mycel.collectives.symmetry import find_rotation, powers
from mycel.collectives.synth.bulk import replace_switches
from mycel.collectives.synth.logical_arcs import LogicalArcs, path_lengths
from mycel.collectives.synth.speculative import orbits_of_arcs, pack_speculatively
from mycel.compiled import compiled
from mycel.errors import SynthesisError
from mycel.topology.model import Topology

__all__ = ["Forest", "Progress", "grow_forest"]

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forest:
    """Spanning out-trees on a fabric (turned round where data is gathered).

    Attributes:
        topology: the fabric.
        is_reversed: trees go against the direction of its links.
        weights: share of each rank as a root.
        arcs: the logical links that trees are made of, each with its physical path, as data spreads from roots.
        roots: of each tree; shape ``[num_trees]``.
        multiplicities: units of its root's share that each tree carries; shape ``[num_trees]``.
        trees: logical links of each tree in the order of growth; shape ``[num_trees, num_ranks - 1]``.
        order: how many trees were made of one by symmetry; 1 where none was used.
    """

    topology: Topology
    is_reversed: bool
    weights: tuple[int, ...]
    arcs: LogicalArcs
    roots: IntArray
    multiplicities: IntArray
    trees: npt.NDArray[np.int32]
    order: int

    __repr__ = brief

    @property
    def num_trees(self) -> int:
        """How many."""
        return len(self.roots)

    @property
    def units(self) -> int:
        """Units of one share of weight 1."""
        return int(self.multiplicities.sum()) // sum(self.weights)

    def depth(self) -> int:
        """Steps of the deepest tree."""
        return self.check()[1]

    def check(self) -> tuple[Fraction, int]:
        """Walk every tree and load every link.

        Returns:
            The time in array parts over capacity, as ``bound.Bound.inverse_x`` counts it, from the links' actual
            loads; and the depth of the deepest tree.

        Raises:
            SynthesisError: a tree does not span, a path is none, or a root's trees do not carry its share.
        """
        carried, depth = self.loads()
        pairs = {(load, self.topology.capacity[link]) for link, load in carried.items()}
        return max(Fraction(load, size) for load, size in pairs) / self.units, depth

    def loads(self) -> tuple[dict[tuple[int, int], int], int]:
        """Walk every tree: the units that each link of the fabric carries, and the depth of the deepest tree.

        Raises:
            SynthesisError: as ``check``.
        """
        fabric, units, n = self.topology, self.units, self.topology.num_ranks
        if (np.bincount(self.roots, self.multiplicities, n) != np.array(self.weights) * units).any():
            raise SynthesisError(f"{fabric.name}: trees do not carry {units} units of each share")
        if self.num_trees and not 0 <= int(self.trees.min()) <= int(self.trees.max()) < len(self.arcs.tail):
            raise SynthesisError(f"{fabric.name}: a tree uses a logical link that does not exist")
        bad, depth, loads = _walk(n, self.arcs.tail, self.arcs.head, self.roots, self.multiplicities, self.trees)
        if bad >= 0:
            raise SynthesisError(f"{fabric.name}: tree {bad} from rank {self.roots[bad]} does not span the ranks")
        carried: dict[tuple[int, int], int] = {}
        ranks, rank_of, capacity = fabric.ranks, fabric.rank_of, fabric.capacity
        ends = zip(self.arcs.tail.tolist(), self.arcs.head.tolist(), self.arcs.paths, loads.tolist(), strict=True)
        for tail, head, path, load in ends:
            if (path[0], path[-1]) != (ranks[tail], ranks[head]) or not rank_of.keys().isdisjoint(path[1:-1]):
                raise SynthesisError(f"{fabric.name}: {path} is no path from rank {tail} to rank {head}")
            for a, b in pairwise(path):
                link = (b, a) if self.is_reversed else (a, b)
                if link not in capacity:
                    raise SynthesisError(f"{fabric.name}: path {path} uses a link {link} that does not exist")
                carried[link] = carried.get(link, 0) + load
        return carried, int(depth)


@compiled
def _walk(
    num_ranks: int,
    tail: IntArray,
    head: IntArray,
    roots: IntArray,
    multiplicities: IntArray,
    trees: npt.NDArray[np.int32],
) -> tuple[int, int, IntArray]:
    """The first tree that does not span (-1: none), the greatest depth, and the load of each logical link."""
    loads = np.zeros(len(tail), dtype=np.int64)
    depth = np.empty(num_ranks, dtype=np.int64)
    deepest = 0
    for i in range(len(roots)):
        depth[:] = -1
        depth[roots[i]] = 0
        for a in trees[i]:
            if depth[tail[a]] < 0 or depth[head[a]] >= 0:
                return i, deepest, loads
            depth[head[a]] = depth[tail[a]] + 1
            deepest = max(deepest, depth[head[a]])
            loads[a] += multiplicities[i]
        if depth.min() < 0:
            return i, deepest, loads
    return -1, deepest, loads


def grow_forest(
    topology: Topology,
    best: Optimum,
    capacity: IntArray,
    demand: IntArray,
    *,
    with_symmetry: bool = True,
    progress: Progress | None = None,
) -> Forest | None:
    """A forest by the fast steps, or ``None`` where the fabric is not regular enough for them.

    Args:
        topology: the fabric.
        best: its solved bound.
        capacity: whole units of each arc of ``best.graph``.
        demand: whole units of each root.
        with_symmetry: try to find one first.
        progress: called with ``("trees", packed, total)``.
    """
    graph, nodes = best.graph, [vertex.node for vertex in topology.vertices]
    identity = np.arange(graph.num_vertices, dtype=np.int64)[None]
    tries = [identity]
    if with_symmetry and len(set(best.weights)) == 1:
        rotation = find_rotation(graph, capacity)
        images = None if rotation is None else powers(graph, rotation)
        if images is not None:
            tries.insert(0, images)
    rank_of = np.full(graph.num_vertices, -1, dtype=np.int64)
    rank_of[graph.ranks] = np.arange(len(graph.ranks))
    for images in tries:
        arcs = replace_switches(graph, capacity, demand, images=images, nodes=nodes, is_reversed=best.is_reversed)
        if arcs is None:
            continue
        rank_images = rank_of[images[:, graph.ranks]]
        orbits = orbits_of_arcs(arcs, images, rank_images)
        if orbits is None:
            continue
        orbit, table = orbits
        lengths = path_lengths(topology, arcs.paths, is_reversed=best.is_reversed)
        grown = pack_speculatively(
            len(graph.ranks), arcs, lengths, demand, orbit=orbit, rank_images=rank_images, progress=progress
        )
        if grown is None:
            continue
        roots = [rank_images[:, tree.root] for tree in grown]
        return Forest(
            topology=topology,
            is_reversed=best.is_reversed,
            weights=best.weights,
            arcs=arcs,
            roots=np.concatenate(roots),
            multiplicities=np.repeat([tree.multiplicity for tree in grown], len(images)),
            trees=np.concatenate([table[:, tree.arcs] for tree in grown]),
            order=len(images),
        )
    return None
