"""Bounds: exact on the known fabrics, proved by the cut they name."""

from __future__ import annotations

import json
from fractions import Fraction
from math import lcm
from pathlib import Path

import numpy as np
import pytest

from mycel.collectives import allreduce_bound
from mycel.collectives import bound as bounds
from mycel.collectives.balance import balance
from mycel.collectives.bound import bound, find_division, find_optimum
from mycel.collectives.maxflow import FlowGraph, as_int64
from mycel.collectives.partition_bound import least_cut, quick_limit
from mycel.collectives.spec import Collective
from mycel.collectives.synth import synthesize
from mycel.errors import SynthesisError, UsageError
from mycel.topology.builders import hosts
from mycel.topology.load import load_topology
from mycel.topology.model import Link, Topology, Vertex

SUITE = Path(__file__).parents[1] / "data" / "topologies"
EXPECTED = json.loads((SUITE / "expected.json").read_text())


def fabric(num_ranks, num_switches, capacity):
    vertices = [Vertex(kind="rank", label=f"r{i}") for i in range(num_ranks)]
    vertices += [Vertex(kind="switch", label=f"s{i}") for i in range(num_switches)]
    links = tuple(Link(src=a, dst=b, capacity=c) for (a, b), c in capacity.items())
    return Topology(name="made", unit="link", vertices=tuple(vertices), links=links)


def on(topology, name, root=None):
    return Collective(name=name, num_ranks=topology.num_ranks, root=root)


def missing_behind(topology, cut, *, is_gather):
    """Blocks that must cross a cut: of ranks that cannot be on its far side, by closing that side up."""
    ends = {dst if is_gather else src for src, dst in cut}
    stack = list(ends)
    while stack:
        vertex = stack.pop()
        for link in topology.links:
            near, far = (link.src, link.dst) if is_gather else (link.dst, link.src)
            if far == vertex and (link.src, link.dst) not in cut and near not in ends:
                ends.add(near)
                stack.append(near)
    assert any(vertex in ends for vertex in topology.ranks)
    return sum(vertex not in ends for vertex in topology.ranks)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_known_optima(name):
    topology, known = load_topology(SUITE / f"{name}.json"), EXPECTED[name]
    gather, scatter, both = (bound(topology, on(topology, c)) for c in ("all_gather", "reduce_scatter", "all_reduce"))
    assert gather.inverse_x == Fraction(known["allgather_inverse_x"])
    assert gather.algbw == topology.num_ranks / gather.inverse_x
    assert both.algbw == topology.num_ranks / both.inverse_x
    assert both.composition == topology.num_ranks / (gather.inverse_x + scatter.inverse_x) <= both.algbw
    assert gather.composition is None
    if "reduce_scatter_algbw" in known:
        assert float(scatter.algbw) == pytest.approx(known["reduce_scatter_algbw"], abs=1e-4)
        assert float(both.algbw) == pytest.approx(known["all_reduce_algbw"], abs=1e-4)
        assert float(both.composition) == pytest.approx(known["rs_then_ag_algbw"], abs=1e-4)
    assert len(EXPECTED) == 19


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_cut_proves_the_bound(name):
    topology = load_topology(SUITE / f"{name}.json")
    for collective in ("all_gather", "reduce_scatter"):
        best = bound(topology, on(topology, collective))
        assert not best.by_dual
        through = sum(topology.capacity[hop] for hop in best.cut)
        missing = missing_behind(topology, set(best.cut), is_gather=collective == "all_gather")
        assert Fraction(missing, through) == best.inverse_x


def test_broadcast_is_the_least_flow_from_its_root():
    # r0 reaches r2 over r1 (2) and s0 (1); r1 gets 3 directly and nothing else.
    topology = fabric(3, 1, {(0, 1): 3, (1, 2): 2, (0, 3): 1, (3, 2): 1, (2, 0): 5})
    best = bound(topology, on(topology, "broadcast", 0))
    assert best.algbw == 3
    assert bound(topology.reversed(), on(topology, "reduce", 0)).algbw == 3
    assert bound(topology, on(topology, "broadcast", 1)).algbw == 2
    assert set(bound(topology, on(topology, "broadcast", 1)).cut) == {(1, 2)}


