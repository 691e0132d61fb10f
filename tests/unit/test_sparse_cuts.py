"""Sparse cuts: tori are cut across their longest side whichever cables have failed, and however they are numbered."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from mycel.collectives.concurrent_flow import bracket_flow, proven_time
from mycel.collectives.flow_bound import solve_flow
from mycel.collectives.maxflow import BoolArray, FlowGraph, IntArray, as_int64
from mycel.collectives.sparse_cuts import sparsest_cut
from mycel.collectives.spec import Collective
from mycel.topology.builders import full_mesh, hypercube, star
from mycel.topology.model import Link, Topology, Vertex

Cables = set[frozenset[tuple[int, ...]]]


def cables(dims: tuple[int, ...], num_failed: int, seed: int) -> Cables:
    """Cables of a torus, some of which have failed."""
    found = {
        frozenset((at, tuple((x + (i == axis)) % dims[i] for i, x in enumerate(at))))
        for at in product(*(range(size) for size in dims))
        for axis in range(len(dims))
    }
    gone = random.Random(seed).sample(sorted(sorted(ends) for ends in found), num_failed)
    return found - {frozenset(ends) for ends in gone}


def numbered(joined: Cables, seed: int) -> Topology:
    """Ranks and links in an order drawn by chance."""
    rng = random.Random(seed)
    places = sorted({place for ends in joined for place in ends})
    rng.shuffle(places)
    number = {place: i for i, place in enumerate(places)}
    links = [(number[a], number[b]) for a, b in (sorted(ends) for ends in sorted(joined, key=sorted))]
    links += [(b, a) for a, b in links]
    rng.shuffle(links)
    return Topology(
        name="torus",
        unit="GB/s",
        vertices=tuple(Vertex(kind="rank", label=f"v{i}") for i in range(len(places))),
        links=tuple(Link(src=a, dst=b, capacity=50) for a, b in links),
    )


def across(joined: Cables, dims: tuple[int, ...]) -> Fraction:
    """The longest time that two cuts across the first side prove for an all_to_all, by counting."""
    count = [0] * dims[0]
    for a, b in (sorted(ends) for ends in joined):
        if a[0] != b[0]:
            count[a[0] if b[0] - a[0] == 1 else b[0]] += 1
    layer = np.prod(dims[1:])
    return max(
        Fraction(int(layer**2) * (j - i) * (dims[0] - j + i), 50 * (count[i] + count[j]))
        for i in range(dims[0])
        for j in range(i + 1, dims[0])
    )


def found_cut(topology: Topology, demands: IntArray) -> BoolArray | None:
    graph = FlowGraph.of(topology)
    return sparsest_cut(graph, as_int64([link.capacity for link in topology.links]), graph.ranks, demands)


@pytest.mark.parametrize("dims", [(12, 4), (8, 4, 4)])
@pytest.mark.parametrize("seed", range(4))
def test_a_torus_is_cut_across_its_longest_side(dims: tuple[int, ...], seed: int) -> None:
    joined = cables(dims, 4, seed)
    n = int(np.prod(dims))
    demands = 1 - np.eye(n, dtype=np.int64)
    times = []
    for order in range(3):
        topology = numbered(joined, order)
        cut = found_cut(topology, demands)
        assert cut is not None
        times.append(proven_time(topology, np.arange(n), demands, cut.astype(np.int64)))
    assert times[0] >= across(joined, dims) and set(times) == {times[0]}


@pytest.mark.parametrize("seed", range(3))
def test_bounds_hold_and_are_proved(seed: int) -> None:
    topology = numbered(cables((8, 3), 3, seed), seed + 7)
    rng = random.Random(seed)
    weights = tuple(rng.randint(1, 4) for _ in range(24**2))
    for asked in (Collective(name="all_to_all", num_ranks=24, weights=w) for w in (None, weights)):
        best = solve_flow(topology, asked)
        found = bracket_flow(topology, np.array(best.sources), best.demands)
        cut = found_cut(topology, best.demands)
        assert cut is not None
        by_cut = proven_time(topology, np.array(best.sources), best.demands, cut.astype(np.int64))
        assert by_cut <= found.inverse_x <= best.inverse_x_reached
        assert found.inverse_x == proven_time(topology, np.array(best.sources), best.demands, np.array(found.prices))


def test_unlike_amounts_are_counted_as_alike_ones_are() -> None:
    topology = numbered(cables((12, 4), 3, 1), 1)
    twice = 2 * (1 - np.eye(48, dtype=np.int64))
    nearly = twice.copy()
    nearly[0, 1] = 3
    alike, unlike = found_cut(topology, twice), found_cut(topology, nearly)
    assert alike is not None and unlike is not None
    times = [proven_time(topology, np.arange(48), nearly, cut.astype(np.int64)) for cut in (alike, unlike)]
    assert times[1] >= times[0]


def test_cuts_of_one_way_links() -> None:
    """Two rings, one narrow link from the first to the second and a wide one back."""
    pairs = [(i, (i + 1) % 4) for i in range(4)] + [(4 + i, 4 + (i + 1) % 4) for i in range(4)]
    capacity = {ends: 40 for a, b in pairs for ends in ((a, b), (b, a))} | {(0, 4): 1, (5, 1): 30}
    topology = Topology(
        name="two rings",
        unit="GB/s",
        vertices=tuple(Vertex(kind="rank", label=f"v{i}") for i in range(8)),
        links=tuple(Link(src=a, dst=b, capacity=c) for (a, b), c in capacity.items()),
    )
    cut = found_cut(topology, 1 - np.eye(8, dtype=np.int64))
    assert cut is not None
    assert [(k.src, k.dst) for k, is_cut in zip(topology.links, cut, strict=True) if is_cut] == [(0, 4)]


@pytest.mark.parametrize("topology", [star(num_ranks=6), full_mesh(num_ranks=6), hypercube(dim=3)])
def test_fabrics_without_directions_are_not_cut(topology: Topology) -> None:
    n = topology.num_ranks
    assert found_cut(topology, 1 - np.eye(n, dtype=np.int64)) is None
