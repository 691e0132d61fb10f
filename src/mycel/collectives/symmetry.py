"""Symmetry: a rotation of a fabric's nodes onto each other, found from its links alone and then proven.

Colour refinement tells vertices apart by their links; taking away the switches in the middle leaves nodes; nodes
are matched vertex by vertex. What comes out is only a guess until ``is_automorphism`` has compared every link with
its image, so that nothing here has to be trusted.

References:
    B. Weisfeiler, A. Leman, "The reduction of a graph to canonical form", 1968 (colour refinement).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from mycel.collectives.maxflow import FlowGraph, IntArray

__all__ = ["find_classes", "find_rotation", "is_automorphism", "powers"]

#: How many candidate vertices the matching of two nodes may look at, per vertex of the node, before it gives up.
_PATIENCE = 50
#: Vertices of a node up to which matching is tried at all.
_LARGEST_NODE = 300


def find_rotation(graph: FlowGraph, capacity: IntArray) -> IntArray | None:
    """An automorphism that moves every rank through equally many places, or ``None`` if none was found.

    Args:
        graph: the fabric.
        capacity: of each arc.

    Returns:
        ``image``, shape ``[num_vertices]``: the vertex each vertex moves to.
    """
    for image in _candidates(graph, capacity):
        if is_automorphism(graph, capacity, image) and powers(graph, image) is not None:
            return image
    return None


def find_classes(graph: FlowGraph, capacity: IntArray) -> tuple[IntArray, IntArray]:
    """Which arcs, and which ranks, look alike: those that colour refinement does not tell apart.

    All that a symmetry takes to each other look alike, whatever their names and numbers; the reverse need not hold.

    Returns:
        The class of each arc, shape ``[num_arcs]``, and of each rank, shape ``[num_ranks]``.

    Examples:
        >>> from mycel.topology.builders import ring
        >>> graph = FlowGraph.of(ring(num_ranks=3))
        >>> find_classes(graph, np.ones(6, dtype=np.int64))
        (array([0, 0, 0, 0, 0, 0]), array([0, 0, 0]))
    """
    is_rank = np.zeros(graph.num_vertices, dtype=np.int64)
    is_rank[graph.ranks] = 1
    colour = _refine(graph, capacity, is_rank)
    ends = np.stack([colour[graph.tail], colour[graph.head], capacity])
    arcs = np.unique(ends, axis=1, return_inverse=True)[1].reshape(-1)
    ranks = np.unique(colour[graph.ranks], return_inverse=True)[1].reshape(-1)
    return arcs.astype(np.int64), ranks.astype(np.int64)


def is_automorphism(graph: FlowGraph, capacity: IntArray, image: IntArray) -> bool:
    """Whether ``image`` permutes the vertices, ranks among themselves, and takes links to links of equal capacity."""
    count = graph.num_vertices
    if not np.array_equal(np.sort(image), np.arange(count)):
        return False
    if not np.array_equal(np.sort(image[graph.ranks]), np.sort(graph.ranks)):
        return False
    here = graph.tail * count + graph.head
    there = image[graph.tail] * count + image[graph.head]
    one, two = np.lexsort((capacity, here)), np.lexsort((capacity, there))
    return bool(np.array_equal(here[one], there[two]) and np.array_equal(capacity[one], capacity[two]))


def powers(graph: FlowGraph, image: IntArray) -> npt.NDArray[np.int64] | None:
    """All powers of a rotation, shape ``[order, num_vertices]``; ``None`` if one but the first keeps a rank."""
    identity = np.arange(graph.num_vertices, dtype=np.int64)
    rows = [identity]
    while len(rows) <= len(graph.ranks):
        after = image[rows[-1]]
        if np.array_equal(after, identity):
            return np.array(rows)
        if np.any(after[graph.ranks] == graph.ranks):
            return None
        rows.append(after)
    return None


def _candidates(graph: FlowGraph, capacity: IntArray) -> Iterator[IntArray]:
    count = graph.num_vertices
    if len(graph.ranks) == count:  # rings and tori: ranks moved on by a divisor of their number
        yield from ((np.arange(count) + step) % count for step in range(1, count // 2 + 1) if count % step == 0)
        return
    is_rank = np.zeros(count, dtype=np.int64)
    is_rank[graph.ranks] = 1
    colour = _refine(graph, capacity, is_rank)
    degree = np.bincount(graph.tail, minlength=count)
    classes = sorted({(-int(degree[v]), int(colour[v])) for v in np.flatnonzero(is_rank == 0)})
    hubs = np.zeros(count, dtype=np.bool_)
    for _, name in classes:
        hubs |= colour == name
        nodes = _components(graph, hubs)
        if len(nodes) < 2 or len({len(node) for node in nodes}) > 1 or not is_rank[nodes[0]].any():
            continue
        apart = is_rank.copy()
        apart[hubs] = 2 + np.arange(int(hubs.sum()))  # hubs stay where they are
        finer = _refine(graph, capacity, apart)
        for match in (_in_order, _by_search):
            image = np.arange(count, dtype=np.int64)
            known: list[IntArray] = []
            for node in nodes:
                placed = match(graph, capacity, finer, nodes[0], node)
                if placed is None:
                    break
                known.append(placed)
            if len(known) == len(nodes):
                for here, there in zip(known, known[1:] + known[:1], strict=True):
                    image[here] = there
                yield image


def _refine(graph: FlowGraph, capacity: IntArray, start: IntArray) -> IntArray:
    """Colours such that vertices of one colour have equal links to each colour (up to collisions of hashes)."""
    colour, known = start, len(np.unique(start))
    while True:
        mixed = colour.astype(np.uint64)
        signature = mixed * np.uint64(0x9E3779B97F4A7C15)
        for here, there, salt in ((graph.tail, graph.head, 1), (graph.head, graph.tail, 2)):
            term = (mixed[there] + np.uint64(salt)) * np.uint64(0xBF58476D1CE4E5B9) ^ (
                capacity.astype(np.uint64) * np.uint64(0x94D049BB133111EB)
            )
            term = (term ^ (term >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15)
            np.add.at(signature, here, (term ^ (term >> np.uint64(32))) * np.uint64(2 * salt + 1))
        names, colour = np.unique(np.stack([start.astype(np.uint64), mixed, signature]), axis=1, return_inverse=True)
        colour = colour.reshape(-1).astype(np.int64)
        if names.shape[1] == known:
            return colour
        known = names.shape[1]


def _components(graph: FlowGraph, removed: npt.NDArray[np.bool_]) -> list[IntArray]:
    """What hangs together without some vertices; vertices ascending, components by their first vertex."""
    around: list[list[int]] = [[] for _ in range(graph.num_vertices)]
    for t, h in zip(graph.tail.tolist(), graph.head.tolist(), strict=True):
        if not removed[t] and not removed[h]:
            around[t].append(h)
            around[h].append(t)
    seen = removed.copy()
    found: list[IntArray] = []
    for first in range(graph.num_vertices):
        if not seen[first]:
            seen[first] = True
            node = [first]
            for here in node:
                for far in around[here]:
                    if not seen[far]:
                        seen[far] = True
                        node.append(far)
            found.append(np.array(sorted(node), dtype=np.int64))
    return found


def _in_order(
    graph: FlowGraph, capacity: IntArray, colour: IntArray, first: IntArray, node: IntArray
) -> IntArray | None:
    """The node's vertices beside those of the first node, as their numbers and colours have them."""
    one, two = np.argsort(colour[first], kind="stable"), np.argsort(colour[node], kind="stable")
    if not np.array_equal(colour[first[one]], colour[node[two]]):
        return None
    placed = np.empty(len(first), dtype=np.int64)
    placed[one] = node[two]
    return placed


