"""Sketches: the reader, the links they allow, planning inside them, the replay, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import taccl as claims
import typer
from typer.testing import CliRunner

from mycel.cli import synth as synth_command
from mycel.collectives.replay import replay
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import COLLECTIVES, ROOTED, Collective, CollectiveName
from mycel.collectives.synth import NAMED_ONLY, methods_for, synthesize
from mycel.collectives.synth.sketch import Sketch, parse_sketch, plan_sketch, read_sketch
from mycel.collectives.synth.sketch.network import build_network
from mycel.collectives.verify import verify_schedule
from mycel.errors import MycelError, ScheduleError, SynthesisError, UsageError
from mycel.topology.load import load_topology
from mycel.topology.model import Topology

EXAMPLES = Path(__file__).parents[2] / "examples" / "sketches"

ONE_BOX: dict[str, Any] = {"nnodes": 1, "intranode_sketch": {"strategy": "none"}}
TWO_BOXES: dict[str, Any] = {
    "nnodes": 2,
    "intranode_sketch": {"strategy": "switch", "switches": [[0, 1]], "switch_hyperedge_strategy": ["uc-max"]},
    "internode_sketch": {"strategy": "relay", "internode_conn": {"0": [1]}, "gpus_to_sender_rev_map": {"0": [0, 1]}},
    "symmetry_offsets": [[2, 4]],
    "hyperparameters": {"input_chunkup": 2},
}


def on(topology: Topology, name: CollectiveName) -> Collective:
    return Collective(name=name, num_ranks=topology.num_ranks, root=1 if name in ROOTED else None)


def sketch_of(data: object) -> Sketch:
    return parse_sketch(json.dumps(data), source="s.json")


def changed(data: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(data))
    *sections, last = path.split(".")
    here = copy
    for section in sections:
        here = here[section]
    here[last] = value
    return copy


# -- reading --------------------------------------------------------------------------------------------------


def test_every_field_is_read() -> None:
    sketch = sketch_of(changed(TWO_BOXES, "internode_sketch.enforce_ordering", True))
    assert (sketch.num_nodes, sketch.pieces, sketch.policy, sketch.own_first) == (2, 2, "uc-max", True)
    assert sketch.groups == ((0, 1),)
    assert sketch.connections == ((0, (1,)),)
    assert sketch.senders == ((0, (0, 1)),)
    assert sketch.symmetry == ((2, 4),)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], r"s\.json: expected a JSON object; got \[\]"),
        ({}, "lacks the key 'nnodes'"),
        (changed(ONE_BOX, "nnodes", 0), "nnodes must be a whole number in 1..64; got 0"),
        (changed(ONE_BOX, "nnodes", True), "nnodes must be a whole number"),
        (changed(ONE_BOX, "nodes", 1), "unknown key 'nodes'.*did you mean 'nnodes'"),
        (changed(ONE_BOX, "intranode_sketch", 1), "intranode_sketch: expected a JSON object"),
        (changed(ONE_BOX, "intranode_sketch.strategy", "swich"), "strategy is 'swich'.*did you mean 'switch'"),
        (changed(ONE_BOX, "intranode_sketch.strategy", "switch"), "intranode_sketch: lacks the key 'switches'"),
        (changed(TWO_BOXES, "intranode_sketch.switches", []), "no switch"),
        (changed(TWO_BOXES, "intranode_sketch.switches", [[0, 1], [1, 2]]), r"switches\[1\]: shares some GPUs"),
        (changed(TWO_BOXES, "intranode_sketch.switches", [[0, 0]]), "named twice"),
        (
            changed(TWO_BOXES, "intranode_sketch.switch_hyperedge_strategy", ["uc"]),
            "write one of free, uc-min, uc-max",
        ),
        ({k: v for k, v in TWO_BOXES.items() if k != "internode_sketch"}, "lacks the key 'internode_sketch'"),
        (changed(TWO_BOXES, "internode_sketch.internode_conn", "all"), "internode_conn is 'all'"),
        (changed(TWO_BOXES, "internode_sketch.internode_conn", {"x": [0]}), "key 'x' is no GPU number"),
        (changed(TWO_BOXES, "internode_sketch.internode_conn", {"0": [-1]}), r"internode_conn\.0 must be a whole"),
        (changed(TWO_BOXES, "internode_sketch.internode_conn", {}), "the nodes would be apart"),
        (changed(TWO_BOXES, "internode_sketch.enforce_ordering", 1), "enforce_ordering is 1; write true or false"),
        (changed(TWO_BOXES, "symmetry_offsets", [[1]]), r"symmetry_offsets\[0\]"),
        (
            changed(TWO_BOXES, "hyperparameters.input_chunkup", 10**30),
            "input_chunkup must be a whole number in 1..64",
        ),
    ],
)
def test_a_malformed_sketch_is_one_line_with_the_file_and_the_key(data: object, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        sketch_of(data)
    assert str(caught.value).startswith("s.json: ")
    assert "\n" not in str(caught.value)


def test_what_is_no_json_and_no_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^s\.json:1:2: not JSON"):
        parse_sketch("{", source="s.json")
    with pytest.raises(UsageError, match="not JSON: RecursionError"):
        parse_sketch("[" * 100_000, source="s.json")
    with pytest.raises(UsageError, match="no such file"):
        read_sketch(tmp_path / "none.json")
    (tmp_path / "b.json").write_bytes(b"\xff\xff")
    with pytest.raises(UsageError, match="not a text file"):
        read_sketch(tmp_path / "b.json")


# -- links ----------------------------------------------------------------------------------------------------


def test_links_between_nodes_are_those_of_the_sketch_and_inside_avoid_the_network() -> None:
    fabric = load_topology(f"{EXAMPLES / 'ndv2.json'}*2")
    network = build_network(fabric, read_sketch(EXAMPLES / "ndv2_x2.json"))
    crossing = {(link.src, link.dst): link for link in network.links if link.crosses}
    assert set(crossing) == {(0, 9), (8, 1)}
    assert all(len(link.path) == 2 for link in network.links if not link.crosses)
    assert crossing[0, 9].alpha_s == pytest.approx(2.6e-6)
    assert len(network.links) == 2 * 32 + 2


@pytest.mark.parametrize(
    ("fabric", "data", "message"),
    [
        ("ring:ranks=5", TWO_BOXES, "nnodes is 2, but ring_5 has 5 ranks"),
        (
            "ring:ranks=4",
            changed(TWO_BOXES, "internode_sketch.internode_conn", {"2": [0]}),
            "names GPU 2, but a node",
        ),
        ("ring:ranks=4", changed(ONE_BOX, "symmetry_offsets", [[1, 3]]), "runs of 3 do not divide the 4 ranks"),
        ("slow", changed(ONE_BOX, "symmetry_offsets", [[1, 4]]), "has no such symmetry; remove it"),
    ],
)
def test_a_sketch_that_does_not_fit_the_fabric_is_refused(
    fabric: str, data: dict[str, Any], message: str, tmp_path: Path
) -> None:
    topology = load_topology(fabric if fabric != "slow" else "ring:ranks=4,bandwidth=4 GB/s")
    if fabric == "slow":
        first = topology.links[0]
        topology = replace(topology, links=(replace(first, capacity=first.capacity + 1), *topology.links[1:]))
    with pytest.raises(UsageError, match=message):
        plan_sketch(topology, on(topology, "all_gather"), sketch_of(data), time_limit_s=5)


def test_what_is_too_large_is_refused_before_it_is_built() -> None:
    topology = load_topology("star:ranks=64")
    with pytest.raises(SynthesisError, match="4032 chunks on 4032 links are more than a sketch is for"):
        plan_sketch(topology, on(topology, "all_to_all"), sketch_of(ONE_BOX), time_limit_s=5)


def test_a_rank_that_the_sketch_leaves_out_is_named() -> None:
    topology = load_topology("star:ranks=4")
    data = changed(TWO_BOXES, "internode_sketch.gpus_to_sender_rev_map", {"1": [0, 1]})
    with pytest.raises(SynthesisError, match="rank 2 cannot receive what rank 0 has: the sketch leaves it unreached"):
        plan_sketch(topology, on(topology, "all_gather"), sketch_of(data), time_limit_s=5)


# -- planning -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_collective_is_planned_inside_a_sketch_of_two_boxes(name: CollectiveName) -> None:
    topology = load_topology("two_boxes:ranks=4,inside=8 Gbit/s,between=1 Gbit/s")
    data = changed(TWO_BOXES, "symmetry_offsets", []) if name in ROOTED else TWO_BOXES
    plan = plan_sketch(topology, on(topology, name), sketch_of(data), num_bytes=1 << 20, time_limit_s=4)
    verify_schedule(plan.schedule)
    assert plan.routing_is_optimal
    if name != "all_reduce":
        assert plan.seconds >= plan.bound_s
    assert plan.gap < 0.15
    again = replay(plan.schedule, plan.num_bytes, messages=plan.messages, ports=plan.ports)
    assert again.seconds == plan.seconds
    # Between the nodes only from GPU 0 to GPU 1, or backwards for sums.
    crossing = {(t.src, t.dst, t.reduce) for t in plan.schedule.transfers if t.src // 2 != t.dst // 2}
    assert crossing <= {(0, 3, False), (2, 1, False), (3, 0, True), (1, 2, True)}


@pytest.mark.parametrize(("fabric", "sketch", "us"), [("ndv2.json", "ndv2_x1", 80), ("ndv2.json*2", "ndv2_x2", 1067)])
def test_example_sketches_end_within_15_percent_of_the_routing_bound(fabric: str, sketch: str, us: float) -> None:
    topology = load_topology(f"{EXAMPLES / fabric}")
    plan = plan_sketch(topology, on(topology, "all_gather"), read_sketch(EXAMPLES / f"{sketch}.json"), time_limit_s=6)
    verify_schedule(plan.schedule)
    assert plan.routing_is_optimal
    assert plan.gap < 0.15
    assert plan.seconds < us * 1e-6


def test_all_example_files_are_read_and_fit_their_fabrics() -> None:
    for sketch in sorted(EXAMPLES.glob("*_x*.json")):
        node, nodes = sketch.stem.split("_x")
        topology = load_topology(f"{EXAMPLES / node}.json" + (f"*{nodes}" if nodes != "1" else ""))
        network = build_network(topology, read_sketch(sketch))
        assert network.num_ranks == topology.num_ranks


def test_messages_of_several_chunks_pay_for_small_sizes() -> None:
    topology = load_topology("ring:ranks=4,bandwidth=8 Gbit/s,latency=10us")
    data = changed(ONE_BOX, "hyperparameters", {"input_chunkup": 4})
    plan = plan_sketch(topology, on(topology, "all_gather"), sketch_of(data), num_bytes=4096, time_limit_s=4)
    verify_schedule(plan.schedule)
    assert plan.num_messages < len(plan.schedule.transfers)
    assert plan.seconds < replay(plan.schedule, plan.num_bytes).seconds


def test_own_data_go_first_where_the_sketch_says_so() -> None:
    topology = load_topology("two_boxes:ranks=4,inside=8 Gbit/s,between=1 Gbit/s")
    data = changed(TWO_BOXES, "internode_sketch.enforce_ordering", True)
    plan = plan_sketch(topology, on(topology, "all_gather"), sketch_of(data), num_bytes=1 << 20, time_limit_s=4)
    crossing = [plan.schedule.block_of(t.chunk) for t in plan.schedule.transfers if (t.src, t.dst) == (0, 3)]
    assert crossing == [0, 0, 1, 1]


def test_a_switch_that_only_the_sketch_knows_has_one_port_a_gpu() -> None:
    topology = load_topology("full_mesh:ranks=4,bandwidth=8 Gbit/s")
    data = changed(ONE_BOX, "intranode_sketch", {"strategy": "switch", "switches": [[0, 1, 2, 3]]})
    shared = plan_sketch(topology, on(topology, "all_gather"), sketch_of(data), num_bytes=4 * 10**6, time_limit_s=4)
    free = plan_sketch(topology, on(topology, "all_gather"), sketch_of(ONE_BOX), num_bytes=4 * 10**6, time_limit_s=4)
    assert free.seconds == pytest.approx(1e-3)
    assert shared.seconds == pytest.approx(3e-3)
    assert len(shared.ports) == 8


def test_the_method_takes_part_only_by_name() -> None:
    assert "sketch" in NAMED_ONLY
    assert all("sketch" not in methods_for(name) for name in COLLECTIVES)
    topology = load_topology("ring:ranks=4")
    with pytest.raises(UsageError, match="needs a sketch"):
        synthesize(topology, on(topology, "all_gather"), method="sketch")


def test_sizes_and_times_are_checked() -> None:
    topology = load_topology("ring:ranks=4")
    for options in ({"num_bytes": 0}, {"time_limit_s": 0.0}, {"time_limit_s": float("nan")}):
        with pytest.raises(UsageError, match=r"size 0|time limit"):
            plan_sketch(topology, on(topology, "all_gather"), sketch_of(ONE_BOX), **options)  # type: ignore[arg-type]


# -- replay ---------------------------------------------------------------------------------------------------


def ring_schedule() -> Schedule:
    topology = load_topology("ring:ranks=3,bandwidth=1 GB/s,latency=1us")
    return synthesize(topology, Collective(name="all_gather", num_ranks=3), method="ring")


def test_replay_adds_latency_and_bytes_and_waits_for_links() -> None:
    schedule = ring_schedule()
    assert replay(schedule, 3000).seconds == pytest.approx(4e-6)  # two steps of 1 us + 1,000 bytes
    ports = [[(t.path[0], t.path[1]) for t in schedule.transfers[:3]]]
    assert replay(schedule, 3000, ports=ports).seconds == pytest.approx(12e-6)  # six messages through one port


def test_replay_refuses_messages_that_cannot_be() -> None:
    schedule = ring_schedule()
    with pytest.raises(ScheduleError, match="take different paths"):
        replay(schedule, 3000, messages=[0, 0, 1, 2, 3, 4])
    late = next(i for i, t in enumerate(schedule.transfers) if t.after)
    path = schedule.transfers[late].path
    mate = next(i for i, t in enumerate(schedule.transfers) if t.path == path and not t.after)
    numbers = list(range(6))
    numbers[late] = numbers[mate]
    with pytest.raises(ScheduleError, match="starts later"):
        replay(schedule, 3000, messages=numbers)


# -- the recorded comparison with the paper -------------------------------------------------------------------


def test_the_table_in_the_page_is_that_of_its_lines() -> None:
    lines = claims.read(claims.OUTPUT)
    assert [line["sketch"] for line in lines] == list(claims.CASES)
    assert claims.tables(lines) in claims.PAGE.read_text(encoding="utf-8"), "run: benchmarks/claims/taccl.py --tables"
    assert all(line["routing_optimal"] and line["gap"] <= claims.ALLOWED for line in lines)


def test_the_greedy_order_is_right_and_loses_what_a_better_one_does_not() -> None:
    topology, sketch = load_topology(EXAMPLES / "ndv2.json"), read_sketch(EXAMPLES / "ndv2_x1.json")
    order = claims.greedy(topology, on(topology, "all_gather"), sketch, 4.0)
    verify_schedule(order)
    assert replay(order, 8 * 10**6).seconds > 1.15 * 69.55e-6


# -- command line ---------------------------------------------------------------------------------------------


def run(*arguments: str) -> Any:
    app = typer.Typer()
    app.callback()(lambda: None)
    synth_command.register(app)
    return CliRunner().invoke(app, ["synth", str(EXAMPLES / "ndv2.json"), "-c", "all_gather", *arguments])


def test_command_prints_bound_time_and_gap(tmp_path: Path) -> None:
    options = ["--sketch", str(EXAMPLES / "ndv2_x1.json"), "--size", "8KB", "--time-limit", "3"]
    result = run(*options, "--json", "-o", str(tmp_path / "s.json"))
    record = json.loads(result.stdout)
    assert record["verified"] is True
    assert record["final_s"] >= record["bound_s"] > 0
    assert record["gap"] == pytest.approx(record["final_s"] / record["bound_s"] - 1)
    saved = Schedule.from_json(json.loads((tmp_path / "s.json").read_text()))
    assert len(saved.transfers) == record["num_transfers"] == 56
    assert "above the routing bound of" in run(*options).stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["--method", "sketch"],
        ["--sketch", str(EXAMPLES / "ndv2_x1.json"), "--method", "ring"],
        ["--sketch", str(EXAMPLES / "ndv2_x1.json"), "-k", "1"],
        ["--sketch", str(EXAMPLES / "ndv2.json")],
    ],
)
def test_command_refuses_what_makes_no_sense(arguments: list[str]) -> None:
    assert isinstance(run(*arguments).exception, MycelError)
