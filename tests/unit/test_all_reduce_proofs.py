"""What proves all_reduce's bound: prices of links, groups of ranks, and what is said where nothing meets it."""

from __future__ import annotations

import json
import random
from fractions import Fraction

import networkx as nx
import numpy as np
import pytest
from tests.effort import long
from typer.testing import CliRunner

from mycel.cli import build_app
from mycel.collectives import allreduce_bound
from mycel.collectives import bound as bounds
from mycel.collectives.bound import bound, find_division
from mycel.collectives.maxflow import FlowGraph
from mycel.collectives.partition_bound import groups_at_prices, least_cut, partition_rate, quick_limit
from mycel.collectives.symmetry import find_classes
from mycel.collectives.tree_prices import cheapest_trees, rate_at_prices
from mycel.topology.builders import star
from mycel.topology.load import load_topology
from mycel.topology.model import Link, Topology, Vertex


def raw(num_ranks: int, num_switches: int, links: dict[tuple[int, int], int], *, seed: int | None = None) -> Topology:
    """A fabric of numbers alone: cables both ways, vertices renumbered on request."""
    count = num_ranks + num_switches
    place = list(range(count))
    if seed is not None:
        random.Random(seed).shuffle(place)
    kinds = [""] * count
    for vertex in range(count):
        kinds[place[vertex]] = "rank" if vertex < num_ranks else "switch"
    ends = [(place[a], place[b], c) for (a, b), c in links.items()]
    return Topology(
        name="raw",
        unit="link",
        vertices=tuple(Vertex(kind=kind, label=f"v{number}") for number, kind in enumerate(kinds)),
        links=tuple(Link(src=s, dst=d, capacity=c) for a, b, c in ends for s, d in ((a, b), (b, a))),
    )


def printed(*arguments: str) -> str:
    return CliRunner().invoke(build_app(), ["bound", *arguments], catch_exceptions=False).stdout


def unlike_boxes(*, seed: int | None = None) -> Topology:
    """Forty ranks in boxes of eight round a switch each, boxes with interfaces of 3, 3, 5, 9 and 9."""
    links: dict[tuple[int, int], int] = {}
    for box, interface in enumerate((3, 3, 5, 9, 9)):
        for rank in range(8 * box, 8 * box + 8):
            links |= {(rank, 40 + box): 40, (rank, 45): interface}
    return raw(40, 6, links, seed=seed)


@pytest.mark.parametrize("seed", range(8))
def test_cheapest_trees_are_those_of_another_implementation(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 9))
    distance = rng.integers(0, 6, (size, size)).astype(float)
    for root, cost in enumerate(cheapest_trees(distance).tolist()):
        graph = nx.DiGraph()
        graph.add_weighted_edges_from(
            (a, b, distance[a, b]) for a in range(size) for b in range(size) if a != b and b != root
        )
        assert nx.minimum_spanning_arborescence(graph).size("weight") == cost


@pytest.mark.parametrize("name", ["ring:ranks=5", "torus:dims=2x3", "two_boxes:ranks=6", "fat_tree:k=4"])
def test_no_prices_prove_less_than_what_is_reached(name):
    topology = load_topology(name)
    reached = bound(topology, "all_reduce").reached
    rng = random.Random(7)
    for _ in range(50):
        proved = rate_at_prices(topology, [rng.choice((0, 0, 1, 2, 5)) for _ in topology.links])
        assert proved is None or proved >= reached


def test_prices_that_nobody_pays_prove_nothing():
    topology = load_topology("ring:ranks=4")
    assert rate_at_prices(topology, [0] * 8) is None
    assert rate_at_prices(topology, [1] + [0] * 7) is None


def test_unlike_boxes_are_exact_whatever_their_numbers():
    found = [bound(unlike_boxes(seed=seed), "all_reduce") for seed in (None, 1, 2)]
    assert {(best.algbw, best.is_exact) for best in found} == {(Fraction(23), True)}
    assert all(best.composition < best.algbw for best in found)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=long) for seed in range(1, 60))])
