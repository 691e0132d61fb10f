"""The Topology itself: derived topologies, and what it refuses."""

from __future__ import annotations

import pytest

from mycel.errors import TopologyError
from mycel.topology import Link, Topology, Vertex
from mycel.topology.builders import dgx_a100, ring, star, two_boxes


def test_subset_of_a_star_keeps_the_switch() -> None:
    whole = star(num_ranks=5, bandwidth="100 Mbit/s", latency="2us")
    part = whole.subset([4, 0, 2, 2])
    assert [part.label(vertex) for vertex in part.ranks] == ["0", "2", "4"]
    assert [part.label(vertex) for vertex in part.switches] == ["switch"]
    assert part.capacity == {(0, 3): 100, (1, 3): 100, (2, 3): 100, (3, 0): 100, (3, 1): 100, (3, 2): 100}
    assert set(part.latency_s.values()) == {2e-6}


def test_subset_of_a_ring_lets_the_others_forward() -> None:
    part = ring(num_ranks=8).subset([0, 2, 4, 6])
    assert part.num_ranks == 4
    assert [part.label(vertex) for vertex in part.switches] == ["1", "3", "5", "7"]
    assert len(part.links) == 16
    neighbours = ring(num_ranks=8).subset([1, 2, 3])
    assert (neighbours.num_ranks, len(neighbours.switches), len(neighbours.links)) == (3, 0, 4)


def test_subset_of_one_node() -> None:
    part = two_boxes().subset(range(4, 8))
    assert [vertex.node for vertex in part.vertices if vertex.kind == "rank"] == ["right"] * 4
    assert part.subset([0, 1]).num_ranks == 2


@pytest.mark.parametrize(
    ("ranks", "expected"), [([0, 8], "no rank 8 among 8"), ([-1, 2], "no rank -1"), ([3], "1 rank"), ([], "0 rank")]
)
def test_subsets_that_make_no_sense(ranks: list[int], expected: str) -> None:
    with pytest.raises(TopologyError, match=expected):
        ring(num_ranks=8).subset(ranks)


def test_reversed_turns_every_link_round() -> None:
    vertices = tuple(Vertex(kind="rank", label=label) for label in "abc")
    circle = ((0, 1, 5), (1, 2, 6), (2, 0, 7), (1, 0, 1))
    links = tuple(Link(src=s, dst=d, capacity=c, latency_s=c * 1e-6) for s, d, c in circle)
    topology = Topology(name="t", unit="link", vertices=vertices, links=links)
    back = topology.reversed()
    assert back.capacity == {(1, 0): 5, (2, 1): 6, (0, 2): 7, (0, 1): 1}
    assert back.latency_s[2, 1] == topology.latency_s[1, 2]
    assert back.vertices == topology.vertices
    assert back.reversed() == topology
    assert back.fingerprint != topology.fingerprint == back.reversed().fingerprint


def test_equal_topologies_hash_alike_and_the_name_is_no_part_of_the_fingerprint() -> None:
    assert hash(dgx_a100(num_nodes=2)) == hash(dgx_a100(num_nodes=2))
    plain = star(num_ranks=3)
    renamed = Topology(name="other", unit=plain.unit, vertices=plain.vertices, links=plain.links)
    assert renamed != plain
    assert renamed.fingerprint == plain.fingerprint
    assert star(num_ranks=3, latency="1us").fingerprint != plain.fingerprint


def test_units() -> None:
    vertices = (Vertex(kind="rank", label="a"), Vertex(kind="rank", label="b"))
    links = (Link(src=0, dst=1, capacity=2), Link(src=1, dst=0, capacity=1))
    topology = Topology(name="t", unit="Gb/s", vertices=vertices, links=links)
    assert topology.bytes_per_second_per_unit == 125_000_000
    assert ring(num_ranks=3).bytes_per_second_per_unit is None
    with pytest.raises(TopologyError, match="unknown unit 'furlong'; known units: link, bit/s"):
        Topology(name="t", unit="furlong", vertices=vertices, links=links)
    with pytest.raises(TopologyError, match="expected rank or switch"):
        Topology(name="t", unit="link", vertices=(*vertices, Vertex(kind="cpu", label="c")), links=links)  # type: ignore[arg-type]


@pytest.mark.parametrize("order", [[3, 1, 0, 2], [1, 2, 3, 0]])
def test_ranks_in_another_order_are_the_same_fabric(order: list[int]) -> None:
    vertices = tuple(Vertex(kind="switch" if label == "s" else "rank", label=label) for label in "asbcd")
    pairs = [(v, 1) for v in (0, 2, 3, 4)] + [(1, v) for v in (0, 2, 3, 4)] + [(2, 3)]
    links = tuple(Link(src=a, dst=b, capacity=1 + n, latency_s=n * 1e-6) for n, (a, b) in enumerate(pairs))
    whole = Topology(name="t", unit="link", vertices=vertices, links=links)
    turned = whole.reordered(order)

    def by_label(topology: Topology) -> set[tuple[str, str, int, float]]:
        return {(topology.label(k.src), topology.label(k.dst), k.capacity, k.latency_s) for k in topology.links}

    assert [turned.label(vertex) for vertex in turned.ranks] == ["abcd"[rank] for rank in order]
    assert by_label(turned) == by_label(whole) and turned.switches == whole.switches
    assert turned.reordered([order.index(rank) for rank in range(4)]).capacity == whole.capacity


def test_orders_that_make_no_sense() -> None:
    for order in ([0, 1], [0, 1, 1, 2], [1, 2, 3, 4]):
        with pytest.raises(TopologyError, match="is no order of 4 ranks"):
            ring(num_ranks=4).reordered(order)
