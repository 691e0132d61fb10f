"""A bound of all_reduce by groups of ranks, which holds for every schedule that moves partial sums.

Let A_1, ..., A_m be disjoint groups that together hold all ranks. Of every element of the array, at least 2 (m - 1)
transfers go from one group to another, so

    rate <= (capacity of the links into groups) / (2 (m - 1))

whoever adds what, and wherever sums are finished: no tree is assumed. Where switches in no group copy and add,
transfers may end there, and links out of groups count as well.

Why: take the groups as vertices once as senders and once as receivers, and a transfer from A to B as an edge from A
to B. There are 2 m such vertices. Edges fewer than 2 m - 2 leave three components, each a tree; and since the first
transfer out of each group and the last into each exist, each tree has an edge (A, B) that is both, at some time. Take
three in the order of these times, and what starts in the third A. It must have reached the first B by the first
time, by an edge of the first tree, and so have left the third A before its first transfer out. So the third A is a
part of the first B, and of the second B by the same argument; but these are disjoint.

With two groups that is a minimum cut between ranks, with one for each rank what they all send and receive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np

from mycel.collectives.maxflow import BoolArray, FlowGraph, IntArray, as_int64, build_rows, push_flow
from mycel.compiled import compiled, interpreted_while_small
from mycel.topology.model import Topology

__all__ = ["Groups", "groups_at_prices", "least_cut", "partition_rate", "quick_limit"]

#: Vertices of each of the disjoint groups that hold all ranks; switches may be in none.
Groups = tuple[frozenset[int], ...]


def partition_rate(topology: Topology, groups: Groups) -> Fraction:
    """The rate (``algbw``) of all_reduce that groups prove to be the most.

    Args:
        topology: the fabric.
        groups: at least two; see ``Groups``.

    Examples:
        >>> from mycel.topology.builders import two_boxes
        >>> boxes = two_boxes(num_ranks=4, inside="8 GB/s", between="3 GB/s")
        >>> partition_rate(boxes, tuple(frozenset([rank]) for rank in boxes.ranks))
        Fraction(22, 3)
        >>> partition_rate(boxes, (frozenset([0, 1, 4]), frozenset([2, 3, 5])))
        Fraction(6, 1)
    """
    of = {vertex: number for number, group in enumerate(groups) for vertex in group}
    adds = any(topology.vertices[vertex].computes and vertex not in of for vertex in topology.switches)
    crossing = 0
    for link in topology.links:
        src, dst = of.get(link.src), of.get(link.dst)
        if src != dst and (dst is not None or adds):
            crossing += link.capacity
    return Fraction(crossing, 2 * (len(groups) - 1))


def quick_limit(topology: Topology) -> tuple[Fraction, Groups]:
    """The least rate that two obvious partitions prove, single ranks and nodes; often that of the best division.

    Returns:
        The rate, and the groups.

    Examples:
        >>> from mycel.topology.builders import star
        >>> quick_limit(star(num_ranks=4, bandwidth="3 GB/s"))[0]
        Fraction(2, 1)
    """
    found = [(partition_rate(topology, groups), groups) for groups in _obvious(topology)]
    return min(found, key=lambda pair: pair[0])


def _obvious(topology: Topology) -> list[Groups]:
    ranks = tuple(frozenset([rank]) for rank in topology.ranks)
    return [groups for groups in (ranks, _nodes(topology)) if len(groups) > 1]


def _nodes(topology: Topology) -> Groups:
    """Vertices of each node that has ranks, its switches included; nothing where a rank's node is unknown."""
    members: dict[str, list[int]] = {}
    for number, vertex in enumerate(topology.vertices):
        if vertex.node:
            members.setdefault(vertex.node, []).append(number)
    groups = tuple(group for group in map(frozenset, members.values()) if not group.isdisjoint(topology.ranks))
    return groups if frozenset().union(*groups).issuperset(topology.ranks) else ()


def least_cut(topology: Topology) -> tuple[Fraction, BoolArray]:
    """The least capacity out of any set with some of the ranks, which no rate of all_reduce exceeds.

    It is the least maximum flow from one rank to another: every element goes from each rank to each.

    Returns:
        The capacity, and the set that data enters over these links, shape ``[num_vertices]``.
    """
    best: tuple[Fraction, BoolArray] | None = None
    for is_reversed in (False, True):
        graph = FlowGraph.of(topology, is_reversed=is_reversed)
        capacity = as_int64([link.capacity for link in topology.links])
        kernel = interpreted_while_small(_least_cut, len(graph.tail) * len(graph.ranks))
        value, side = kernel(graph.num_vertices, graph.tail, graph.head, capacity, graph.ranks)
        if best is None or value < best[0]:
            best = Fraction(int(value)), ~side if is_reversed else side
    assert best is not None
    return best


@compiled
def _least_cut(
    num_vertices: int, tail: IntArray, head: IntArray, capacity: IntArray, ranks: IntArray
) -> tuple[int, BoolArray]:
    """The least maximum flow from the first rank to another, and that other's side of a minimum cut.

    A rank that was looked at becomes a source: a smaller cut than the least so far has it on the first one's side.
    """
    start, slot, ends = build_rows(num_vertices, tail, head)
    residual = np.empty(2 * len(tail), dtype=np.int64)
    is_source = np.zeros(num_vertices, dtype=np.bool_)
    is_source[ranks[0]] = True
    distance = np.empty(num_vertices, dtype=np.int64)
    work = np.empty((3, num_vertices + 1), dtype=np.int64)
    best = capacity.sum() + 1
    side = np.zeros(num_vertices, dtype=np.bool_)
    for sink in ranks[1:]:
        for i in range(len(tail)):
            residual[2 * i] = capacity[i]
            residual[2 * i + 1] = 0
        flow = push_flow(start, slot, ends, residual, is_source, sink, best, distance, work)
        if flow < best:
            best = flow
            for v in range(num_vertices):
                side[v] = distance[v] >= 0
        is_source[sink] = True
    return best, side


def groups_at_prices(topology: Topology, prices: Sequence[int], limit: Fraction) -> Groups:
    """Groups that prove the same limit as prices of links do; none where none of those tried does.

    Tried are what hangs together over links below each price, single ranks, nodes, and both sides of a least cut.
    """
    for groups in _candidates(topology, prices):
        if len(groups) > 1 and partition_rate(topology, groups) == limit:
            return groups
    return ()


def _candidates(topology: Topology, prices: Sequence[int]) -> Iterator[Groups]:
    for least in sorted({price for price in prices if price}):
        yield _joined(topology, [price < least for price in prices])
    yield from _obvious(topology)
    side = least_cut(topology)[1]
    yield tuple(frozenset(np.flatnonzero(part).tolist()) for part in (side, ~side))


def _joined(topology: Topology, is_kept: Sequence[bool]) -> Groups:
    """What hangs together over some links, there and back, where it holds ranks."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    count = len(topology.vertices)
    kept = [(link.src, link.dst) for link, is_one in zip(topology.links, is_kept, strict=True) if is_one]
    ends = np.array(kept, dtype=np.int64).reshape(-1, 2).T
    graph = csr_array((np.ones(len(kept)), (ends[0], ends[1])), shape=(count, count))
    groups: dict[int, list[int]] = {}
    for vertex, group in enumerate(connected_components(graph, connection="strong")[1].tolist()):
        groups.setdefault(group, []).append(vertex)
    return tuple(group for group in map(frozenset, groups.values()) if not group.isdisjoint(topology.ranks))
