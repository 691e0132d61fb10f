"""Builders: the fabrics of the suite up to the numbering of vertices, and properties of the rest."""

from __future__ import annotations

from pathlib import Path

import networkx as nx
import pytest

from mycel.errors import TopologyError
from mycel.topology import Topology, load_topology
from mycel.topology.builders import (
    dgx1_v100,
    dgx_a100,
    dgx_h100,
    dragonfly,
    fat_tree,
    full_mesh,
    hosts,
    hypercube,
    loopback,
    mesh,
    mi250,
    ring,
    star,
    torus,
    two_boxes,
)

SUITE = Path(__file__).parents[1] / "data" / "topologies"

SAME_AS_SUITE = {
    "a100_x1": dgx_a100(),
    "a100_x2": dgx_a100(num_nodes=2),
    "a100_x4": dgx_a100(num_nodes=4),
    "h100_x1": dgx_h100(),
    "h100_x2": dgx_h100(num_nodes=2),
    "mi250_x1": mi250(),
    "mi250_x2": mi250(num_nodes=2),
    "dgx1_v100": dgx1_v100(),
    "torus_4x4": torus(dims=(4, 4)),
    "ring_8": ring(num_ranks=8),
    "hypercube_16": hypercube(dim=4),
    "fattree_k4_os2": fat_tree(k=4),
    "dragonfly_g3a2p2": dragonfly(),
}


def graph(topology: Topology) -> nx.DiGraph:
    """The fabric without names."""
    result = nx.DiGraph()
    for number, vertex in enumerate(topology.vertices):
        result.add_node(number, kind=vertex.kind)
    for link in topology.links:
        result.add_edge(link.src, link.dst, capacity=link.capacity)
    return result


def isomorphic(a: Topology, b: Topology) -> bool:
    """Whether one numbering of vertices turns one fabric into the other."""
    return bool(nx.is_isomorphic(graph(a), graph(b), node_match=lambda x, y: x == y, edge_match=lambda x, y: x == y))


@pytest.mark.parametrize("name", SAME_AS_SUITE)
def test_builders_make_the_fabrics_of_the_suite(name: str) -> None:
    built, expected = SAME_AS_SUITE[name], load_topology(SUITE / f"{name}.json")
    assert built.unit == expected.unit
    assert isomorphic(built, expected)


def test_the_comparison_sees_a_difference() -> None:
    expected = load_topology(SUITE / "ring_8.json")
    assert not isomorphic(ring(num_ranks=8, bandwidth=2), expected)
    assert not isomorphic(mesh(dims=(8,)), expected)
    assert not isomorphic(star(num_ranks=7, bandwidth=1), expected)


@pytest.mark.parametrize(
    "topology",
    [
        *SAME_AS_SUITE.values(),
        star(num_ranks=5, latency="3us"),
        two_boxes(num_ranks=7),
        two_boxes(shared_uplink=True),
        loopback(num_ranks=3),
        mesh(dims=(2, 3, 2)),
        torus(dims=(2, 4)),
        full_mesh(num_ranks=5, bandwidth="10 Gb/s"),
        dgx1_v100(num_nodes=2),
        fat_tree(k=2),
        dragonfly(num_groups=5, num_routers=3, num_ranks_per_router=1),
        hosts(["a", "b", "b", "c"]),
    ],
    ids=lambda topology: topology.name,
)
def test_cables_are_symmetric_and_ranks_come_first(topology: Topology) -> None:
    assert all(topology.capacity[dst, src] == capacity for (src, dst), capacity in topology.capacity.items())
    assert topology.ranks == tuple(range(topology.num_ranks))


def test_two_boxes_shapes() -> None:
    topology = two_boxes(num_ranks=7, between_latency="1ms")
    assert [vertex.node for vertex in topology.vertices if vertex.kind == "rank"] == ["left"] * 4 + ["right"] * 3
    left, right, core = topology.switches
    assert [topology.label(vertex) for vertex in topology.switches] == ["left/switch", "right/switch", "core"]
    assert all(topology.capacity[vertex, core] == 50 for vertex in topology.ranks)
    assert all(topology.latency_s[vertex, core] == 1e-3 for vertex in topology.ranks)
    shared = two_boxes(shared_uplink=True, between="200 Mbit/s").capacity
    assert (shared[8, 10], shared[9, 10], shared[0, 8]) == (200, 200, 400)
    assert (0, 10) not in shared
    assert (left, right) not in topology.capacity


