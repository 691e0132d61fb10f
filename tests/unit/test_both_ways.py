"""All-reduce over links that carry as much one way as the other: one forest both ways, rooted in the middle."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from math import floor, lcm

import networkx as nx
import numpy as np
import pytest

from mycel.collectives import allreduce_bound, bound, orientation
from mycel.collectives.allreduce_bound import Division
from mycel.collectives.bound import find_division
from mycel.collectives.cutting_planes import CuttingPlanes, unbalanced_switches
from mycel.collectives.maxflow import FlowGraph
from mycel.collectives.orientation import numbers_of_trees, orient
from mycel.collectives.spec import Collective
from mycel.collectives.synth import synthesize
from mycel.collectives.synth.array_forest import Forest
from mycel.collectives.synth.both_ways import grow_both_ways
from mycel.collectives.synth.middles import rooted_in_the_middle
from mycel.collectives.synth.plan import plan_all_reduce, plan_forest
from mycel.collectives.verify import verify_schedule
from mycel.topology.load import load_topology
from mycel.topology.model import Link, Topology, Vertex

WHOLE = Fraction(1)


def unlike_boxes(num_boxes: int, *, seed: int, failed: int = 0, more: int = 7, lopsided: bool = False) -> Topology:
    """Boxes of 8 ranks, each with cables of ``more`` than the one before to a network; numbers, order by chance."""
    rng = random.Random(seed)
    kinds, cables = ["switch"], []
    for box in range(num_boxes):
        inside = len(kinds)
        kinds += ["switch"] + ["rank"] * 8
        for rank in range(inside + 1, inside + 9):
            cables.append((rank, inside, 300 if box % 2 else 450))
            if rank % 11 or not failed:
                cables.append((rank, 0, 10 + more * box))
    place = rng.sample(range(len(kinds)), len(kinds))
    links = [Link(src=place[a], dst=place[b], capacity=c) for x, y, c in cables for a, b in ((x, y), (y, x))]
    if lopsided:
        links[0] = replace(links[0], capacity=links[0].capacity - 1)
    kind_of = dict(zip(place, kinds, strict=True))
    return Topology(
        name="unlike",
        unit="GB/s",
        vertices=tuple(Vertex(kind=kind_of[v], label=f"v{v}") for v in range(len(kinds))),  # type: ignore[arg-type]
        links=tuple(rng.sample(links, len(links))),
    )


def rate(down: Forest, up: Forest) -> Fraction:
    """What both forests at a time leave to the fullest link, in the fabric's unit."""
    (one, _), (two, _) = down.loads(), up.loads()
    assert down.units == up.units == 1
    return min(
        Fraction(sum(down.weights) * size, one.get(link, 0) + two.get(link, 0))
        for link, size in down.topology.capacity.items()
        if one.get(link, 0) + two.get(link, 0)
    )


def check_division(topology: Topology, found: Division) -> None:
    """What it says is there: flows from the roots to every rank, in each direction's part of the links."""
    assert found.reached == found.algbw <= found.limit
    unit = lcm(*(value.denominator for value in (*found.shares, *found.spread, *found.reduce)))
    roots = np.array([int(share * unit) for share in found.shares])
    for is_reversed, part in ((False, found.spread), (True, found.reduce)):
        graph, units = FlowGraph.of(topology, is_reversed=is_reversed), np.array([int(c * unit) for c in part])
        assert not graph.check(units, roots)[0].any() and not unbalanced_switches(graph, units.tolist())
    for link, spread, reduce in zip(topology.links, found.spread, found.reduce, strict=True):
        assert spread >= 0 and reduce >= 0 and spread + reduce <= link.capacity


@pytest.mark.parametrize("failed", [0, 1])
@pytest.mark.parametrize("seed", range(2))
def test_one_forest_meets_the_bound_whatever_the_numbers(seed, failed):
    topology = unlike_boxes(5, seed=seed, failed=failed)
    division, composition = find_division(topology)
    assert composition < division.algbw == division.limit
    down, up, reached = plan_all_reduce(topology)
    assert up.is_reversed and np.array_equal(down.trees, up.trees)
    assert reached == rate(down, up) == division.limit
    assert down.depth() <= 9


def test_schedules_of_it_are_right_and_as_fast():
    topology = unlike_boxes(5, seed=3)
    schedule = synthesize(topology, Collective("all_reduce", topology.num_ranks), "forest")
    verify_schedule(schedule)
    assert schedule.algbw == find_division(topology)[0].limit
    assert schedule.depth <= 18