def _by_search(
    graph: FlowGraph, capacity: IntArray, colour: IntArray, first: IntArray, node: IntArray
) -> IntArray | None:
    """A matching found by trying: vertex by vertex, taking a choice back where a link has no image."""
    if len(first) > _LARGEST_NODE:
        return None
    is_member = np.zeros(graph.num_vertices, dtype=np.bool_)
    is_member[first] = is_member[node] = True
    inside = is_member[graph.tail] & is_member[graph.head]
    ends = zip(graph.tail[inside].tolist(), graph.head[inside].tolist(), strict=True)
    link = dict(zip(ends, capacity[inside].tolist(), strict=True))
    mine, theirs = first.tolist(), node.tolist()
    chosen: list[int] = []
    steps = _PATIENCE * len(mine)

    def fits(vertex: int, candidate: int) -> bool:
        if colour[vertex] != colour[candidate] or candidate in chosen:
            return False
        pairs = zip(mine, chosen, strict=False)
        return all(
            link.get((vertex, a)) == link.get((candidate, b)) and link.get((a, vertex)) == link.get((b, candidate))
            for a, b in pairs
        )

    def extend() -> bool:
        nonlocal steps
        if len(chosen) == len(mine):
            return True
        for candidate in theirs:
            steps -= 1
            if steps < 0:
                return False
            if fits(mine[len(chosen)], candidate):
                chosen.append(candidate)
                if extend():
                    return True
                chosen.pop()
        return False

    return np.array(chosen, dtype=np.int64) if extend() else None
