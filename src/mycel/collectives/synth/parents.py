"""Trees made less deep by exchanging parents: a rank enters one tree as it did another, and that one as it did this.

Trees that are grown one after the other share links out, and the last of them get what is left, which may be a single
long way. Which of two trees has which of a rank's two ways in is free, though, as long as both stay trees: no link
carries more or less for it, so that nothing needs to be proved. On the way from the deepest rank of the deepest tree
back to its root, some rank has a parent in another tree that is nearer to this tree's root than its own. It takes
that one, with all that hangs on it, and the other tree takes what it had. Of a tree that carries more than the other,
only as many units take part.

Each exchange makes the deepest rank less deep and none as deep as that was, so that they come to an end.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mycel.collectives.maxflow import FlowGraph, IntArray
from mycel.collectives.synth.link_trees import LinkTree

__all__ = ["exchange_parents"]

#: Exchanges times trees times steps of the deepest way, summed up: about a second.
_MOST_WORK = 20_000_000


def exchange_parents(graph: FlowGraph, trees: list[LinkTree], *, enough: float) -> list[LinkTree]:
    """The same trees, or more of them, that use every link as much as before, and are less deep where they were deep.

    Args:
        graph: the fabric.
        trees: spanning, in any order.
        enough: a depth, in paths, from which on trees are left as they are.

    Examples:
        Two trees over a complete graph of four ranks, of which one is a long way:

        >>> from mycel.topology.builders import full_mesh
        >>> graph = FlowGraph.of(full_mesh(num_ranks=4))
        >>> place = {ends: arc for arc, ends in enumerate(zip(graph.tail.tolist(), graph.head.tolist()))}
        >>> def tree(*ways):
        ...     links = np.array([place[way] for way in ways])
        ...     return LinkTree(
        ...         root=0, multiplicity=1, links=links, stops=np.arange(1, 4), depth=3 if (2, 3) in ways else 1,
        ...         is_whole=True,
        ...     )
        >>> found = exchange_parents(graph, [tree((0, 1), (1, 2), (2, 3)), tree((0, 1), (0, 2), (0, 3))], enough=1)
        >>> sorted(tree.depth for tree in found)
        [2, 2]
    """
    depths = [tree.depth for tree in trees]
    if len(trees) < 2 or max(depths) <= enough:
        return trees
    exchange, work = _Exchange(graph, trees), 0
    while work < _MOST_WORK and (deepest := int(exchange.deepest.max())) > enough:
        work += deepest * len(exchange.multiplicities)
        if not exchange.improve(int(exchange.deepest.argmax())):
            break
    return exchange.trees()


class _Exchange:
    """Trees as parents of ranks, while these change."""

    def __init__(self, graph: FlowGraph, trees: list[LinkTree]) -> None:
        self.graph, self.grown = graph, list(trees)
        rank_of = np.full(graph.num_vertices, -1, dtype=np.int64)
        rank_of[graph.ranks] = np.arange(len(graph.ranks))
        self.ways: list[dict[int, IntArray]] = [{} for _ in trees]  # into ranks, where they are no longer as grown
        self.multiplicities = [tree.multiplicity for tree in trees]
        shape = len(trees), len(graph.ranks)
        self.parent, self.depth, self.height = (np.full(shape, -1, dtype=np.int64) for _ in range(3))
        for number, tree in enumerate(trees):
            begins = np.concatenate([[0], tree.stops[:-1]])
            heads = rank_of[graph.head[tree.links[tree.stops - 1]]]
            self.parent[number, heads] = rank_of[graph.tail[tree.links[begins]]]
            self.measure(number)
        self.deepest = self.depth.max(axis=1)

    def measure(self, number: int) -> None:
        """How far each rank of a tree is from its root, and from the farthest that hangs on it."""
        parent = self.parent[number]
        depth = (parent >= 0).astype(np.int64)
        above = np.where(parent >= 0, parent, np.arange(len(parent)))
        while depth[above].any():
            depth += depth[above]
            above = above[above]
        height = np.zeros_like(depth)
        for level in range(int(depth.max()), 0, -1):
            here = np.flatnonzero(depth == level)
            np.maximum.at(height, parent[here], height[here] + 1)
        self.depth[number], self.height[number] = depth, height

    def improve(self, number: int) -> bool:
        """One exchange that makes the deepest rank of a tree less deep, by as much as any; whether there is one."""
        depth, parent = self.depth[number], self.parent[number]
        rank = int(depth.argmax())
        most = int(depth[rank])
        way = np.empty(most, dtype=np.int64)
        for place in range(most):
            way[place] = rank
            rank = int(parent[rank])
        other = self.parent[:, way]
        gained = np.where(other >= 0, depth[way] - depth[other] - 1, 0)
        reached = self.depth[:, parent[way]] + 1 + self.height[:, way]
        reached[number] = most
        cost = np.maximum(most - gained, reached)
        cost[(gained <= 0) | (reached >= most)] = most
        is_split = np.array(self.multiplicities) != self.multiplicities[number]
        order = np.argsort((2 * cost + is_split[:, None]).ravel(), kind="stable")
        for choice in order.tolist():
            with_, place = divmod(choice, most)
            if cost[with_, place] >= most:
                return False
            rank = int(way[place])
            if not self.hangs(with_, int(parent[rank]), rank):
                self.exchange(number, with_, rank)
                return True
        return False

    def hangs(self, number: int, rank: int, other: int) -> bool:
        """Whether a rank hangs on another in a tree."""
        parent = self.parent[number]
        while rank >= 0 and self.depth[number, rank] > self.depth[number, other]:
            rank = int(parent[rank])
        return rank == other

    def exchange(self, one: int, two: int, rank: int) -> None:
        """A rank enters each of two trees as it did the other; as many units of both as the smaller has."""
        units = min(self.multiplicities[one], self.multiplicities[two])
        for number in (one, two):
            if self.multiplicities[number] > units:
                self.split(number, units)
        way_one, way_two = self.way(one, rank), self.way(two, rank)
        self.ways[one][rank], self.ways[two][rank] = way_two, way_one
        self.parent[[one, two], rank] = self.parent[[two, one], rank]
        for number in (one, two):
            self.measure(number)
            self.deepest[number] = self.depth[number].max()

    def split(self, number: int, units: int) -> None:
        """A tree keeps so many units; the others become one that is the same so far."""
        self.grown.append(self.grown[number])
        self.ways.append(dict(self.ways[number]))
        self.multiplicities.append(self.multiplicities[number] - units)
        self.multiplicities[number] = units
        self.parent, self.depth, self.height, self.deepest = (
            np.concatenate([rows, rows[number : number + 1]])
            for rows in (self.parent, self.depth, self.height, self.deepest)
        )

    def way(self, number: int, rank: int) -> IntArray:
        """The links over which a tree enters a rank."""
        known = self.ways[number].get(rank)
        if known is not None:
            return known
        tree = self.grown[number]
        place = int(np.flatnonzero(self.graph.head[tree.links[tree.stops - 1]] == self.graph.ranks[rank])[0])
        return tree.links[(tree.stops[place - 1] if place else 0) : tree.stops[place]]

    def trees(self) -> list[LinkTree]:
        """As they are now, ways from the root outwards."""
        found = []
        for number, (tree, multiplicity) in enumerate(zip(self.grown, self.multiplicities, strict=True)):
            if self.ways[number]:
                ways = [self.way(number, rank) for rank in np.argsort(self.depth[number], kind="stable")[1:].tolist()]
                tree = replace(
                    tree,
                    links=np.concatenate(ways),
                    stops=np.cumsum([len(way) for way in ways]),
                    depth=int(self.deepest[number]),
                )
            found.append(replace(tree, multiplicity=multiplicity))
        return found
