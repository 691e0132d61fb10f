"""Spanning trees packed into a graph between ranks, with multiplicities: Edmonds' theorem carried out.

Root ``r`` wants ``demand[r]`` spanning out-trees. They exist iff every rank receives the total demand from a source
that feeds each root its demand (Edmonds 1973). A tree is grown arc by arc with multiplicity m; an arc (x, y) may
join iff the rest stays packable, and by how much is one max-flow: from x, with every other waiting tree fed in at
its root, to y, minus what waits. Vertices are taken breadth-first, so that trees come out shallow; where no arc
carries m, m shrinks to the most that some arc carries, and what is left over waits again at its root. (Giving back
a partial tree to its root is safe: a set it entered gets at least as much capacity as demand back.)

References:
    J. Edmonds, "Edge-disjoint branchings", 1973. K. Bérczi, A. Frank, "Packing arborescences", EGRES TR-2009-04
    (multiplicities); Zhao et al., arXiv 2402.06787, section 5.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mycel.collectives.maxflow import IntArray, build_rows, compiled, push_flow
from mycel.errors import SynthesisError

__all__ = ["Tree", "pack_trees"]

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A spanning out-tree.

    Attributes:
        root: a rank.
        multiplicity: how many units of the root's share use it.
        edges: ``(src, dst)`` ranks in the order of growth: a source is the root or an earlier destination.
    """

    root: int
    multiplicity: int
    edges: tuple[tuple[int, int], ...]


def pack_trees(
    num_ranks: int,
    tail: IntArray,
    head: IntArray,
    capacity: IntArray,
    demand: IntArray,
    *,
    progress: Progress | None = None,
) -> list[Tree]:
    """Pack ``demand[r]`` spanning out-trees at every root ``r``.

    Args:
        num_ranks: vertices of the graph.
        tail, head, capacity: its arcs; at most one from a rank to another.
        demand: trees wanted at each root.
        progress: called with ``("trees", packed, total)``.

    Returns:
        Trees root by root; multiplicities of a root add up to its demand; arc loads are within capacity.

    Raises:
        SynthesisError: the graph does not admit the packing.
    """
    order = np.lexsort(((head - tail) % num_ranks, -capacity))
    tail, head, left = tail[order], head[order], capacity[order].copy()
    waiting = demand.copy()
    source_tail = np.concatenate([tail, np.full(num_ranks, num_ranks, dtype=np.int64)])
    source_head = np.concatenate([head, np.arange(num_ranks, dtype=np.int64)])
    rows = build_rows(num_ranks + 1, source_tail, source_head)
    trees: list[Tree] = []
    total, packed = int(demand.sum()), 0
    for root in range(num_ranks):
        while waiting[root]:
            multiplicity, used = _grow(num_ranks, len(tail), *rows, left, waiting, root)
            if not multiplicity:
                raise SynthesisError(f"internal: no spanning tree from rank {root} fits; is every rank served?")
            edges = tuple((int(tail[a]), int(head[a])) for a in used)
            trees.append(Tree(root=root, multiplicity=int(multiplicity), edges=edges))
            packed += int(multiplicity)
            if progress is not None:
                progress("trees", packed, total)
    return trees


@compiled
def _slack(
    num_ranks: int,
    num_arcs: int,
    start: IntArray,
    slot: IntArray,
    ends: IntArray,
    left: IntArray,
    waiting: IntArray,
    x: int,
    y: int,
    most: int,
    residual: IntArray,
    distance: IntArray,
    work: IntArray,
) -> int:
    """How many trees (at most ``most``) may use the arc x -> y with everything that waits still packable."""
    need = 0
    for r in range(num_ranks):
        need += waiting[r]
        residual[2 * (num_arcs + r)] = waiting[r]
        residual[2 * (num_arcs + r) + 1] = 0
    for a in range(num_arcs):
        residual[2 * a] = left[a]
        residual[2 * a + 1] = 0
    is_source = np.zeros(num_ranks + 1, dtype=np.bool_)
    is_source[num_ranks] = True
    is_source[x] = True
    return push_flow(start, slot, ends, residual, is_source, y, need + most, distance, work) - need


@compiled
def _grow(
    num_ranks: int,
    num_arcs: int,
    start: IntArray,
    slot: IntArray,
    ends: IntArray,
    left: IntArray,
    waiting: IntArray,
    root: int,
) -> tuple[int, IntArray]:
    """Grow one tree from ``root``; ``left`` and ``waiting`` are brought up to date.

    Returns:
        Its multiplicity (0: impossible) and its arcs in the order of growth.
    """
    residual = np.zeros(len(ends), dtype=np.int64)
    distance = np.empty(num_ranks + 1, dtype=np.int64)
    work = np.empty((3, num_ranks + 2), dtype=np.int64)
    tried = np.zeros(num_arcs, dtype=np.bool_)
    in_tree = np.zeros(num_ranks, dtype=np.bool_)
    members = np.empty(num_ranks, dtype=np.int64)
    used = np.empty(num_ranks - 1, dtype=np.int64)
    members[0] = root
    in_tree[root] = True
    size = 1
    m = waiting[root]
    waiting[root] = 0
    scan = 0
    while size < num_ranks:
        if scan < size:
            x = members[scan]
            scan += 1
            for place in range(start[x], start[x + 1]):
                arc = slot[place]
                a = arc >> 1
                if arc & 1 or a >= num_arcs or tried[a] or left[a] < m or in_tree[ends[arc]]:
                    continue
                # An arc refused once stays refused: the sets that constrain it only grow in number with the tree.
                tried[a] = True
                y = ends[arc]
                if _slack(
                    num_ranks, num_arcs, start, slot, ends, left, waiting, x, y, m, residual, distance, work
                ) >= m:  # fmt: skip
                    left[a] -= m
                    used[size - 1] = a
                    members[size] = y
                    in_tree[y] = True
                    size += 1
            continue
        best, best_arc = 0, -1
        for i in range(size):
            x = members[i]
            for place in range(start[x], start[x + 1]):
                arc = slot[place]
                a = arc >> 1
                if arc & 1 or a >= num_arcs or left[a] <= best or in_tree[ends[arc]]:
                    continue
                y = ends[arc]
                most = min(m, left[a])
                value = _slack(
                    num_ranks, num_arcs, start, slot, ends, left, waiting, x, y, most, residual, distance, work
                )
                if value > best:
                    best, best_arc = value, arc
        if best <= 0:
            return 0, used[:0]
        for i in range(size - 1):
            left[used[i]] += m - best
        waiting[root] += m - best
        m = best
        a = best_arc >> 1
        left[a] -= m
        used[size - 1] = a
        members[size] = ends[best_arc]
        in_tree[ends[best_arc]] = True
        size += 1
        tried[:] = False
        scan = 0
    return m, used
