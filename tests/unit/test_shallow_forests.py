"""Forests of few steps where neighbours are unlike, nothing is named, or cables have failed: optimal, and shallow."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import product
from math import gcd
from typing import Any

import numpy as np
import pytest

from mycel.collectives.bound import bound, find_optimum
from mycel.collectives.clusters import clusters
from mycel.collectives.spec import Collective
from mycel.collectives.synth import synthesize
from mycel.collectives.synth.along_links import grow_along_links
from mycel.collectives.synth.forest import build_forest
from mycel.collectives.synth.growing import grow_shallow
from mycel.collectives.synth.plan import plan_forest
from mycel.collectives.synth.scales import fewest, scale, scales_within
from mycel.collectives.synth.shortest_paths import grow_shortest
from mycel.collectives.synth.sized import fastest
from mycel.collectives.verify import verify_schedule
from mycel.errors import SynthesisError, UsageError
from mycel.topology.load import load_topology
from mycel.topology.model import Link, Topology, Vertex

Pairs = dict[tuple[int, int], int]


def shuffled(kinds: list[str], cables: Pairs, seed: int) -> Topology:
    """A fabric of cables that carry as much either way, with vertices and links in any order and no names."""
    rng = random.Random(seed)
    place = list(range(len(kinds)))
    rng.shuffle(place)
    vertices = sorted((place[v], kind) for v, kind in enumerate(kinds))
    links = [
        Link(src=place[a], dst=place[b], capacity=c) for (x, y), c in cables.items() for a, b in ((x, y), (y, x))
    ]
    rng.shuffle(links)
    return Topology(
        name="any",
        unit="GB/s",
        vertices=tuple(Vertex(kind="rank" if kind == "rank" else "switch", label=f"v{v}") for v, kind in vertices),
        links=tuple(links),
    )


def boxes(num_boxes: int, *, nic: int = 50, unlike: bool = False, failed: int = 0) -> tuple[list[str], Pairs]:
    """Boxes of 8 ranks on a switch of their own, each rank with a cable to one network; some cables are missing."""
    kinds, cables = ["switch"], {}
    for box in range(num_boxes):
        inside = len(kinds)
        kinds += ["switch"] + ["rank"] * 8
        for rank in range(inside + 1, inside + 9):
            cables[rank, inside] = 600 if unlike and box % 2 else 450
            cables[rank, 0] = nic + 7 * box if unlike else nic
    for rank in range(2, 2 + 11 * failed, 11):
        cables.pop((rank, 0), None)
    return kinds, cables


def dragonfly(groups: int, routers: int, hosts: int) -> tuple[list[str], Pairs]:
    """Groups of routers, each joined to every other of its group, and one cable between any two groups."""
    kinds: list[str] = []
    cables: Pairs = {}
    router = {}
    for place in product(range(groups), range(routers)):
        router[place] = len(kinds)
        kinds += ["switch"] + ["rank"] * hosts
        cables |= {(router[place] + 1 + host, router[place]): 25 for host in range(hosts)}
    cables |= {(router[g, a], router[g, b]): 25 for g in range(groups) for a in range(routers) for b in range(a)}
    uses = [0] * groups
    for g in range(groups):
        for h in range(g):
            cables[router[g, uses[g] % routers], router[h, uses[h] % routers]] = 25
            uses[g], uses[h] = uses[g] + 1, uses[h] + 1
    return kinds, cables


def torus(*dims: int) -> tuple[list[str], Pairs]:
    """Ranks on a torus."""
    place = {at: number for number, at in enumerate(product(*map(range, dims)))}
    cables: Pairs = {}
    for at in place:
        for dim, size in enumerate(dims):
            there = (*at[:dim], (at[dim] + 1) % size, *at[dim + 1 :])
            if (place[there], place[at]) not in cables:
                cables[place[at], place[there]] = 50
    return ["rank"] * len(place), cables


FABRICS = {
    "boxes": (boxes(5), 6),
    "boxes, cables failed": (boxes(6, failed=2), 6),
    "unlike boxes": (boxes(5, unlike=True), 9),
    "dragonfly": (dragonfly(6, 3, 2), 8),
}


@pytest.mark.parametrize("name", FABRICS)
@pytest.mark.parametrize("seed", range(3))
def test_trees_are_shallow_whatever_the_numbers(name: str, seed: int) -> None:
    fabric, most = FABRICS[name]
    topology = shuffled(*fabric, seed)
    for is_reversed in (False, True):
        forest = plan_forest(topology, (1,) * topology.num_ranks, is_reversed=is_reversed)
        inverse_x, depth = forest.check()
        best = find_optimum(topology, forest.weights, is_reversed=is_reversed)
        assert inverse_x == best.inverse_x and depth <= most


@pytest.mark.parametrize("dims", [(5, 7), (4, 4, 4), (3, 4, 5)])
def test_trees_on_a_torus_are_shortest_paths_whatever_the_numbers(dims: tuple[int, ...]) -> None:
    for seed in range(3):
        topology = shuffled(*torus(*dims), seed)
        forest = plan_forest(topology, (1,) * topology.num_ranks, is_reversed=bool(seed % 2))
        inverse_x, depth = forest.check()
        assert inverse_x == find_optimum(topology, forest.weights, is_reversed=bool(seed % 2)).inverse_x
        assert depth == sum(size // 2 for size in dims)


def test_no_shortest_paths_through_switches_or_where_links_are_too_narrow() -> None:
    for spec in ("star:ranks=9", "dgx1_v100"):
        topology = load_topology(spec)
        best = find_optimum(topology, (1,) * topology.num_ranks, is_reversed=False)
        assert grow_shortest(topology, best, *scale(best)) is None


def any_fabric(seed: int) -> Topology:
    """A cycle through ranks and switches and more links, alike in both directions or not."""
    rng = random.Random(seed)
    n, largest, alike = rng.randint(2, 9), rng.choice([1, 4, 30, 700]), rng.random() < 0.6
    everyone = list(range(n + rng.choice([0, 1, 3])))
    cycle = rng.sample(everyone, len(everyone))
    capacity: Pairs = {}
    pairs = [*zip(cycle, cycle[1:] + cycle[:1], strict=True)]
    pairs += [(a, b) for a, b in (rng.sample(everyone, 2) for _ in range(rng.randint(0, n)))]
    for a, b in pairs:
        capacity[a, b] = rng.randint(1, largest)
        capacity[b, a] = capacity[a, b] if alike else rng.randint(1, largest)
    return Topology(
        name="any",
        unit="link",
        vertices=tuple(Vertex(kind="rank" if v < n else "switch", label=f"v{v}") for v in everyone),
        links=tuple(Link(src=a, dst=b, capacity=c) for (a, b), c in capacity.items()),
    )


@pytest.mark.parametrize("first", [0, 4, 8, pytest.param(12, marks=pytest.mark.long)])
def test_trees_along_links_meet_any_bound(first: int) -> None:
    for seed in range(first, first + (4 if first < 12 else 200)):
        topology, rng = any_fabric(seed), random.Random(seed)
        n = topology.num_ranks
        weights = tuple(rng.choice([(1,) * n, (1,) + (0,) * (n - 1), tuple(rng.randint(1, 3) for _ in range(n))]))
        weights = tuple(w // gcd(*weights) for w in weights)
        for is_reversed in (False, True):
            try:
                best = find_optimum(topology, weights, is_reversed=is_reversed)
            except SynthesisError:  # switches of which no balanced part connects the ranks
                continue
            forest = grow_along_links(topology, best, *fewest(best))
            assert forest is not None, f"seed {seed}"
            assert forest.check()[0] <= best.inverse_x_achieved, f"seed {seed}"
            for capacity, demand in scales_within(best, Fraction(9, 10)):
                near = grow_shallow(topology, best, capacity, demand)
                assert near.check()[0] * Fraction(9, 10) <= best.inverse_x_achieved, f"seed {seed}"


def test_clusters_are_what_wide_links_join_and_what_hangs_on_a_switch() -> None:
    topology = shuffled(*boxes(3), 1)
    best = find_optimum(topology, (1,) * 24, is_reversed=False)
    capacity = np.array([link.capacity for link in topology.links])
    is_rank = np.zeros(len(topology.vertices), dtype=np.bool_)
    is_rank[list(topology.ranks)] = True
    assert sorted(int((row & is_rank).sum()) for row in clusters(best.graph, capacity)) == [8, 8, 8]


def test_one_tree_a_root_where_that_is_enough() -> None:
    topology = shuffled(*boxes(6, unlike=True), 4)
    best = find_optimum(topology, (1,) * 48, is_reversed=False)
    whole, all_units = scale(best)
    capacity, demand = fewest(best)
    assert demand.tolist() == [1] * 48 and all_units.max() > 1
    assert build_forest(topology, (1,) * 48, is_reversed=False).num_trees == 48
    # No link is given more than its share of the optimum.
    assert (capacity * int(all_units[0]) <= whole).all()


def test_less_of_the_bound_is_less_deep() -> None:
    topology = load_topology("mi250:nodes=1")
    collective = Collective(name="all_gather", num_ranks=16)
    limit = bound(topology, collective).algbw
    made = {within: synthesize(topology, collective, within=within) for within in (1.0, 0.5)}
    for within, schedule in made.items():
        verify_schedule(schedule)
        assert schedule.algbw >= Fraction(str(within)) * limit
    assert made[0.5].depth < made[1.0].depth


def test_both_ways_of_an_all_reduce_stay_within_a_share() -> None:
    topology = load_topology("examples/clusters/two_slow_nics.yaml")
    both = synthesize(topology, "all_reduce", within=0.9)
    verify_schedule(both)
    assert both.algbw >= Fraction(9, 10) * bound(topology, both.collective).algbw


def test_the_forest_of_a_size_is_the_fastest_of_several() -> None:
    topology = load_topology("mesh:dims=3x4,bandwidth=100 MB/s,latency=20us")
    small = synthesize(topology, "all_gather", num_bytes=1 << 12)
    large = synthesize(topology, "all_gather", num_bytes=1 << 24)
    assert small.depth <= large.depth
    assert large.algbw == bound(topology, "all_gather").algbw
    assert fastest([large, small], 1 << 12).depth == small.depth


@pytest.mark.parametrize(
    "options", [{"k": 1, "within": 0.9}, {"within": 0.0}, {"within": 1.1}, {"num_bytes": 0}, {"links": "tcp"}]
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"give one of|above 0 and at most|at least a byte|give num_bytes too"):
        synthesize(load_topology("ring:ranks=4"), "all_gather", **options)
