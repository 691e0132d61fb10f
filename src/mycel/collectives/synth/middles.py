"""Middles: trees that may be rooted at any rank, rooted where they are least deep."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mycel.collectives.synth.array_forest import Forest
from mycel.collectives.synth.logical_arcs import LogicalArcs, Path, path_lengths

__all__ = ["rooted_in_the_middle"]

#: An edge at a rank: to which, how long, and as which arc.
_Edges = list[list[tuple[int, int, int]]]


def rooted_in_the_middle(forest: Forest) -> Forest:
    """The same trees, each from the rank from which its farthest is least far; every tree carries units of its own.

    Which way a link is used changes, and how much of both ways together does not.

    Args:
        forest: out-trees; every link that they use has an opposite.
    """
    arcs, n = forest.arcs, forest.topology.num_ranks
    count = len(arcs.tail)
    lengths = path_lengths(forest.topology, arcs.paths, is_reversed=forest.is_reversed).tolist()
    tail, head = arcs.tail.tolist(), arcs.head.tolist()
    used: dict[Path, int] = {}  # paths in the order in which they are first used, and their units
    place: dict[Path, int] = {}
    roots, rows = [], []
    for row, multiplicity in zip(forest.trees.tolist(), forest.multiplicities.tolist(), strict=True):
        edges: _Edges = [[] for _ in range(n)]
        for arc in row:
            edges[tail[arc]].append((head[arc], lengths[arc], arc))
            edges[head[arc]].append((tail[arc], lengths[arc], arc + count))
        root = _middle(edges)
        roots.append(root)
        new = []
        for arc in _outwards(edges, root):
            path = arcs.paths[arc] if arc < count else arcs.paths[arc - count][::-1]
            used[path] = used.get(path, 0) + multiplicity
            new.append(place.setdefault(path, len(place)))
        rows.append(new)
    weights = np.bincount(roots, forest.multiplicities, n).astype(np.int64)
    rank_of = {vertex: rank for rank, vertex in enumerate(forest.topology.ranks)}
    order = np.argsort(roots, kind="stable")
    return replace(
        forest,
        weights=tuple(weights.tolist()),
        arcs=LogicalArcs.of(used, rank_of),
        roots=np.array(roots, dtype=np.int64)[order],
        multiplicities=forest.multiplicities[order],
        trees=np.array(rows, dtype=np.int32)[order],
    )


def _middle(edges: _Edges) -> int:
    """The rank from which the farthest is least far: half way along the longest way of a tree."""
    first = _distances(edges, 0)
    one = max(range(len(edges)), key=first.__getitem__)
    from_one = _distances(edges, one)
    other = max(range(len(edges)), key=from_one.__getitem__)
    from_other = _distances(edges, other)
    return min(range(len(edges)), key=lambda rank: max(from_one[rank], from_other[rank]))


def _distances(edges: _Edges, root: int) -> list[int]:
    """How far each rank is from one."""
    far = [-1] * len(edges)
    far[root] = 0
    queue = [root]
    for rank in queue:
        for other, length, _ in edges[rank]:
            if far[other] < 0:
                far[other] = far[rank] + length
                queue.append(other)
    return far


def _outwards(edges: _Edges, root: int) -> list[int]:
    """Arcs from a root outwards, breadth first."""
    seen = [False] * len(edges)
    seen[root] = True
    queue, found = [root], []
    for rank in queue:
        for other, _, arc in edges[rank]:
            if not seen[other]:
                seen[other] = True
                queue.append(other)
                found.append(arc)
    return found
