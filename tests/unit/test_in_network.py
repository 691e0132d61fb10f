"""Switches that copy and add: files that say so, transfers that end in them, what is right there and what is not."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner, Result

from mycel.cli import bound as bound_command
from mycel.cli import draw, synth, verify, whatif
from mycel.collectives import in_network_bound
from mycel.collectives.bound import bound
from mycel.collectives.cost import estimate_seconds
from mycel.collectives.export import export
from mycel.collectives.lower import lower
from mycel.collectives.schedule import Chunk, Schedule, Transfer
from mycel.collectives.select import select
from mycel.collectives.simulate import simulate
from mycel.collectives.spec import Collective
from mycel.collectives.synth import methods_for, synthesize
from mycel.collectives.verify import verify_programs, verify_schedule
from mycel.errors import ScheduleError, TopologyError, UsageError, VerificationError
from mycel.runtime.fabric import Fabric
from mycel.settings import read_settings
from mycel.topology import (
    from_json,
    from_networkx,
    load_topology,
    parse_topology,
    read_topology,
    to_json,
    to_networkx,
    to_yaml,
)
from mycel.topology.builders import build, dgx_h100, star, two_boxes
from mycel.topology.change import compute_in_switch
from mycel.topology.model import Topology, Vertex

DATA = Path(__file__).parents[1] / "data" / "formats"
EXAMPLE = Path(__file__).parents[2] / "examples" / "clusters" / "star8_sharp.yaml"
SHARP = star(num_ranks=3, computes=True)
ALL_REDUCE = Collective(name="all_reduce", num_ranks=3)


def run(module: ModuleType, *arguments: str) -> Result:
    commands = typer.Typer()
    module.register(commands)
    return CliRunner().invoke(commands, list(arguments))


def through_the_switch(*transfers: Transfer, name: str = "all_reduce", root: int | None = None) -> Schedule:
    return Schedule(
        collective=Collective(name=name, num_ranks=3, root=root),
        topology=SHARP,
        method="by_hand",
        num_units=1,
        chunks=(Chunk(start=0, stop=1),),
        transfers=transfers,
    )


def hop(src: int, dst: int, *, reduce: bool = False, after: tuple[int, ...] = ()) -> Transfer:
    return Transfer(chunk=0, src=src, dst=dst, reduce=reduce, path=(src, dst), after=after)


UP = tuple(hop(rank, 3, reduce=True) for rank in range(3))
DOWN = tuple(hop(3, rank, after=(0, 1, 2)) for rank in range(3))


# -- topologies ---------------------------------------------------------------------------------------------------


def test_nodes_are_ranks_and_then_computing_switches() -> None:
    vertices = (
        Vertex(kind="switch", label="plain"),
        Vertex(kind="switch", label="sharp", computes=True),
        *(Vertex(kind="rank", label=f"r{i}") for i in range(2)),
    )
    fabric = Topology(name="mixed", unit="link", vertices=vertices, links=star(num_ranks=3).links)
    assert fabric.compute_vertices == (2, 3, 1)
    assert fabric.compute_index == {2: 0, 3: 1, 1: 2}
    assert fabric.without_computing().compute_vertices == (2, 3)
    assert SHARP.reversed().compute_vertices == SHARP.compute_vertices
    assert SHARP.subset([0, 2]).compute_vertices == (0, 1, 2)


def test_a_rank_is_not_marked() -> None:
    vertices = (Vertex(kind="rank", label="a", computes=True), *SHARP.vertices[1:])
    with pytest.raises(TopologyError, match="rank 'a' is marked 'computes'"):
        SHARP.with_vertices(vertices)


def test_fingerprints_without_computing_switches_stay_as_they_were() -> None:
    assert star(num_ranks=3).fingerprint == SHARP.without_computing().fingerprint == "1c9a17e01b15"
    assert SHARP.fingerprint != star(num_ranks=3).fingerprint
    assert SHARP.without_computing() == star(num_ranks=3)
    assert "computes" not in json.dumps(to_json(star(num_ranks=3))) + to_yaml(star(num_ranks=3))


@pytest.mark.parametrize("fabric", [SHARP, dgx_h100(num_nodes=2, nvls=True, sharp=True)])
def test_every_form_reads_back(fabric: Topology) -> None:
    assert from_json(to_json(fabric)) == fabric
    assert parse_topology(to_yaml(fabric), source="fabric.yaml") == fabric
    assert set(from_networkx(to_networkx(fabric)).compute_vertices) == set(fabric.compute_vertices)


def test_yaml_by_hand() -> None:
    text = """
    boxes: [{name: node, count: 2, ranks: 2, inside: {bandwidth: 4 GB/s, computes: true},
             uplink: {to: core, bandwidth: 1 GB/s, per: rank}}]
    switches: [{name: core, computes: no}, spare]
    links: [{from: spare, to: core, bandwidth: 1 GB/s}]
    """
    fabric = parse_topology(text, source="nodes.yaml")
    assert [fabric.label(v) for v in fabric.compute_vertices[4:]] == ["node0/switch", "node1/switch"]
    assert [load_topology(str(EXAMPLE)).label(v) for v in load_topology(str(EXAMPLE)).compute_vertices[8:]] == [
        "switch"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{ranks: 2, switches: [{computes: true}]}", "a.yaml:1: a switch: 'name' is missing"),
        ("{ranks: 2, switches: [{name: s, computes: 7}]}", "a.yaml:1: computes"),
        ("{ranks: 2, switches: [{name: s, compute: true}]}", "unknown key 'compute' (did you mean 'computes'?)"),
        ("{vertices: [{rank: a, computes: true}], links: []}", "a.yaml:1: 'computes' is said of switches"),
        ('{"nodes": [{"id": 0, "type": "switch", "computes": 1}], "links": []}', "node 0: computes must be true or"),
        ('{"nodes": [{"id": 0, "type": "gpu", "computes": true}], "links": []}', "marked 'computes'"),
    ],
)
def test_what_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(message)):
        parse_topology(text, source="a.json" if text.startswith('{"') else "a.yaml")


def test_nvls_is_told_and_not_assumed(tmp_path: Path) -> None:
    a100, file = (DATA / "nccl_a100.xml").read_text(encoding="utf-8"), tmp_path / "node.xml"
    for sm, is_told in (("80", False), ("90", True)):
        file.write_text(a100.replace('sm="80"', f'sm="{sm}"'), encoding="utf-8")
        found = read_topology(file)
        assert any("NVLS" in note for note in found.notes) == is_told
        assert found.topology.compute_vertices == found.topology.ranks
        gained = compute_in_switch(found.topology, "*nvswitch")
        assert [gained.label(v) for v in gained.compute_vertices[gained.num_ranks :]] == ["nvswitch"]


def test_builders_and_edits() -> None:
    assert len(build("dgx_h100:nodes=2,nvls=true,sharp=yes").compute_vertices) == 16 + 3
    assert compute_in_switch(two_boxes(), "*/switch").compute_vertices[8:] == (8, 9)
    with pytest.raises(UsageError, match="is no switch"):
        compute_in_switch(two_boxes(), "left/0")
    with pytest.raises(UsageError, match="no vertex is called 'lefty'"):
        compute_in_switch(two_boxes(), "lefty")


# -- schedules ----------------------------------------------------------------------------------------------------


def test_up_to_the_switch_and_down_again() -> None:
    schedule = through_the_switch(*UP, *DOWN)
    verify_schedule(schedule)
    assert schedule.algbw == 400
    assert schedule.num_compute_vertices == 4
    assert Schedule.from_json(schedule.to_json()) == schedule
    assert Schedule.from_text(schedule.to_text()) == schedule
    programs = lower(schedule, 10, piece_elements=3)
    assert [program.rank for program in programs] == [0, 1, 2, 3]
    verify_programs(programs)
    assert simulate(schedule, 1 << 20).seconds >= (1 << 20) / 50e6
    assert estimate_seconds(schedule, 1 << 20, 1 << 15) >= (1 << 20) / 50e6


@pytest.mark.parametrize(
    ("transfers", "message"),
    [
        ((*UP[:2], *(hop(3, rank, after=(0, 1)) for rank in range(3))), "rank 0, chunk 0: contribution of rank 2"),
        ((*UP, hop(3, 0, after=(0, 1)), *DOWN[1:]), r"wrong at switch switch \(3\), .*transfer 2 .*adds to it and"),
        ((hop(3, 0), *UP, *DOWN), r"wrong at switch switch \(3\), .*reads it while it is empty"),
        ((*UP, hop(0, 3, reduce=True), *(replace(t, after=(0, 1, 2, 3)) for t in DOWN)), "counted twice"),
        ((UP[0], hop(1, 3), UP[2], *DOWN), "contribution of rank 0 is missing"),
        ((hop(1, 3), UP[0], UP[2], *DOWN), r"switch \(3\), .*adds to it in no fixed order"),
        ((hop(0, 1, reduce=True), *UP, *DOWN), "wrong at"),
    ],
)  # fmt: skip
def test_what_is_wrong_at_a_switch(transfers: tuple[Transfer, ...], message: str) -> None:
    known = {(link.src, link.dst) for link in SHARP.links}
    transfers = tuple(t if t.path in known else replace(t, path=(t.src, 3, t.dst)) for t in transfers)
    with pytest.raises(VerificationError, match=message) as caught:
        verify_schedule(through_the_switch(*transfers))
    assert "\nswitch 3 " in caught.value.grid


def test_multicast_and_reduction_of_other_collectives() -> None:
    down = through_the_switch(hop(1, 3), hop(3, 0, after=(0,)), hop(3, 2, after=(0,)), name="broadcast", root=1)
    up = through_the_switch(*UP[::2], hop(3, 1, reduce=True, after=(0, 1)), name="reduce", root=1)
    for schedule in (down, up):
        verify_schedule(schedule)
        verify_programs(lower(schedule, 7, piece_elements=2))


def test_ends_that_are_no_nodes() -> None:
    with pytest.raises(ScheduleError, match=r"ranks are 0\.\.2, switches that compute 3\.\.3"):
        through_the_switch(hop(0, 4))
    with pytest.raises(ScheduleError, match=r"ranks are 0\.\.2$"):
        replace(through_the_switch(hop(0, 3)), topology=star(num_ranks=3))
    broken = through_the_switch(*UP, *DOWN).to_json()
    broken["topology"]["vertices"][3] = ["switch", "switch", None, "yes"]
    with pytest.raises(ScheduleError, match="wrong shape"):
        Schedule.from_json(broken)


# -- bounds, synthesis, commands ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [3, 8, 17])
def test_a_star_takes_one_crossing_of_each_cable(num_ranks: int) -> None:
    fabric, collective = star(num_ranks=num_ranks, computes=True), Collective(name="all_reduce", num_ranks=num_ranks)
    best = bound(fabric, collective)
    assert best.algbw == 400
    assert best.without_computing == Fraction(400 * num_ranks, 2 * (num_ranks - 1))
    schedule = synthesize(fabric, collective)
    verify_schedule(schedule)
    assert (schedule.algbw, schedule.depth, len(schedule.transfers)) == (400, 2, 2 * num_ranks)
    assert "Switch switch copies and adds; if switches only forwarded, it would be" in best.explain()


def test_a_switch_behind_a_thin_cable_is_passed_by() -> None:
    thin = build("two_boxes:ranks=4,inside=400 Mbit/s,between=100 Mbit/s")
    collective = Collective(name="all_reduce", num_ranks=4)
    best = bound(compute_in_switch(thin, "core"), collective)
    assert best.algbw == best.without_computing == bound(thin, collective).algbw
    assert "could copy and add, which gains nothing here" in best.explain()


def test_nvls_in_two_boxes() -> None:
    fabric = dgx_h100(num_nodes=2, nvls=True)
    collective = Collective(name="all_reduce", num_ranks=16)
    best, schedule = bound(fabric, collective), synthesize(fabric, collective)
    verify_schedule(schedule)
    assert (best.without_computing, best.algbw, schedule.algbw) == (Fraction(800, 3), 400, 400)
    assert bound(fabric, Collective(name="all_gather", num_ranks=16)).without_computing is None


def test_a_fabric_too_large_for_the_programme_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_network_bound, "_LARGEST", 300)
    best, schedule = bound(SHARP, ALL_REDUCE), synthesize(SHARP, ALL_REDUCE)
    assert best.is_exact  # a cut shows it, without the programme
    assert best.algbw == best.reached == schedule.algbw == 400
    monkeypatch.setattr(in_network_bound, "_LARGEST", 100)
    best, schedule = bound(SHARP, ALL_REDUCE), synthesize(SHARP, ALL_REDUCE)
    assert not best.is_exact
    assert best.algbw == 400 and best.reached == best.without_computing == schedule.algbw == 300
    assert "300 Mbit/s is known to be reached, and more may be" in best.explain()


def test_every_method_is_right_beside_computing_switches() -> None:
    for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"):
        collective = Collective(name=name, num_ranks=3, root=0 if name == "broadcast" else None)
        for method in methods_for(collective.name):
            verify_schedule(synthesize(SHARP, collective, method))
    assert select(SHARP, ALL_REDUCE, [1 << 20]).rows[0].method == "forest"


def test_exports() -> None:
    schedule = through_the_switch(*UP, *DOWN)
    assert '3 [label="3: switch", shape=box]' in export(schedule, "dot", num_bytes=1 << 20)
    trace = json.loads(export(schedule, "chrome_trace", num_bytes=1 << 20))
    assert "switch 3 (switch)" in [event["args"].get("name") for event in trace["traceEvents"]]
    with pytest.raises(ScheduleError, match="cannot express switches that copy and add"):
        export(schedule, "msccl_xml", num_bytes=1 << 20)


def test_sockets_end_at_ranks(tmp_path: Path) -> None:
    settings = replace(read_settings({}), topology=EXAMPLE)
    fabric = Fabric(settings, range(8), 8).topology([])
    assert fabric.compute_vertices == fabric.ranks


def test_commands() -> None:
    told = run(whatif, "star:ranks=8", "-c", "all_reduce", "--compute", "switch", "--json")
    assert json.loads(told.output)["ratio"] == 1.75
    told = run(bound_command, str(EXAMPLE), "-c", "all_reduce")
    assert "copies and adds" in " ".join(told.output.split())


def test_a_schedule_of_switches_is_written_read_and_verified(tmp_path: Path) -> None:
    file = tmp_path / "sharp.json"
    told = run(synth, str(EXAMPLE), "-c", "all_reduce", "-o", str(file), "--json")
    record = json.loads(told.output)
    assert (record["algbw"], record["optimal"], record["depth"], record["k"]) == (400, True, 2, None)
    told = run(verify, str(file))
    assert told.output.startswith("right: all_reduce over 8 ranks on star8_sharp, 16 transfers, depth 2")
    broken = json.loads(file.read_text(encoding="utf-8"))
    broken["transfers"][9][5].pop()
    file.write_text(json.dumps(broken), encoding="utf-8")
    told = run(verify, str(file))
    assert told.exit_code == 1
    assert "at switch switch (8)" in " ".join(told.output.split())
    assert "\nswitch 8 " in told.output


def test_pictures_mark_them(tmp_path: Path) -> None:
    for name in ("fabric.dot", "fabric.svg"):
        told = run(draw, str(EXAMPLE), "-c", "all_reduce", "-o", str(tmp_path / name))
        assert told.exit_code == 0, told.output
    assert 'label="switch", shape=box, peripheries=2' in (tmp_path / "fabric.dot").read_text()
    assert "copies and adds" in (tmp_path / "fabric.svg").read_text()
