"""Synthesis: forests on the known fabrics, which links they use, trees, and the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from mycel.cli import bound as bound_command
from mycel.cli import synth as synth_command
from mycel.cli.figures import count_trees
from mycel.collectives.bound import bound
from mycel.collectives.maxflow import FlowGraph
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import COLLECTIVES, Collective, CollectiveName, as_collective
from mycel.collectives.synth import SYNTHESIZERS, WHERE_THEY_FIT, methods_for, synthesize
from mycel.collectives.synth.forest import build_forest
from mycel.collectives.synth.logical_arcs import LogicalArcs
from mycel.collectives.synth.packing import pack_shallow, pack_trees
from mycel.collectives.synth.speculative import longest_way
from mycel.collectives.synth.splitting import trim_to_balance
from mycel.collectives.verify import verify_schedule
from mycel.errors import SynthesisError, UsageError
from mycel.topology.load import load_topology
from mycel.topology.model import Link, Topology, Vertex

SUITE = Path(__file__).parents[1] / "data" / "topologies"
NAMES = sorted(set(json.loads((SUITE / "expected.json").read_text())))
TWO_BOXES = "two_boxes:ranks=8,inside=400 Mbit/s,between=50 Mbit/s"


def on(topology, name, root=None):
    return Collective(name=name, num_ranks=topology.num_ranks, root=root)


def logical_links(schedule, *, reduce):
    return {(t.src, t.dst) for t in schedule.transfers if t.reduce == reduce}


# -- forest ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("name", NAMES)
def test_forest_is_optimal_and_right(name, collective):
    topology = load_topology(SUITE / f"{name}.json")
    schedule = synthesize(topology, on(topology, collective))
    verify_schedule(schedule)
    assert schedule.algbw == bound(topology, on(topology, collective)).algbw


@pytest.mark.parametrize("name", ["eth4_asym_unbal", "hetero_a100_h100", "torus_4x4_failed", "random12"])
def test_all_reduce_beats_its_composition_with_few_trees(name):
    topology = load_topology(SUITE / f"{name}.json")
    schedule = synthesize(topology, on(topology, "all_reduce"))
    known = json.loads((SUITE / "expected.json").read_text())[name]
    assert float(schedule.algbw) == pytest.approx(known["all_reduce_algbw"], abs=1e-4)
    assert float(schedule.algbw) > known["rs_then_ag_algbw"]
    assert count_trees(schedule) <= 2 * topology.num_ranks


@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
@pytest.mark.parametrize("name", ["a100_x1", "eth4_asym_unbal", "random12", "torus_4x4_failed"])
def test_rooted_forest_is_optimal_and_right(name, collective):
    topology = load_topology(SUITE / f"{name}.json")
    for root in range(topology.num_ranks):
        schedule = synthesize(topology, on(topology, collective, root))
        verify_schedule(schedule)
        assert schedule.algbw == bound(topology, on(topology, collective, root)).algbw


@pytest.mark.parametrize(
    ("name", "k", "fraction"),
    [
        ("ring_8", 1, 0.875),
        ("mi250_x1", 1, 7 / 9),
        ("mi250_x1", 2, 0.9333),
        ("torus_4x4", 2, 0.9375),
        ("ring_8", 2, 1),
    ],
)
def test_given_k_reaches_the_known_fraction_of_the_bound(name, k, fraction):
    topology = load_topology(SUITE / f"{name}.json")
    schedule = synthesize(topology, on(topology, "all_gather"), k=k)
    verify_schedule(schedule)
    assert float(schedule.algbw / bound(topology, on(topology, "all_gather")).algbw) == pytest.approx(
        fraction, abs=1e-4
    )


@pytest.mark.parametrize("k", [1, 2, 4])
def test_given_k_with_an_unbalanced_switch(k):
    topology = load_topology(SUITE / "eth4_asym_unbal.json")
    for collective in ("all_gather", "reduce_scatter", "all_reduce"):
        schedule = synthesize(topology, on(topology, collective), k=k)
        verify_schedule(schedule)
        assert schedule.algbw <= bound(topology, on(topology, collective)).algbw


def test_a_star_becomes_one_ring_used_by_both_phases():
    topology = load_topology("star:ranks=6")
    schedule = synthesize(topology, on(topology, "all_reduce"))
    ring = {(rank, (rank + 1) % 6) for rank in range(6)}
    assert logical_links(schedule, reduce=False) == ring
    assert logical_links(schedule, reduce=True) == ring


def test_two_boxes_are_joined_rank_to_rank_and_each_is_a_ring():
    topology = load_topology(TWO_BOXES)
    schedule = synthesize(topology, on(topology, "all_reduce"))
    inside = {(4 * node + i, 4 * node + (i + 1) % 4) for node in (0, 1) for i in range(4)}
    between = {(i, (i + 4) % 8) for i in range(8)}
    assert logical_links(schedule, reduce=False) == inside | between
    assert logical_links(schedule, reduce=True) == inside | between
    assert schedule.depth <= 8


def test_nodes_are_recognised_where_nobody_named_them():
    named = load_topology(TWO_BOXES)
    anonymous = Topology(
        name=named.name,
        unit=named.unit,
        vertices=tuple(Vertex(kind=v.kind, label=v.label) for v in named.vertices),
        links=named.links,
    )
    one, two = (synthesize(t, on(t, "all_gather")) for t in (named, anonymous))
    assert [(t.src, t.dst, t.path) for t in one.transfers] == [(t.src, t.dst, t.path) for t in two.transfers]


def test_a_ring_is_used_both_ways_half_round():
    topology = load_topology(SUITE / "ring_8.json")
    assert synthesize(topology, on(topology, "all_gather")).depth == 4


def test_synthesis_is_deterministic():
    topology = load_topology(SUITE / "random12.json")
    assert synthesize(topology, on(topology, "all_reduce")) == synthesize(topology, on(topology, "all_reduce"))


def test_transfers_stand_by_level_and_wait_for_no_more_than_they_read():
    topology = load_topology(SUITE / "torus_4x4.json")
    schedule = synthesize(topology, on(topology, "all_reduce"))
    assert list(schedule.levels) == sorted(schedule.levels)
    for t in schedule.transfers:
        for earlier in (schedule.transfers[i] for i in t.after):
            assert (earlier.chunk, earlier.dst) == (t.chunk, t.src)


def test_uneven_shares_get_trees_in_proportion():
    topology = load_topology("star:ranks=4")
    forest = build_forest(topology, (3, 1, 0, 2), is_reversed=False)
    carried = [int(forest.multiplicities[forest.roots == rank].sum()) for rank in range(4)]
    assert carried[2] == 0 and carried[0] == 3 * carried[1] and carried[3] == 2 * carried[1]
    for root, tree in zip(forest.roots.tolist(), forest.trees, strict=True):
        assert sorted([root, *forest.arcs.head[tree].tolist()]) == [0, 1, 2, 3]


def test_paths_do_not_visit_a_switch_twice():
    # Two switches joined both ways: a walk through both could come back.
    capacity = {(0, 2): 2, (2, 3): 2, (3, 2): 2, (2, 0): 2, (1, 3): 2, (3, 1): 2}
    vertices = [Vertex(kind="rank", label=x) for x in "ab"] + [Vertex(kind="switch", label=x) for x in "st"]
    links = tuple(Link(src=a, dst=b, capacity=c) for (a, b), c in capacity.items())
    topology = Topology(name="pair", unit="link", vertices=tuple(vertices), links=links)
    schedule = synthesize(topology, on(topology, "all_gather"))
    assert {t.path for t in schedule.transfers} == {(0, 2, 3, 1), (1, 3, 2, 0)}


def test_progress_is_reported():
    seen = []
    topology = load_topology(SUITE / "h100_x2.json")
    synthesize(topology, on(topology, "all_gather"), progress=lambda *step: seen.append(step))
    assert ("switches", 3, 3) in seen
    assert any(stage == "packings" and done >= 1 for stage, done, _ in seen)


# -- packing and trimming -------------------------------------------------------------------------------------


def complete_graph(n):
    pairs = [(a, b) for a in range(n) for b in range(n) if a != b]
    return np.array([a for a, _ in pairs]), np.array([b for _, b in pairs])


def arcs_of(tail, head, capacity):
    return LogicalArcs(tail=tail, head=head, capacity=capacity, paths=())


def test_packing_spans_within_capacity_and_is_flat_where_it_can_be():
    tail, head = complete_graph(5)
    lengths, demand = np.ones(20, dtype=np.int64), np.full(5, 4)
    trees = pack_shallow(5, arcs_of(tail, head, np.full(20, 4)), lengths, demand)
    load = {}
    for tree in trees:
        assert sorted([tree.root, *head[tree.arcs].tolist()]) == list(range(5))
        for arc in tree.arcs.tolist():
            load[arc] = load.get(arc, 0) + tree.multiplicity
    assert [sum(t.multiplicity for t in trees if t.root == r) for r in range(5)] == [4] * 5
    assert max(load.values()) <= 4
    assert max(longest_way(5, tail, head, lengths, tree.root, tree.arcs) for tree in trees) == 1


def test_packing_more_than_fits_is_refused():
    tail, head = complete_graph(3)
    with pytest.raises(SynthesisError, match="no spanning tree"):
        pack_trees(3, arcs_of(tail, head, np.full(6, 1)), np.ones(6, dtype=np.int64), np.full(3, 2))


def test_trimming_balances_or_says_that_it_cannot():
    topology = load_topology(SUITE / "eth4_asym_unbal.json")
    graph = FlowGraph.of(topology)
    capacity = np.array([link.capacity for link in topology.links])
    trimmed = trim_to_balance(graph, capacity, np.full(4, 0))
    assert trimmed is not None and (trimmed <= capacity).all()
    assert trimmed[graph.head == 4].sum() == trimmed[graph.tail == 4].sum()
    assert trim_to_balance(graph, capacity, np.full(4, 5)) is None


# -- trees ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_ranks", "depth"), [(2, 2), (5, 2), (8, 2), (9, 6), (16, 8)])
def test_all_reduce_tree_is_a_star_and_then_binomial(num_ranks, depth):
    topology = load_topology(f"star:ranks={num_ranks}")
    schedule = synthesize(topology, on(topology, "all_reduce"), method="tree")
    verify_schedule(schedule)
    assert schedule.depth == depth
    assert len(schedule.transfers) == 2 * (num_ranks - 1)


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_exchange_is_direct_through_a_switch_and_relayed_on_a_ring(collective):
    star = load_topology("star:ranks=5")
    assert synthesize(star, on(star, collective), method="tree").depth == 1
    ring = load_topology(SUITE / "ring_8.json")
    schedule = synthesize(ring, on(ring, collective), method="tree")
    verify_schedule(schedule)
    assert schedule.depth == 4


def test_tree_goes_where_latency_is_least_and_then_where_it_is_wide():
    capacity = {(0, 1): 1, (0, 2): 9, (2, 1): 9, (1, 2): 9, (2, 0): 9, (1, 0): 1}
    vertices = tuple(Vertex(kind="rank", label=x) for x in "abc")

    def paths(slow_s):
        links = tuple(
            Link(src=a, dst=b, capacity=c, latency_s=slow_s if {a, b} == {0, 1} else 1e-6)
            for (a, b), c in capacity.items()
        )
        topology = Topology(name="triangle", unit="link", vertices=vertices, links=links)
        schedule = synthesize(topology, on(topology, "broadcast", 0), method="tree")
        verify_schedule(schedule)
        return {t.path for t in schedule.transfers}

    assert paths(1e-6) == {(0, 1), (0, 2)}
    assert paths(1e-3) == {(0, 2), (2, 1)}


# -- methods that fit some fabrics ----------------------------------------------------------------------------

FEW = ("star:ranks=4", "ring:ranks=5", "two_boxes:ranks=6", "torus:dims=2x3", "full_mesh:ranks=3")


#: Of blocks that are alike; ``skewed`` and ``permute`` plan others only.
FITTING = [(m, name) for m, served in WHERE_THEY_FIT.items() if m not in ("skewed", "permute") for name in served]


@pytest.mark.parametrize(("method", "name"), FITTING)
def test_what_fits_some_fabrics_is_right_there_and_says_so_elsewhere(method: str, name: CollectiveName) -> None:
    fits = 0
    for fabric in FEW:
        topology = load_topology(fabric)
        collective = as_collective(name, topology.num_ranks)
        try:
            schedule = synthesize(topology, collective, method)
        except SynthesisError as error:
            assert method in str(error) and topology.name in str(error) and "\n" not in str(error)
            continue
        fits += 1
        verify_schedule(schedule)
        assert schedule.algbw <= bound(topology, collective).algbw
    assert fits, f"{method} has no schedule of {name} on any of {', '.join(FEW)}"


# -- registry -------------------------------------------------------------------------------------------------


def test_registry_refuses_what_it_does_not_know():
    topology = load_topology("star:ranks=3")
    with pytest.raises(UsageError, match="unknown method 'bush'; known: forest, tree"):
        synthesize(topology, on(topology, "all_gather"), method="bush")
    with pytest.raises(UsageError, match="method 'tree' has no option 'k'"):
        synthesize(topology, on(topology, "all_gather"), method="tree", k=2)
    with pytest.raises(UsageError, match="k=0"):
        synthesize(topology, on(topology, "all_gather"), k=0)
    for method in SYNTHESIZERS:
        everywhere = (c for c in COLLECTIVES if method in methods_for(c))
        name: CollectiveName = WHERE_THEY_FIT.get(method, (*everywhere, "all_gather"))[0]
        with pytest.raises(UsageError, match="over 4 ranks"):
            synthesize(topology, Collective(name=name, num_ranks=4), method=method)
    with pytest.raises(UsageError, match="method 'flow' does not serve all_gather; methods that do: forest, tree"):
        synthesize(topology, on(topology, "all_gather"), method="flow")
    with pytest.raises(UsageError, match="method 'forest' does not serve all_to_all; methods that do: flow, direct"):
        synthesize(topology, on(topology, "all_to_all"), method="forest")


# -- command line ---------------------------------------------------------------------------------------------


@pytest.fixture
def app():
    app = typer.Typer(pretty_exceptions_enable=False)
    bound_command.register(app)
    synth_command.register(app)
    return app


def run(app, *arguments):
    return CliRunner().invoke(app, list(arguments))


def test_bound_prints_one_object(app):
    result = run(app, "bound", str(SUITE / "eth4_mixed.json"), "--collective", "all_gather", "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record.pop("seconds") >= 0
    assert record == {
        "collective": "all_gather",
        "num_ranks": 4,
        "inverse_x": "3/1",
        "bound_algbw": pytest.approx(4 / 3),
        "reached_algbw": pytest.approx(4 / 3),
        "exact": True,
        "unit": "Gb/s",
        "cut": [[4, 3]],
    }


def test_bound_in_words_names_the_binding_links(app):
    result = run(app, "bound", TWO_BOXES, "--collective", "broadcast", "--root", "5")
    assert result.exit_code == 0, result.output
    assert "broadcast over 8 ranks" in result.stdout
    assert "bind" in result.stdout


@pytest.mark.parametrize("suffix", ["json", "txt"])
def test_synth_writes_a_schedule_that_reads_back(app, tmp_path, suffix):
    file = tmp_path / f"schedule.{suffix}"
    result = run(app, "synth", "star:ranks=4", "-c", "all_reduce", "-o", str(file), "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    text = file.read_text()
    schedule = Schedule.from_text(text) if suffix == "txt" else Schedule.from_json(json.loads(text))
    verify_schedule(schedule)
    assert record["algbw"] == float(schedule.algbw) == pytest.approx(record["bound_algbw"])
    wanted = {"method": "forest", "optimal": True, "verified": True, "k": 1, "num_trees": 8, "depth": schedule.depth}
    assert {key: record[key] for key in wanted} == wanted


def test_synth_reports_what_a_given_k_costs(app):
    arguments = ("synth", str(SUITE / "ring_8.json"), "--collective", "all_gather", "-k", "1", "--json")
    record = json.loads(run(app, *arguments).stdout)
    assert record["k"] == 1
    assert record["optimal"] is False
    assert record["algbw"] == pytest.approx(0.875 * record["bound_algbw"])
    assert "87.5% of the bound" in run(app, *arguments[:-1]).stdout


def test_synth_calls_all_reduce_optimal_where_it_divides_the_links(app):
    file = str(SUITE / "random12.json")
    shown = run(app, "synth", file, "-c", "all_reduce").stdout
    assert "5 link, optimal" in shown
    assert ", optimal" not in run(app, "synth", file, "-c", "all_reduce", "-k", "1").stdout
    record = json.loads(run(app, "synth", file, "-c", "all_reduce", "--json").stdout)
    assert record["bound_algbw"] == record["algbw"] == 5
    assert record["reduce_scatter_then_all_gather"] == pytest.approx(3.3566, abs=1e-4)


def test_trees_a_root_are_not_one_number_where_shares_differ(app):
    record = json.loads(run(app, "synth", str(SUITE / "torus_4x4_failed.json"), "-c", "all_reduce", "--json").stdout)
    assert record["k"] is None
    assert "uneven shares" in run(app, "synth", str(SUITE / "torus_4x4_failed.json"), "-c", "all_reduce").stdout


def test_synth_refuses_a_file_it_cannot_write(app, tmp_path):
    result = run(app, "synth", "star:ranks=3", "-c", "reduce", "-o", str(tmp_path / "none" / "x.json"))
    assert isinstance(result.exception, UsageError)
    assert "cannot be written" in str(result.exception)


def test_command_line_mistakes_are_ours_to_explain(app):
    unknown = run(app, "bound", "star:ranks=3", "-c", "all_together")
    assert isinstance(unknown.exception, UsageError)
    assert "unknown collective" in str(unknown.exception)
    assert run(app, "bound", "star:ranks=3").exit_code == 2
