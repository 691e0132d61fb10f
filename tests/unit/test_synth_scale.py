"""Large fabrics: symmetries proven, switches replaced at once, trees grown whole, and their check."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from mycel.cli import bound as bound_command
from mycel.cli import synth as synth_command
from mycel.collectives.bound import bound, find_optimum
from mycel.collectives.maxflow import FlowGraph
from mycel.collectives.spec import Collective
from mycel.collectives.symmetry import find_rotation, is_automorphism, powers
from mycel.collectives.synth import synthesize
from mycel.collectives.synth.forest import build_forest
from mycel.collectives.synth.logical_arcs import path_lengths
from mycel.collectives.synth.plan import plan_all_reduce, plan_forest
from mycel.collectives.verify import verify_schedule
from mycel.errors import SynthesisError, UsageError
from mycel.topology.load import load_topology
from mycel.topology.model import Link, Topology

SUITE = Path(__file__).parents[1] / "data" / "topologies"
LARGE = ["dgx_a100:nodes=16", "dgx_h100:nodes=16", "dgx_h100:nodes=5", "mi250:nodes=8", "dgx1_v100:nodes=8"]


def arrays(topology):
    return FlowGraph.of(topology), np.array([link.capacity for link in topology.links], dtype=np.int64)


def shuffled(topology, seed):
    """The same fabric with its vertices in another order and without the names of nodes."""
    place = np.random.default_rng(seed).permutation(len(topology.vertices)).tolist()
    vertices = [None] * len(place)
    for old, new in enumerate(place):
        vertices[new] = replace(topology.vertices[old], node=None)
    links = tuple(replace(k, src=place[k.src], dst=place[k.dst]) for k in topology.links)
    return Topology(name="shuffled", unit=topology.unit, vertices=tuple(vertices), links=links)


@pytest.mark.parametrize(
    ("spec", "order"), [("dgx_a100:nodes=6", 6), ("mi250:nodes=3", 3), ("torus:dims=4x6", 4), ("ring:ranks=7", 7)]
)
def test_a_rotation_is_found_and_moves_links_to_equal_links(spec, order):
    topology = load_topology(spec)
    image = find_rotation(*arrays(topology))
    for k in topology.links:
        assert topology.capacity[int(image[k.src]), int(image[k.dst])] == k.capacity
    assert powers(FlowGraph.of(topology), image).shape == (order, len(topology.vertices))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("spec", ["dgx_a100:nodes=4", "dgx1_v100:nodes=3"])
def test_a_rotation_is_found_whatever_vertices_are_called(spec, seed):
    topology = shuffled(load_topology(spec), seed)
    graph, capacity = arrays(topology)
    image = find_rotation(graph, capacity)
    assert image is not None and is_automorphism(graph, capacity, image)


def test_what_is_not_a_symmetry_is_refused():
    topology = load_topology("dgx_a100:nodes=3")
    graph, capacity = arrays(topology)
    image = find_rotation(graph, capacity)
    assert is_automorphism(graph, capacity, image)
    capacity[5] += 1
    assert not is_automorphism(graph, capacity, image)
    assert not is_automorphism(graph, capacity, np.zeros_like(image))
    swapped = np.arange(graph.num_vertices)
    rank, switch = topology.ranks[0], topology.switches[0]
    swapped[[rank, switch]] = switch, rank
    assert not is_automorphism(graph, capacity, swapped)


def test_a_fabric_with_one_odd_node_has_no_rotation():
    topology = load_topology("dgx_h100:nodes=4")
    odd = tuple(replace(k, capacity=k.capacity + (3 in (k.src, k.dst))) for k in topology.links)
    assert find_rotation(*arrays(replace(topology, links=odd))) is None


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("with_symmetry", [True, False])
@pytest.mark.parametrize("spec", LARGE)
def test_plans_meet_the_bound_with_symmetry_and_without(spec, with_symmetry, is_reversed):
    topology = load_topology(spec)
    weights = (1,) * topology.num_ranks
    forest = plan_forest(topology, weights, is_reversed=is_reversed, with_symmetry=with_symmetry)
    inverse_x, depth = forest.check()
    assert inverse_x == find_optimum(topology, weights, is_reversed=is_reversed).inverse_x
    assert (forest.order > 1) == with_symmetry
    assert depth == forest.depth() < topology.num_ranks // 2


@pytest.mark.parametrize("spec", ["dgx_a100:nodes=8", "torus:dims=6x6", "star:ranks=40"])
def test_large_schedules_are_right_and_optimal(spec):
    topology = load_topology(spec)
    for name in ("all_gather", "reduce_scatter"):
        collective = Collective(name=name, num_ranks=topology.num_ranks)
        schedule = synthesize(topology, collective)
        verify_schedule(schedule)
        assert schedule.algbw == bound(topology, collective).algbw


def test_a_thousand_ranks_are_ten_steps_deep():
    topology = load_topology("dgx_a100:nodes=128")
    forest = plan_forest(topology, (1,) * 1024, is_reversed=False)
    inverse_x, depth = forest.check()
    assert str(inverse_x) == "127/25" and depth <= 12 and forest.num_trees == 1024


def test_no_tree_of_a_torus_is_deeper_than_its_ranks_are_apart():
    topology = load_topology("torus:dims=8x8")
    forest = plan_forest(topology, (1,) * 64, is_reversed=False)
    assert forest.check() == (find_optimum(topology, (1,) * 64, is_reversed=False).inverse_x, 8)


def longest_s(forest):
    """The longest way from a root to a rank, in seconds of latency."""
    latency = {(k.src, k.dst): k.latency_s for k in forest.topology.links}
    ways = [sum(latency[hop] for hop in pairwise(path)) for path in forest.arcs.paths]
    worst = 0.0
    for root, tree in zip(forest.roots.tolist(), forest.trees.tolist(), strict=True):
        reached = {root: 0.0}
        for arc in tree:
            reached[int(forest.arcs.head[arc])] = reached[int(forest.arcs.tail[arc])] + ways[arc]
        worst = max(worst, *reached.values())
    return worst


@pytest.mark.parametrize("dims", ["4x4", "8x8"])
def test_trees_go_where_latency_is_low(dims):
    plain = load_topology(f"torus:dims={dims}")
    side = int(dims[0])
    links = tuple(replace(k, latency_s=1e-5 if k.src // side == k.dst // side else 1e-6) for k in plain.links)
    slow = replace(plain, links=links)
    weights = (1,) * plain.num_ranks
    by_latency = plan_forest(slow, weights, is_reversed=False)
    by_steps = replace(plan_forest(plain, weights, is_reversed=False), topology=slow)
    assert by_latency.check()[0] == by_steps.check()[0]
    assert longest_s(by_latency) <= longest_s(by_steps)
    half = side // 2  # as far as ranks are apart along either dimension
    assert longest_s(by_latency) == pytest.approx(half * (1e-5 + 1e-6))


def test_links_of_one_latency_are_links_without():
    plain = load_topology("mi250:nodes=2")
    same = replace(plain, links=tuple(replace(k, latency_s=3e-6) for k in plain.links))
    direct = tuple((k.src, k.dst) for k in plain.links)
    for topology in (plain, same):
        assert path_lengths(topology, direct, is_reversed=False).tolist() == [1] * len(direct)


def test_many_ranks_on_a_switch_are_a_few_steps_apart():
    topology = load_topology("star:ranks=64")
    assert plan_forest(topology, (1,) * 64, is_reversed=False).depth() == 6


def test_uneven_shares_and_one_root_on_a_large_fabric():
    topology = load_topology("dgx_h100:nodes=5")
    for weights in ((1,) + (0,) * 39, tuple(1 + rank % 2 for rank in range(40))):
        forest = plan_forest(topology, weights, is_reversed=False)
        assert forest.check()[0] == find_optimum(topology, weights, is_reversed=False).inverse_x


def test_irregular_fabrics_take_the_careful_way():
    topology = load_topology("fat_tree:k=4")
    forest = plan_forest(topology, (1,) * topology.num_ranks, is_reversed=False)
    assert forest.order == 1
    assert forest.check()[0] == find_optimum(topology, (1,) * topology.num_ranks, is_reversed=False).inverse_x


def test_large_irregular_fabrics_are_not_rings():
    topology = load_topology("dragonfly:groups=6,routers=3,ranks_per_router=2")
    forest = plan_forest(topology, (1,) * 36, is_reversed=False)
    inverse_x, depth = forest.check()
    assert inverse_x == find_optimum(topology, (1,) * 36, is_reversed=False).inverse_x
    assert depth < 18


def test_what_is_planned_is_what_is_scheduled():
    topology = load_topology("dgx_h100:nodes=5")
    planned = plan_forest(topology, (1,) * 40, is_reversed=False)
    scheduled = build_forest(topology, (1,) * 40, is_reversed=False)
    assert planned.check() == scheduled.check() and planned.arcs.paths == scheduled.arcs.paths
    assert (planned.roots == scheduled.roots).all() and (planned.trees == scheduled.trees).all()


def test_the_check_refuses_what_is_wrong():
    topology = load_topology("dgx_a100:nodes=4")
    forest = plan_forest(topology, (1,) * 32, is_reversed=False)
    trees = forest.trees.copy()
    trees[3, 5] = trees[3, 4]
    with pytest.raises(SynthesisError, match=r"tree 3 from rank \d+ does not span"):
        replace(forest, trees=trees).check()
    trees[3, 5] = len(forest.arcs.tail)
    with pytest.raises(SynthesisError, match="does not exist"):
        replace(forest, trees=trees).check()
    more = forest.multiplicities.copy()
    more[0] += 1
    with pytest.raises(SynthesisError, match="do not carry"):
        replace(forest, multiplicities=more).check()
    paths = (forest.arcs.paths[0][:1] + forest.arcs.paths[0][-1:], *forest.arcs.paths[1:])
    with pytest.raises(SynthesisError, match="does not exist"):
        replace(forest, arcs=replace(forest.arcs, paths=paths)).check()
    with pytest.raises(SynthesisError, match="no path"):
        replace(forest, arcs=replace(forest.arcs, paths=(forest.arcs.paths[1], *forest.arcs.paths[1:]))).check()


def test_the_check_counts_loads_and_not_intentions():
    topology = load_topology("dgx_a100:nodes=4")
    forest = plan_forest(topology, (1,) * 32, is_reversed=False)
    narrow = tuple(Link(src=k.src, dst=k.dst, capacity=max(1, k.capacity // 2)) for k in topology.links)
    assert replace(forest, topology=replace(topology, links=narrow)).check()[0] > forest.check()[0]


# -- mycel synth --summary --------------------------------------------------------------------------------------


LOUD = {"catch_exceptions": False}


def command_line():
    app = typer.Typer(pretty_exceptions_enable=False)
    bound_command.register(app)
    synth_command.register(app)
    return app


def run(*arguments):
    return CliRunner().invoke(command_line(), ["synth", *arguments])


def test_a_summary_says_what_a_schedule_would_be():
    result = run("dgx_a100:nodes=4", "-c", "reduce_scatter", "--summary", "--json")
    record = json.loads(result.stdout)
    assert result.exit_code == 0
    assert (record["inverse_x"], record["optimal"], record["num_trees"], record["symmetry"]) == ("3/25", True, 32, 4)
    assert "optimal: all_gather over 32 ranks" in run("dgx_a100:nodes=4", "-c", "all_gather", "--summary").stdout


@pytest.mark.parametrize("spec", ["dgx_a100:nodes=16", "torus:dims=4x4"])
def test_a_summary_of_all_reduce_is_proved_optimal(spec):
    record = json.loads(run(spec, "-c", "all_reduce", "--summary", "--json").stdout)
    assert record["optimal"] and record["algbw"] == record["bound_algbw"] == record["reduce_scatter_then_all_gather"]


@pytest.mark.parametrize("name", ["random12", "torus_4x4_failed", "hetero_a100_h100", "eth4_asym_unbal"])
def test_planned_and_scheduled_all_reduce_have_one_rate(name):
    topology = load_topology(SUITE / f"{name}.json")
    down, up, rate = plan_all_reduce(topology)
    collective = Collective(name="all_reduce", num_ranks=topology.num_ranks)
    assert rate == synthesize(topology, collective).algbw == bound(topology, collective).algbw
    assert (down.is_reversed, up.is_reversed) == (False, True)


def test_a_plan_of_all_reduce_counts_both_phases_on_each_link():
    topology = load_topology("ring:ranks=5")
    down, up, rate = plan_all_reduce(topology)
    carried = {}
    for forest in (down, up):
        for root, units, tree in zip(forest.roots.tolist(), forest.multiplicities, forest.trees, strict=True):
            assert 0 <= root < 5
            for arc in tree:
                path = forest.arcs.paths[arc][::-1] if forest.is_reversed else forest.arcs.paths[arc]
                for hop in pairwise(path):
                    carried[hop] = carried.get(hop, 0) + Fraction(int(units), forest.units * sum(forest.weights))
    assert rate == 1 / max(load / topology.capacity[hop] for hop, load in carried.items())


def test_all_reduce_of_a_thousand_ranks_is_proved_by_orbits():
    topology = load_topology("dgx_h100:nodes=128")
    best = bound(topology, Collective(name="all_reduce", num_ranks=1024))
    assert best.is_exact and best.algbw == best.composition == Fraction(25600, 127)


@pytest.mark.parametrize(
    ("arguments", "says"), [(("all_to_all",), "which are forests"), (("all_gather", "-k", "2"), "leave out")]
)
def test_a_summary_refuses_what_it_has_no_forest_for(arguments, says):
    with pytest.raises(UsageError, match=says):
        CliRunner().invoke(command_line(), ["synth", "dgx_a100:nodes=2", "--summary", "-c", *arguments], **LOUD)