def test_a_share_of_the_bound_is_reached_by_a_forest_no_deeper():
    topology = unlike_boxes(5, seed=4)
    *exact, whole = plan_all_reduce(topology)
    *near, part = plan_all_reduce(topology, within=Fraction(9, 10))
    assert part >= Fraction(9, 10) * whole
    assert near[0].depth() <= exact[0].depth()


def test_where_whole_trees_would_be_too_many_fewer_reach_nearly_all(monkeypatch):
    topology = unlike_boxes(5, seed=8, failed=1)
    limit = find_division(topology)[0].limit
    trees, _, is_exact = next(numbers_of_trees(topology, find_division(topology)[0]))
    assert is_exact
    monkeypatch.setattr(orientation, "_LARGEST", trees * topology.num_ranks - 1)
    monkeypatch.setattr(orientation, "_FEWEST", 8)
    down, up, reached = plan_all_reduce(topology)
    assert Fraction(98, 100) * limit <= reached == rate(down, up) <= limit
    assert sum(down.weights) < trees


@pytest.mark.parametrize("failed", [0, 1])
def test_the_bound_knows_of_whole_trees_where_the_programme_stops_early(monkeypatch, failed):
    topology = unlike_boxes(5, seed=9, failed=failed)
    whole = find_division(topology)[0]
    monkeypatch.setattr(bound, "_find_division", bound._find_division.__wrapped__)
    monkeypatch.setattr(allreduce_bound, "_WORK", 0)
    monkeypatch.setattr(allreduce_bound, "clusters", lambda graph, capacity: [])
    with monkeypatch.context() as without:
        without.setattr(bound, "with_whole_trees", lambda topology, division, *, composition: division)
        stopped = find_division(topology)[0]
    found = find_division(topology)[0]
    assert stopped.reached < found.reached == found.algbw <= found.limit
    assert found.reached >= Fraction(98, 100) * whole.limit
    check_division(topology, found)


@pytest.mark.parametrize("seed", range(3))
def test_cuts_round_boxes_to_begin_with_save_rounds_of_the_programme(monkeypatch, seed):
    topology, solved, solve = unlike_boxes(5, seed=seed, failed=1), [], CuttingPlanes.solve
    monkeypatch.setattr(bound, "_find_division", bound._find_division.__wrapped__)
    monkeypatch.setattr(CuttingPlanes, "solve", lambda self: solved.append(self) or solve(self))
    with_cuts, rounds = find_division(topology)[0], len(solved)
    solved.clear()
    monkeypatch.setattr(allreduce_bound, "clusters", lambda graph, capacity: [])
    without = find_division(topology)[0]
    assert with_cuts.limit == without.limit and rounds < len(solved)


def test_units_of_a_way_are_turned_round_together(monkeypatch):
    topology, looked, look = unlike_boxes(5, seed=6), [], orientation.shortfalls
    division, _ = find_division(topology)
    mending = orientation._Mending(topology, division, Fraction(1), 1 << 40)
    roots = np.zeros(topology.num_ranks, dtype=np.int64)
    roots[0] = floor(division.limit) // 2
    short = int(mending.graph.check(mending.capacity, roots)[0].max())
    monkeypatch.setattr(orientation, "shortfalls", lambda *words: looked.append(words) or look(*words))
    assert mending.mend(roots) == 0 and not mending.graph.check(mending.capacity, roots)[0].any()
    assert len(looked) < short


def torus_with_failed_cables(num_failed: int) -> Topology:
    """A torus 3x3x3 whose numbers and failed cables come from chance."""
    topology, rng = load_topology("torus:dims=3x3x3"), random.Random(num_failed)
    cables = rng.sample([(k.src, k.dst) for k in topology.links if k.src < k.dst], 81)[num_failed:]
    place = rng.sample(range(27), 27)
    links = [Link(src=place[a], dst=place[b], capacity=1) for x, y in cables for a, b in ((x, y), (y, x))]
    return replace(topology, links=tuple(links))