def test_a_switch_that_cannot_copy_costs_more_than_any_cut_says():
    # One unit enters the switch and cannot leave twice: r1 and r2 share it, and both need the two others' blocks.
    topology = fabric(3, 1, {(0, 3): 1, (3, 1): 1, (3, 2): 1, (1, 0): 1, (2, 0): 1})
    best = bound(topology, on(topology, "all_gather"))
    assert best.inverse_x == 4
    assert best.by_dual
    assert (0, 3) in best.cut
    assert "switches cannot use all of their links" in best.explain()


def test_unbalanced_switch_capacities_are_balanced_and_within_the_links():
    topology = load_topology(SUITE / "eth4_asym_unbal.json")
    best = find_optimum(topology, (1,) * 4, is_reversed=False)
    flow = dict.fromkeys(range(len(topology.vertices)), Fraction(0))
    for link, used in zip(topology.links, best.capacities, strict=True):
        assert 0 <= used <= link.capacity
        flow[link.dst] += used
        flow[link.src] -= used
    assert all(flow[switch] == 0 for switch in topology.switches)
    assert best.inverse_x == best.inverse_x_achieved == Fraction(3, 2)


def test_links_of_which_no_balanced_part_connects_the_ranks_are_refused():
    ranks, tail, head = (np.array(ends, dtype=np.int64) for ends in ([0, 1], [0, 2, 3], [2, 1, 0]))
    graph = FlowGraph(num_vertices=4, ranks=ranks, tail=tail, head=head)  # nothing enters the switch 3
    with pytest.raises(SynthesisError, match="no part of the links that is balanced"):
        balance(graph, [3, 5, 2], [1, 1], x_cut=Fraction(2))


def test_capacities_are_balanced_where_one_rank_has_almost_all_of_the_array():
    links = {(0, 5): 37, (1, 5): 7, (2, 4): 30, (2, 5): 15, (3, 5): 16, (4, 1): 16, (4, 5): 3}
    topology = fabric(4, 2, links | {(5, 0): 5, (5, 1): 8, (5, 2): 16, (5, 3): 25, (5, 4): 8})
    weights = (10**6, 2, 1, 3)
    best = find_optimum(topology, weights, is_reversed=False)
    net = [
        sum(
            c * ((head == v) - (tail == v))
            for c, (tail, head) in zip(best.capacities, topology.capacity, strict=True)
        )
        for v in topology.switches
    ]
    assert net == [0, 0]
    assert all(0 <= c <= link.capacity for c, link in zip(best.capacities, topology.links, strict=True))
    unit = lcm(*(c.denominator for c in best.capacities), best.inverse_x_achieved.numerator)
    carried = as_int64([int(c * unit) for c in best.capacities])
    demand = as_int64([int(w * unit / best.inverse_x_achieved) for w in weights])
    assert not best.graph.check(carried, demand)[0].any()


def test_flows_to_every_rank_report_deficit_and_smallest_set():
    graph = FlowGraph.of(fabric(3, 0, {(0, 1): 5, (1, 2): 1, (2, 0): 5}))
    deficit, side = graph.check(as_int64([5, 1, 5]), as_int64([1, 1, 1]))
    assert deficit.tolist() == [0, 0, 1]  # r2 has its own unit and one more through r1
    assert np.flatnonzero(side[2]).tolist() == [2]
    assert not graph.check(as_int64([5, 2, 5]), as_int64([1, 1, 1]))[0].any()


def test_capacities_that_64_bits_cannot_count_are_refused():
    large = 10**18 + 37
    topology = fabric(3, 0, {(0, 1): large, (1, 2): large - 1, (2, 0): large - 5})
    with pytest.raises(SynthesisError, match="coarser unit"):
        bound(topology, on(topology, "all_gather"))


def test_wrong_number_of_ranks_is_refused():
    topology = load_topology(SUITE / "ring_8.json")
    with pytest.raises(UsageError, match="over 4 ranks, but ring_8 has 8"):
        bound(topology, Collective(name="all_gather", num_ranks=4))


def test_explanation_names_the_links():
    topology = load_topology("two_boxes:ranks=8,inside=400 Mbit/s,between=50 Mbit/s")
    text = bound(topology, on(topology, "all_gather")).explain()
    assert "at most 400 Mbit/s" in text
    assert "4 links of 200 Mbit/s in all bind: core -> left/0 (50)" in text


