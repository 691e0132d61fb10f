"""Trees that exchange parents: the same links as often, trees all the same, and none as deep as the deepest was."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mycel.collectives.maxflow import FlowGraph
from mycel.collectives.synth.link_trees import LinkTree
from mycel.collectives.synth.parents import exchange_parents
from mycel.topology.load import load_topology

FABRICS = ("star:ranks=9", "full_mesh:ranks=7", "torus:dims=3x4", "dgx_a100:nodes=2", "mi250:nodes=2")


def ways_of(graph: FlowGraph) -> dict[tuple[int, int], list[list[int]]]:
    """Between neighbouring ranks, over switches too: all ways without a vertex twice, as links."""
    is_rank = set(graph.ranks.tolist())
    found: dict[tuple[int, int], list[list[int]]] = {}

    def go(start: int, vertex: int, way: list[int], seen: set[int]) -> None:
        for arc in np.flatnonzero(graph.tail == vertex).tolist():
            head = int(graph.head[arc])
            if head in seen:
                continue
            if head in is_rank:
                found.setdefault((start, head), []).append([*way, arc])
            else:
                go(start, head, [*way, arc], {*seen, head})

    for rank in is_rank:
        go(rank, rank, [], {rank})
    return found


def tree_by_chance(graph: FlowGraph, ways: dict, rng: np.random.Generator, *, chain: bool) -> LinkTree:
    """A spanning tree; a chain goes on from the rank that was reached last, where it can."""
    ranks = graph.ranks.tolist()
    root = int(rng.integers(len(ranks)))
    depth, links, stops, last = {ranks[root]: 0}, [], [], ranks[root]
    while len(depth) < len(ranks):
        edges = [(a, b) for a, b in ways if a in depth and b not in depth]
        onwards = [edge for edge in edges if edge[0] == last]
        edges = onwards if chain and onwards else edges
        a, b = edges[int(rng.integers(len(edges)))]
        choice = ways[a, b]
        links += choice[int(rng.integers(len(choice)))]
        stops.append(len(links))
        depth[b], last = depth[a] + 1, b
    return LinkTree(
        root=root,
        multiplicity=int(rng.integers(1, 4)),
        links=np.array(links),
        stops=np.array(stops),
        depth=max(depth.values()),
        is_whole=True,
    )


def checked_depth(graph: FlowGraph, tree: LinkTree) -> int:
    """Of a tree whose ways are found to join, each from a rank that stands before, and to reach every rank once."""
    depth = {int(graph.ranks[tree.root]): 0}
    for begin, stop in zip([0, *tree.stops[:-1].tolist()], tree.stops.tolist(), strict=True):
        way = tree.links[begin:stop]
        assert np.array_equal(graph.head[way[:-1]], graph.tail[way[1:]])
        tail, head = int(graph.tail[way[0]]), int(graph.head[way[-1]])
        assert tail in depth and head not in depth
        depth[head] = depth[tail] + 1
    assert sorted(depth) == sorted(graph.ranks.tolist())
    return max(depth.values())


def uses(graph: FlowGraph, trees: list[LinkTree]) -> tuple[list[int], list[int]]:
    """Units of each link, and of each root."""
    load, units = np.zeros(len(graph.tail), dtype=np.int64), np.zeros(len(graph.ranks), dtype=np.int64)
    for tree in trees:
        np.add.at(load, tree.links, tree.multiplicity)
        units[tree.root] += tree.multiplicity
    return load.tolist(), units.tolist()


@settings(max_examples=60, deadline=None)
@given(fabric=st.sampled_from(FABRICS), count=st.integers(1, 6), enough=st.integers(1, 6), seed=st.integers(0, 999))
def test_links_and_roots_keep_their_units_and_no_tree_is_deeper(fabric, count, enough, seed):
    graph = FlowGraph.of(load_topology(fabric))
    ways, rng = ways_of(graph), np.random.default_rng(seed)
    trees = [tree_by_chance(graph, ways, rng, chain=number == 0) for number in range(count)]
    before = uses(graph, trees)
    found = exchange_parents(graph, trees, enough=enough)
    assert uses(graph, found) == before
    assert [tree.depth for tree in found] == [checked_depth(graph, tree) for tree in found]
    deepest = max(tree.depth for tree in trees)
    assert max(tree.depth for tree in found) <= deepest
    if deepest <= enough:
        assert found == trees


@pytest.mark.parametrize("units", [1, 3])
def test_one_long_way_beside_short_ones_becomes_short(units):
    graph = FlowGraph.of(load_topology("full_mesh:ranks=16"))
    place = {ends: arc for arc, ends in enumerate(zip(graph.tail.tolist(), graph.head.tolist(), strict=True))}

    def tree(root: int, ways: list[tuple[int, int]], depth: int, multiplicity: int) -> LinkTree:
        links, stops = np.array([place[way] for way in ways]), np.arange(1, len(ways) + 1)
        return LinkTree(root=root, multiplicity=multiplicity, links=links, stops=stops, depth=depth, is_whole=True)

    long = tree(0, [(rank, rank + 1) for rank in range(15)], 15, 1)
    short = [tree(root, [(root, rank) for rank in range(16) if rank != root], 1, units) for root in range(1, 6)]
    found = exchange_parents(graph, [long, *short], enough=4)
    assert max(checked_depth(graph, tree) for tree in found) <= 4
    assert sum(tree.multiplicity for tree in found) == 1 + 5 * units
    assert uses(graph, found) == uses(graph, [long, *short])