@pytest.mark.parametrize("num_failed", [1, 3])
def test_tori_with_failed_cables_need_no_programme(monkeypatch, num_failed):
    topology = torus_with_failed_cables(num_failed)
    monkeypatch.setattr(bound, "_find_division", bound._find_division.__wrapped__)
    whole = find_division(topology)[0]
    monkeypatch.setattr(allreduce_bound, "_SMALL", 0)
    monkeypatch.setattr(allreduce_bound, "_LARGEST", 0)
    monkeypatch.setattr(orientation, "_MOST_WORK", 8 * len(topology.links) * topology.num_ranks)
    found, composition = find_division(topology)
    assert composition < Fraction(9, 10) * found.limit
    assert found.limit == whole.limit
    assert found.reached >= orientation.ENOUGH * found.limit
    check_division(topology, found)


@pytest.mark.parametrize(("more", "is_saved"), [(7, True), (0, False)])
def test_whole_trees_at_the_limit_of_cuts_save_the_rest_of_the_programme(monkeypatch, more, is_saved):
    topology, solved, solve = unlike_boxes(5, seed=1, failed=1, more=more), [], CuttingPlanes.solve
    monkeypatch.setattr(bound, "_find_division", bound._find_division.__wrapped__)
    monkeypatch.setattr(CuttingPlanes, "solve", lambda self: solved.append(self) or solve(self))
    whole, rounds = find_division(topology)[0], len(solved)
    assert (whole.limit == allreduce_bound.limit_of_cuts(topology).limit) is is_saved
    monkeypatch.setattr(allreduce_bound, "_FIRST_WORK", 0)
    solved.clear()
    found = find_division(topology)[0]
    assert found.limit == found.reached == whole.limit == whole.reached
    check_division(topology, found)
    assert (len(solved) == 1 < rounds) if is_saved else (len(solved) == rounds)


def test_links_that_differ_by_direction_have_a_forest_each():
    topology = unlike_boxes(5, seed=5, lopsided=True)
    assert grow_both_ways(topology, find_division(topology)[0], within=WHOLE) is None
    assert plan_all_reduce(topology)[2] == find_division(topology)[0].algbw


@pytest.mark.parametrize("scale", [Fraction(1), Fraction(1, 3), Fraction(3, 7)])
def test_units_of_links_reach_every_rank_from_the_roots(scale):
    topology = unlike_boxes(5, seed=6, failed=1)
    division, _ = find_division(topology)
    wanted = floor(division.limit * scale)
    found = orient(topology, division, scale=scale, wanted=wanted, least=Fraction(85, 100) * wanted)
    assert found is not None
    assert sum(found.roots) >= Fraction(85, 100) * wanted
    units = dict(zip([(link.src, link.dst) for link in topology.links], found.capacity.tolist(), strict=True))
    for (src, dst), count in units.items():
        assert count >= 0 and count + units[dst, src] <= floor(topology.capacity[src, dst] * scale)
    assert not unbalanced_switches(FlowGraph.of(topology), found.capacity.tolist())
    graph = nx.DiGraph()
    graph.add_weighted_edges_from(((*link, count) for link, count in units.items()), weight="capacity")
    graph.add_weighted_edges_from(
        (("source", v, count) for v, count in zip(topology.ranks, found.roots.tolist(), strict=True)),
        weight="capacity",
    )
    for rank in topology.ranks:
        assert nx.maximum_flow_value(graph, "source", rank) == sum(found.roots)


def test_more_than_there_is_is_not_oriented():
    topology = unlike_boxes(5, seed=7)
    division, _ = find_division(topology)
    wanted = floor(division.limit) + 1
    assert orient(topology, division, scale=Fraction(1), wanted=wanted, least=Fraction(wanted)) is None


@pytest.mark.parametrize("fabric", ["dgx_a100:nodes=2", "ring:ranks=7"])
def test_roots_in_the_middle_change_no_load_of_both_ways(fabric):
    topology = load_topology(fabric)
    forest = plan_forest(topology, (1,) * topology.num_ranks, is_reversed=False, with_symmetry=False)
    moved = rooted_in_the_middle(forest)
    assert sum(moved.weights) == forest.multiplicities.sum()
    (before, deep), (after, shallow) = forest.loads(), moved.loads()
    assert shallow <= deep
    for src, dst in before.keys() | after.keys():
        there, back = (src, dst), (dst, src)
        assert before.get(there, 0) + before.get(back, 0) == after.get(there, 0) + after.get(back, 0)
    for number in range(moved.num_trees):
        tree = nx.Graph()
        row = moved.trees[number].tolist()
        tree.add_edges_from((int(moved.arcs.tail[arc]), int(moved.arcs.head[arc])) for arc in row)
        assert nx.eccentricity(tree, int(moved.roots[number])) == nx.radius(tree)