def test_explanation_of_all_reduce_says_what_its_composition_loses():
    alike = load_topology("star:ranks=4")
    text = bound(alike, on(alike, "all_reduce")).explain()
    assert "at most 266.667 Mbit/s" in text
    assert "Reduce-scatter" not in text  # nothing is lost where all ranks are alike
    mixed = load_topology(SUITE / "eth4_mixed.json")
    text = bound(mixed, on(mixed, "all_reduce")).explain()
    assert "at most 1 Gb/s" in text
    assert "would guarantee 0.666667 Gb/s" in text


def solve_anew(monkeypatch):
    """Divisions are not remembered."""
    monkeypatch.setattr(bounds, "_find_division", bounds._find_division.__wrapped__)


def test_a_fabric_too_large_for_the_programme_gets_what_the_composition_guarantees(monkeypatch):
    topology = load_topology(SUITE / "eth4_mixed.json")
    solve_anew(monkeypatch)
    monkeypatch.setattr(allreduce_bound, "_LARGEST", 100)
    without_trees = "mycel.collectives.bound.with_whole_trees"
    with monkeypatch.context() as patch:
        patch.setattr(without_trees, lambda topology, found, composition: found)
        best = bound(topology, on(topology, "all_reduce"))
    assert best.reached == best.composition == Fraction(2, 3) and best.is_exact == (best.algbw == best.reached)
    assert best.algbw == least_cut(topology)[0] and best.cut
    assert "Nothing is shown to meet that: 0.666667 Gb/s is known to be reached" in best.explain()
    assert synthesize(topology, on(topology, "all_reduce")).algbw >= best.reached
    assert bound(topology, on(topology, "all_reduce")).reached == best.algbw  # links are alike both ways here


def test_a_programme_given_up_still_proves_a_bound(monkeypatch):
    topology = load_topology(SUITE / "torus_4x4_failed.json")
    exact = bound(topology, on(topology, "all_reduce"))
    solve_anew(monkeypatch)
    monkeypatch.setattr(allreduce_bound, "_WORK", 0)
    early = bound(topology, on(topology, "all_reduce"))
    assert early.algbw >= exact.algbw >= early.reached
    schedule = synthesize(topology, on(topology, "all_reduce"))
    assert early.composition <= schedule.algbw <= exact.algbw


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_quick_limit_is_one(name):
    topology = load_topology(SUITE / f"{name}.json").without_computing()
    best, _ = find_division(topology)
    assert quick_limit(topology)[0] >= best.limit


@pytest.mark.parametrize("names", [["a"] * 2, ["a"] * 5, ["a", "b"], list("aabb"), list("aabbcc")])
def test_the_quick_limit_is_met_where_nothing_is_known_of_nodes_alike(names):
    """No linear programme is solved, nor its solver imported, where a group starts without a topology."""
    topology = hosts(names)
    best, composition = find_division(topology)
    assert quick_limit(topology)[0] == composition == best.limit


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_divided_links_hold_the_flows_that_all_reduce_needs(name):
    topology = load_topology(SUITE / f"{name}.json")
    best, composition = find_division(topology)
    if not best.shares:
        assert best.limit == composition
        return
    assert best.limit == best.algbw > composition
    unit = lcm(*(v.denominator for v in (*best.shares, *best.spread, *best.reduce)))
    demand = as_int64([int(share * unit) for share in best.shares])
    flow = [dict.fromkeys(range(len(topology.vertices)), Fraction(0)) for _ in range(2)]
    for link, *parts in zip(topology.links, best.spread, best.reduce, strict=True):
        assert min(parts) >= 0 and sum(parts) <= link.capacity
        for phase, part in enumerate(parts):
            flow[phase][link.dst] += part
            flow[phase][link.src] -= part
    assert all(each[switch] == 0 for each in flow for switch in topology.switches)
    for part, is_reversed in ((best.spread, False), (best.reduce, True)):
        whole = as_int64([int(c * unit) for c in part])
        assert not FlowGraph.of(topology, is_reversed=is_reversed).check(whole, demand)[0].any()