def test_the_bound_is_never_above_a_flow_between_two_ranks(seed):
    rng, num_ranks = random.Random(seed), 33 + seed
    count = num_ranks + 3
    cables = {(a, rng.randrange(a)): rng.randint(1, 9) for a in range(1, count)}
    cables |= {tuple(sorted(rng.sample(range(count), 2)))[::-1]: rng.randint(1, 9) for _ in range(count)}
    topology = raw(num_ranks, 3, cables, seed=seed)
    graph = nx.DiGraph()
    graph.add_weighted_edges_from(((k.src, k.dst, k.capacity) for k in topology.links), weight="capacity")
    first, *others = topology.ranks
    least = min(nx.maximum_flow_value(graph, *pair) for v in others for pair in ((first, v), (v, first)))
    assert least_cut(topology)[0] == least
    best, _ = find_division(topology)
    assert best.limit * Fraction(97, 100) <= best.reached <= best.limit <= least


def three_cables_each(num_ranks: int, first: int) -> dict[tuple[int, int], int]:
    """A ring with chords across, one cable of which is cut in two by a last rank, which has two cables so."""
    size = num_ranks - 1
    pairs = [(i, (i + 1) % size) for i in range(size)] + [(i, i + size // 2) for i in range(size // 2)]
    pairs.remove((0, 1))
    pairs += [(0, size), (1, size)]
    return {(first + a, first + b): 1 for a, b in pairs}


def test_links_that_look_alike_and_are_not_prove_nothing_false():
    """Two unlike parts joined by one cable: to colour refinement every rank is the same."""
    topology = raw(36, 0, three_cables_each(5, 0) | three_cables_each(31, 5) | {(4, 35): 1}, seed=3)
    graph = FlowGraph.of(topology)
    assert not any(find_classes(graph, np.ones(len(topology.links), dtype=np.int64))[1])
    programme = allreduce_bound._programme(topology, with_classes=True)
    assert programme.optimise().rate == pytest.approx(36 / 62)  # of solutions that do not tell links apart
    best, composition = find_division(topology)
    assert composition == Fraction(36, 62)
    assert best.limit == best.reached == 1


def test_both_ends_are_printed_where_nothing_meets_the_bound(monkeypatch, tmp_path):
    monkeypatch.setattr(bounds, "_find_division", bounds._find_division.__wrapped__)
    monkeypatch.setattr(allreduce_bound, "_LARGEST", 10)
    file = tmp_path / "fabric.json"
    topology = unlike_boxes()
    file.write_text(
        json.dumps(
            {
                "name": "boxes",
                "unit": "GB/s",
                "nodes": [{"id": n, "type": v.kind} for n, v in enumerate(topology.vertices)],
                "links": [{"src": k.src, "dst": k.dst, "capacity": k.capacity} for k in topology.links],
            }
        )
    )
    text = printed(str(file), "-c", "all_reduce")
    assert "15 to 23.4872 GB/s of all_reduce" in text and "exactly" not in text
    assert "Nothing is shown to meet that" in text
    record = json.loads(printed(str(file), "-c", "all_reduce", "--json"))
    assert not record["exact"] and record["reached_algbw"] == 15 < record["bound_algbw"]


@pytest.mark.parametrize("name", ["star:ranks=5", "two_boxes:ranks=8", "dgx_a100:boxes=4", "torus:dims=4x4"])
def test_groups_prove_the_bound_of_common_fabrics(name):
    topology = load_topology(name)
    best = bound(topology, "all_reduce")
    assert best.groups and partition_rate(topology, best.groups) == best.algbw
    assert set(topology.ranks) <= frozenset().union(*best.groups)
    assert sum(map(len, best.groups)) == len(frozenset().union(*best.groups))
    assert "No schedule of any kind does better" in best.explain()


def test_groups_that_prove_something_else_are_no_proof():
    topology = load_topology("star:ranks=5")
    limit = quick_limit(topology)[0]
    assert groups_at_prices(topology, [1] * len(topology.links), limit)
    assert groups_at_prices(topology, [1] * len(topology.links), limit + 1) == ()


def test_switches_that_add_are_reached_and_left():
    plain, adding = load_topology("star:ranks=5"), star(num_ranks=5, computes=True)
    single = tuple(frozenset([rank]) for rank in plain.ranks)
    assert partition_rate(adding, single) == 2 * partition_rate(plain, single)
    assert bound(adding, "all_reduce").reached <= partition_rate(adding, single)
