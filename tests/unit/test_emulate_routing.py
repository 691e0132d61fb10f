"""Routes of an emulated cluster: default next hops and pinned trees."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mycel.emulate.routing import default_next_hops, merge_paths, switch_paths
from mycel.topology import Link, Topology, Vertex
from mycel.topology.builders import ring, star, two_boxes

WIDE, NARROW = 10, 1


def fabric(num_ranks: int, num_switches: int, links: dict[tuple[int, int], int]) -> Topology:
    kinds = ["rank"] * num_ranks + ["switch"] * num_switches
    return Topology(
        name="test",
        unit="Mbit/s",
        vertices=tuple(Vertex(kind=kind, label=str(i)) for i, kind in enumerate(kinds)),  # type: ignore[arg-type]
        links=tuple(Link(src=a, dst=b, capacity=c) for (a, b), c in links.items()),
    )


def both_ways(links: dict[tuple[int, int], int]) -> dict[tuple[int, int], int]:
    return links | {(b, a): c for (a, b), c in links.items()}


def follow(hops: dict[int, int], src: int, dst: int) -> list[int]:
    path = [src]
    while path[-1] != dst:
        path.append(hops[path[-1]])
        assert len(path) <= len(hops) + 1, f"routes loop: {path}"
    return path


@st.composite
def fabrics(draw: st.DrawFn) -> Topology:
    num_ranks, num_switches = draw(st.integers(2, 5)), draw(st.integers(0, 4))
    size = num_ranks + num_switches
    # A one-way ring through all vertices, so that everything is connected, and whatever else comes up.
    links = {(v, (v + 1) % size): draw(st.integers(1, 9)) for v in range(size)}
    for a, b, capacity in draw(st.lists(st.tuples(*[st.integers(0, size - 1)] * 2, st.integers(1, 9)), max_size=12)):
        if a != b:
            links[a, b] = capacity
    return fabric(num_ranks, num_switches, links)


@given(fabrics())
@settings(max_examples=60, deadline=None)
def test_default_routes_reach_every_rank_over_existing_links(topology: Topology) -> None:
    for dst in topology.ranks:
        hops = default_next_hops(topology, dst)
        for src in topology.ranks:
            path = follow(hops, src, dst)
            assert all(hop in topology.capacity for hop in pairwise(path))


@given(fabrics())
@settings(max_examples=60, deadline=None)
def test_merged_trees_pin_every_path_and_lead_nowhere_else(topology: Topology) -> None:
    pairs = [(a, b) for a in topology.ranks for b in topology.ranks if a != b]
    paths = [path for a, b in pairs for path in switch_paths(topology, a, b, max_paths=8)]
    trees = merge_paths(paths)
    assert sorted(path for tree in trees for path in tree.paths) == sorted(paths)
    for tree in trees:
        for path in tree.paths:
            assert tuple(follow(tree.next_hop, path[0], tree.destination)) == path
        assert len({path[0] for path in tree.paths}) == len(tree.paths), "two paths of one pair share an address"


@given(fabrics())
@settings(max_examples=60, deadline=None)
def test_switch_paths_are_simple_and_shortest_first(topology: Topology) -> None:
    paths = switch_paths(topology, 0, 1, max_paths=64)
    assert len(set(paths)) == len(paths)
    assert [len(path) for path in paths] == sorted(len(path) for path in paths)
    for path in paths:
        assert (path[0], path[-1]) == (0, 1)
        assert len(set(path)) == len(path)
        assert all(topology.vertices[v].kind == "switch" for v in path[1:-1])
        assert all(hop in topology.capacity for hop in pairwise(path))


def test_the_widest_way_is_taken_before_the_shortest() -> None:
    topology = fabric(2, 3, both_ways({(0, 2): NARROW, (2, 1): NARROW, (0, 3): WIDE, (3, 4): WIDE, (4, 1): WIDE}))
    assert follow(default_next_hops(topology, 1), 0, 1) == [0, 3, 4, 1]


def test_among_equally_wide_ways_the_fewest_hops() -> None:
    topology = fabric(2, 3, both_ways({(0, 2): WIDE, (2, 1): WIDE, (0, 3): WIDE, (3, 4): WIDE, (4, 1): WIDE}))
    assert follow(default_next_hops(topology, 1), 0, 1) == [0, 2, 1]


def test_a_wider_way_through_another_rank_is_not_taken() -> None:
    topology = fabric(3, 1, both_ways({(0, 3): NARROW, (3, 1): NARROW, (0, 2): WIDE, (2, 1): WIDE}))
    assert follow(default_next_hops(topology, 1), 0, 1) == [0, 3, 1]


def test_ranks_of_a_ring_forward() -> None:
    assert follow(default_next_hops(ring(num_ranks=5), 2), 0, 2) == [0, 1, 2]


def test_both_planes_of_two_boxes_are_pinned() -> None:
    topology = two_boxes(num_ranks=4)
    node, core = (
        next(i for i, v in enumerate(topology.vertices) if v.label == name) for name in ("left/switch", "core")
    )
    assert set(switch_paths(topology, 0, 1, max_paths=64)) == {(0, node, 1), (0, core, 1)}
    assert switch_paths(topology, 0, 2, max_paths=64) == [(0, core, 2)]


def test_a_star_needs_one_pinned_address_a_rank() -> None:
    topology = star(num_ranks=6)
    paths = [p for a in range(6) for b in range(6) if a != b for p in switch_paths(topology, a, b, max_paths=64)]
    assert (len(paths), len(merge_paths(paths))) == (30, 6)


@pytest.mark.parametrize("limit", [1, 3])
def test_no_more_paths_than_asked_for(limit: int) -> None:
    middle = {(0, s): 1 for s in range(2, 8)} | {(s, 1): 1 for s in range(2, 8)}
    assert len(switch_paths(fabric(2, 6, both_ways(middle)), 0, 1, max_paths=limit)) == limit
