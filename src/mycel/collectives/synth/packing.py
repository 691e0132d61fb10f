"""Spanning trees packed into a graph between ranks, with multiplicities: Edmonds' theorem carried out.

Root ``r`` wants ``demand[r]`` spanning out-trees. They exist iff every rank receives the total demand from a source
that feeds each root its demand (Edmonds 1973). A tree is grown arc by arc with multiplicity m; an arc (x, y) may
join iff the rest stays packable, and by how much is one max-flow: from x, with every other waiting tree fed in at
its root, to y, minus what waits. Vertices are taken by depth, so that trees come out shallow; where no arc
carries m, m shrinks to the most that some arc carries, and what is left over waits again at its root. (Giving back
a partial tree to its root is safe: a set it entered gets at least as much capacity as demand back.)

References:
    J. Edmonds, "Edge-disjoint branchings", 1973. K. Bérczi, A. Frank, "Packing arborescences", EGRES TR-2009-04
    (multiplicities); Zhao et al., arXiv 2402.06787, section 5.3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from mycel.collectives.maxflow import IntArray, build_rows, push_flow
from mycel.collectives.synth.logical_arcs import LogicalArcs
from mycel.collectives.synth.speculative import PackedTree, farthest, flatten, longest_way
from mycel.compiled import compiled
from mycel.errors import SynthesisError

__all__ = ["pack_shallow", "pack_trees"]

Progress = Callable[[str, int, int], None]
Preference = Literal["left", "order", "alternate"]

#: Ranks times arcs up to which packings with a depth limit (slow), and other ways (fast), are tried as well.
_DEPTH_SEARCH_LIMIT = 2_000
_SEARCH_LIMIT = 20_000


def pack_shallow(
    num_ranks: int,
    arcs: LogicalArcs,
    lengths: IntArray,
    demand: IntArray,
    *,
    progress: Progress | None = None,
) -> list[PackedTree]:
    """The best of several packings: all carry the same, so what counts is few steps and few trees.

    The packing with the least (depth of the deepest tree)^2 x (number of trees) is kept: every step costs a latency,
    every tree makes messages smaller. Then its deepest trees are grown again, together with others, as long as that
    pays. Arguments, result and errors are those of ``pack_trees``.

    Args:
        progress: called with ``("packings", tried, total)``.
    """
    share, num_arcs = int(demand.max()), len(arcs.tail)
    radius = farthest(num_ranks, arcs.tail, arcs.head, lengths, np.flatnonzero(demand))
    ways: list[tuple[int | None, int | None, Preference]] = [(None, None, "left")]
    if num_ranks * num_arcs <= _SEARCH_LIMIT:
        ways.append((None, None, "alternate"))
        if num_ranks * num_arcs <= _DEPTH_SEARCH_LIMIT:
            ways += [(radius, None, "left"), (radius, None, "order")]
        if share > 1:
            ways += [(None, share // 2, "left"), (None, share // 2, "alternate")]
        if share > 3:
            ways.append((None, share // 4, "left"))
    best: list[PackedTree] = []
    best_cost = 0
    for done, (deepest, largest, preference) in enumerate(ways, 1):
        trees = pack_trees(num_ranks, arcs, lengths, demand, deepest=deepest, largest=largest, preference=preference)
        depth = max(longest_way(num_ranks, arcs.tail, arcs.head, lengths, t.root, t.arcs) for t in trees)
        cost = depth**2 * len(trees)
        if not best or cost < best_cost:
            best, best_cost = trees, cost
        if progress is not None:
            progress("packings", done, len(ways))
        if depth == radius and len(trees) == np.count_nonzero(demand):
            break  # no packing is shallower or has fewer trees
    return sorted(flatten(num_ranks, arcs, lengths, demand, best), key=lambda tree: tree.root)


def pack_trees(
    num_ranks: int,
    arcs: LogicalArcs,
    lengths: IntArray,
    demand: IntArray,
    *,
    deepest: int | None = None,
    largest: int | None = None,
    preference: Preference = "left",
) -> list[PackedTree]:
    """Pack ``demand[r]`` spanning out-trees at every root ``r``.

    Roots take turns, one tree each, so that none is left with what all others did not want.

    Args:
        num_ranks: vertices of the graph.
        arcs: its links, at most one from a rank to another; their paths do not matter.
        lengths: what each of them adds to the depth of a tree, positive; shape ``[num_arcs]``.
        demand: trees wanted at each root.
        deepest: trees grow deeper than this only where nothing else is left; ``None`` prefers few trees to
            shallow ones.
        largest: most units one tree may carry; ``None`` for no limit.
        preference: among the arcs of the shallowest vertices, take first the one with most capacity left, or the
            first in a fixed order, or that with the order turned round after each round of roots (on a ring, half
            of the trees then go one step further clockwise and half counter-clockwise).

    Returns:
        Trees root by root; multiplicities of a root add up to its demand; arc loads are within capacity.

    Raises:
        SynthesisError: the graph does not admit the packing.
    """
    order = np.lexsort(((arcs.head - arcs.tail) % num_ranks, -arcs.capacity))
    tail, head, left, steps = arcs.tail[order], arcs.head[order], arcs.capacity[order], lengths[order]
    waiting = demand.copy()
    source_tail = np.concatenate([tail, np.full(num_ranks, num_ranks, dtype=np.int64)])
    source_head = np.concatenate([head, np.arange(num_ranks, dtype=np.int64)])
    rows = build_rows(num_ranks + 1, source_tail, source_head)
    trees: list[PackedTree] = []
    total, packed = int(demand.sum()), 0
    limits = (int(steps.sum()) if deepest is None else deepest, total if largest is None else largest)
    turn = 0 if preference == "left" else 1
    while packed < total:
        for root in np.flatnonzero(waiting).tolist():
            multiplicity, used = _grow(num_ranks, len(tail), *rows, steps, left, waiting, root, *limits, turn)
            if not multiplicity:
                raise SynthesisError(f"internal: no spanning tree from rank {root} fits; is every rank served?")
            trees.append(PackedTree(root=root, multiplicity=int(multiplicity), arcs=order[used]))
            packed += int(multiplicity)
        turn = -turn if preference == "alternate" else turn
    return sorted(trees, key=lambda tree: tree.root)


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
    lengths: IntArray,
    left: IntArray,
    waiting: IntArray,
    root: int,
    deepest: int,
    largest: int,
    turn: int,
) -> tuple[int, IntArray]:
    """Grow one tree from ``root``; ``left`` and ``waiting`` are brought up to date.

    ``turn`` says which arc of the shallowest vertices comes first: 0 the one with most capacity left, 1 the first
    of the first vertex, -1 the last of the first vertex.

    Returns:
        Its multiplicity (0: impossible) and its arcs in the order of growth.
    """
    residual = np.zeros(len(ends), dtype=np.int64)
    distance = np.empty(num_ranks + 1, dtype=np.int64)
    work = np.empty((3, num_ranks + 2), dtype=np.int64)
    tried = np.zeros(num_arcs, dtype=np.bool_)
    depth = np.full(num_ranks, -1, dtype=np.int64)
    members = np.empty(num_ranks, dtype=np.int64)
    used = np.empty(num_ranks - 1, dtype=np.int64)
    members[0] = root
    depth[root] = 0
    size = 1
    shortest = lengths.min()
    m = min(waiting[root], largest)
    waiting[root] -= m
    while size < num_ranks:
        # The arc to the nearest rank; of several, that with most capacity left, or one of the first vertex.
        arc, nearest, owner = -1, 0, -1
        for i in range(size):
            x = members[i]
            if arc >= 0 and depth[x] + shortest > nearest:
                break
            for place in range(start[x], start[x + 1]):
                other = slot[place]
                a = other >> 1
                if other & 1 or a >= num_arcs or tried[a] or left[a] < m or depth[ends[other]] >= 0:
                    continue
                reach = depth[x] + lengths[a]
                if reach > deepest or (arc >= 0 and reach > nearest):
                    continue
                is_second = turn > 0 or (turn < 0 and owner != x) or (turn == 0 and left[a] <= left[arc >> 1])
                if arc >= 0 and reach == nearest and is_second:
                    continue
                arc, nearest, owner = other, reach, x
        if arc >= 0:
            # An arc refused once stays refused: the sets that constrain it only grow in number with the tree.
            a, x, y = arc >> 1, ends[arc ^ 1], ends[arc]
            tried[a] = True
            if _slack(num_ranks, num_arcs, start, slot, ends, left, waiting, x, y, m, residual, distance, work) < m:
                continue
        else:
            # Stuck: less through the best arc from a vertex that is shallow enough, or failing that from any.
            best = 0
            for is_last_resort in range(2):
                for i in range(size):
                    x = members[i]
                    if best > 0 and is_last_resort:
                        break
                    for place in range(start[x], start[x + 1]):
                        other = slot[place]
                        a = other >> 1
                        if other & 1 or a >= num_arcs or left[a] <= best or depth[ends[other]] >= 0:
                            continue
                        if depth[x] + lengths[a] > deepest and not is_last_resort:
                            continue
                        y = ends[other]
                        most = min(m, left[a])
                        value = _slack(
                            *(num_ranks, num_arcs, start, slot, ends, left, waiting),
                            *(x, y, most, residual, distance, work),
                        )
                        if value > best:
                            best, arc = value, other
            if best <= 0:
                return 0, used[:0]
            for i in range(size - 1):
                left[used[i]] += m - best
            waiting[root] += m - best
            m = best
            tried[:] = False
        a, y = arc >> 1, ends[arc]
        left[a] -= m
        used[size - 1] = a
        members[size] = y
        depth[y] = depth[ends[arc ^ 1]] + lengths[a]
        size += 1
    return m, used