def test_lattices() -> None:
    assert len(torus(dims=(2, 4)).links) == 2 * (8 + 4)
    assert len(torus(dims=(3, 3, 3)).links) == 2 * 27 * 3
    assert len(torus(dims=(1, 5)).links) == 10
    assert len(ring(num_ranks=2).links) == 2
    assert len(mesh(dims=(3, 4)).links) == 2 * (2 * 4 + 3 * 3)
    assert isomorphic(torus(dims=(2, 2, 2)), hypercube(dim=3))


def test_parallel_cables_add_up() -> None:
    by_label = {
        (mi250().label(src), mi250().label(dst)): capacity for (src, dst), capacity in mi250().capacity.items()
    }
    assert by_label["node0/0", "node0/1"] == 200
    v100 = dgx1_v100()
    assert {sum(c for (src, _), c in v100.capacity.items() if src == rank) for rank in v100.ranks} == {150}
    one_node, two = mi250(), mi250(num_nodes=2)
    assert sum(one_node.capacity.values()) == 2 * 56 * 50  # 56 xGMI links, both directions
    assert sum(two.capacity.values()) == 2 * sum(one_node.capacity.values()) + 2 * 32 * 16


def test_larger_halls() -> None:
    tree = fat_tree(k=6, host="100 GB/s", edge="100 GB/s", core="100 GB/s")
    assert tree.num_ranks == 6**3 // 4
    assert len(tree.switches) == 6 * 6 + 6**2 // 4
    assert all(sum(1 for link in tree.links if link.src == switch) == 6 for switch in tree.switches)
    fly = dragonfly(num_groups=9, num_routers=4, num_ranks_per_router=2)
    group_of = {number: vertex.label.split("/")[0] for number, vertex in enumerate(fly.vertices)}
    between = [(group_of[k.src], group_of[k.dst], k.src) for k in fly.links if group_of[k.src] != group_of[k.dst]]
    assert len({(a, b) for a, b, _ in between}) == len(between) == 9 * 8
    assert {sum(1 for *_, src in between if src == switch) for switch in fly.switches} == {2}


def test_hosts_group_ranks_by_machine() -> None:
    topology = hosts(["b", "a", "b", "c"], inside="4 GB/s", between="1 GB/s")
    assert [topology.label(vertex) for vertex in topology.ranks] == ["b/0", "a/0", "b/1", "c/0"]
    assert [topology.vertices[vertex].node for vertex in topology.ranks] == ["b", "a", "b", "c"]
    named = {(topology.label(src), topology.label(dst)): c for (src, dst), c in topology.capacity.items()}
    assert named["b/0", "b/switch"] == 4
    assert named["b/switch", "network"] == named["a/0", "network"] == named["c/0", "network"] == 1
    assert len(named) == 2 * (2 + 1 + 2)
    assert hosts(["x", "x", "x"]) == loopback(num_ranks=3)


@pytest.mark.parametrize("names", [[], ["a"], ["a", ""], "ab"])
def test_hosts_that_make_no_sense(names: list[str]) -> None:
    with pytest.raises(TopologyError, match=r"^hosts: "):
        hosts(names)


def test_arguments_of_the_wrong_kind() -> None:
    for wrong in (0, -1, True, 1.5, None):
        with pytest.raises(TopologyError, match=r"star_4: bandwidth"):
            star(num_ranks=4, bandwidth=wrong)  # type: ignore[arg-type]
    for latency in (-1.0, float("nan"), float("inf"), None):
        with pytest.raises(TopologyError, match=r"^star_4: "):
            star(num_ranks=4, latency=latency)  # type: ignore[arg-type]
    for count in (1, True, 2.0, "3"):
        with pytest.raises(TopologyError, match=r"^star: num_ranks must be a whole number of at least 2"):
            star(num_ranks=count)  # type: ignore[arg-type]


def test_mixed_units_find_a_common_one() -> None:
    topology = two_boxes(inside="25 GB/s", between="100 Gbit/s")
    assert topology.unit == "Gbit/s"
    assert sorted(set(topology.capacity.values())) == [100, 200]
    assert dgx1_v100(num_nodes=2, nic="12.5 GB/s").unit == "MB/s"
