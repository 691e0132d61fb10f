"""Classes of links: what files say, what is taken where they say nothing, and who uses it."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from mycel.cli import build_app
from mycel.collectives.cost import LOCAL_PIECE_BYTES, PIECE_BYTES, choose, estimate_seconds
from mycel.collectives.schedule import Schedule
from mycel.collectives.select import select
from mycel.collectives.simulate import simulate
from mycel.collectives.spec import Collective
from mycel.collectives.synth import synthesize
from mycel.collectives.time_bound import bound_seconds
from mycel.cost import LINK_CLASSES, Costs, link_costs
from mycel.errors import ScheduleError, TopologyError, UsageError
from mycel.topology import Topology, from_json, load_topology, parse_topology, to_json, to_yaml
from mycel.topology.change import add_link, change_link, remove_link
from mycel.topology.link_class import LINK_CLASS_NAMES, StatedClass

FILE = """
boxes:
  - name: left
    ranks: 2
    inside: {bandwidth: 100 GB/s, class: xgmi}
    uplink: {to: core, bandwidth: 25 GB/s, per: rank, latency: 1us, class: rdma}
  - name: right
    ranks: 2
    inside: {bandwidth: 16 GB/s, class: pcie}
    uplink: {to: core, bandwidth: 25 GB/s, per: rank}
    overrides: [{rank: 1, uplink: {class: tcp}}]
switches: [core]
link_classes:
  rdma: {latency: 3.5us, pieces: [16KB, 1MB]}
  tcp: {wake: 40us, work: 0}
"""


@pytest.fixture
def fabric() -> Topology:
    return parse_topology(FILE, source="cluster.yaml")


def test_files_state_classes(fabric: Topology) -> None:
    of = {(fabric.label(k.src), fabric.label(k.dst)): k.link_class for k in fabric.links}
    assert of["left/0", "left/switch"] == of["left/switch", "left/0"] == "xgmi"
    assert (of["left/1", "core"], of["right/0", "core"], of["right/1", "core"]) == ("rdma", None, "tcp")
    assert of["right/0", "right/switch"] == "pcie"
    assert fabric.link_classes == (
        StatedClass(name="rdma", latency_s=3.5e-6, piece_bytes=(1 << 14, 1 << 20)),
        StatedClass(name="tcp", wake_s=40e-6, work_s=0.0),
    )


def test_every_form_of_a_topology_keeps_them(fabric: Topology) -> None:
    assert parse_topology(to_yaml(fabric), source="cluster.yaml") == fabric
    assert from_json(json.loads(json.dumps(to_json(fabric)))) == fabric
    schedule = synthesize(fabric, "all_gather")
    for again in (
        Schedule.from_json(json.loads(json.dumps(schedule.to_json()))),
        Schedule.from_text(schedule.to_text()),
    ):
        assert again.topology == fabric


def test_changed_fabrics_keep_them(fabric: Topology) -> None:
    for other in (
        fabric.reversed().reversed(),
        fabric.reordered([1, 0, 2, 3]).reordered([1, 0, 2, 3]),
        change_link(fabric, "left/0<->core=25 GB/s"),
        remove_link(add_link(fabric, "left/0->right/0=1 GB/s"), "left/0->right/0"),
    ):
        assert other == fabric
    part = fabric.subset([0, 1])
    assert part.link_classes == fabric.link_classes
    assert {k.link_class for k in part.links} == {"xgmi", "rdma"}


def test_a_fingerprint_sees_them_and_no_bound_does(fabric: Topology) -> None:
    plain = replace(fabric, links=tuple(replace(k, link_class=None) for k in fabric.links), link_classes=())
    assert len({fabric.fingerprint, plain.fingerprint, replace(fabric, link_classes=()).fingerprint}) == 3
    assert synthesize(fabric, "all_reduce").algbw == synthesize(plain, "all_reduce").algbw


@pytest.mark.parametrize(
    ("was", "wrong", "message"),
    [
        (
            "class: pcie",
            "class: pci",
            r"cluster.yaml:9: unknown class of links 'pci' \(did you mean 'pcie'\?\); known: nvl",
        ),
        ("latency: 3.5us", "latency: 3.5", "cluster.yaml:14: cannot read '3.5' as a time"),
        ("latency: 3.5us", "latency: -1us", "cluster.yaml:14: latency '-1us' must be zero or more"),
        ("16KB, 1MB", "1MB, 16KB", "cluster.yaml:14: class rdma: pieces .* must grow"),
        ("16KB, 1MB", "1 MB/s", "cluster.yaml:14: cannot read '1 MB/s' as a size"),
        ("work: 0", "cost: 0", "cluster.yaml:15: class tcp: unknown key 'cost'; known keys: latency, wake, work, p"),
        ("rdma: {latency", "ethernet: {latency", "cluster.yaml:14: link_classes: unknown key 'ethernet'"),
    ],
)
def test_mistakes_have_their_line(was: str, wrong: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        parse_topology(FILE.replace(was, wrong), source="cluster.yaml")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ([], "link_classes must be an object"),
        ({"rdma": 3}, "pair.json: class rdma: must be an object"),
        ({"rdma": {"speed": 3}}, "class rdma: unknown key 'speed'"),
        ({"rdma": {"latency": "3us"}}, "class rdma: latency must be a number of seconds"),
        ({"rdma": {"work": -1}}, "class rdma: work -1.0 s must be zero or more"),
        ({"rdma": {"pieces": [1.5]}}, "class rdma: pieces must be a list of whole numbers"),
        ({"rdma": {"pieces": [4]}}, "class rdma: pieces .* must grow, from 256"),
        ({"cable": {}}, "unknown class of links 'cable'"),
    ],
)
def test_mistakes_in_json_are_named(said: object, message: str) -> None:
    ends = [{"src": 0, "dst": 1, "capacity": 3}, {"src": 1, "dst": 0, "capacity": 3}]
    data = {"nodes": [{"id": 0, "type": "gpu"}, {"id": 1, "type": "gpu"}], "links": ends, "link_classes": said}
    with pytest.raises(TopologyError, match=message):
        from_json(data, source="pair.json")
    ends[0]["class"] = "copper"  # type: ignore[assignment]
    with pytest.raises(TopologyError, match=r"link 0 \(0 -> 1\): unknown class 'copper'; known: nvlink"):
        from_json(data | {"link_classes": {}}, source="pair.json")


def test_a_schedules_file_with_an_unknown_class_is_refused(fabric: Topology) -> None:
    text = synthesize(fabric, "all_gather").to_text()
    assert " pcie\n" in text
    with pytest.raises((ScheduleError, TopologyError), match="unknown class 'string'"):
        Schedule.from_text(text.replace(" pcie\n", " string\n"))


def test_what_is_not_stated_has_defaults(fabric: Topology) -> None:
    costs = link_costs(fabric)
    left, core, right = (
        next(v for v in range(7) if fabric.label(v) == name) for name in ("left/0", "core", "right/1")
    )
    inside = next(v for v in range(7) if fabric.label(v) == "left/switch")
    assert costs.message((left, inside, left + 1)) == (LINK_CLASSES["xgmi"].latency_s, 0.0)
    # 1 us that the first link states, none of TCP's own, and the slower of the two to wake; work is stated as none.
    assert costs.message((left, core, right)) == pytest.approx((1e-6 + 40e-6, 0.0))
    right0 = right - 1
    assert costs.message((left, core, right0)) == pytest.approx((1e-6 + 3.5e-6, 0.0))
    assert costs.table["rdma"].piece_bytes == (1 << 14, 1 << 20)
    assert costs.table["nvlink"] == LINK_CLASSES["nvlink"]


def test_names_are_one_list() -> None:
    assert tuple(LINK_CLASSES) == LINK_CLASS_NAMES
    assert (LINK_CLASSES["tcp"].piece_bytes, LINK_CLASSES["shared_memory"].piece_bytes) == (
        PIECE_BYTES,
        LOCAL_PIECE_BYTES,
    )
    usual = Costs()
    assert (LINK_CLASSES["tcp"].work_s, LINK_CLASSES["tcp"].wake_s) == (usual.message_s, usual.wake_s)


def test_rate_and_place_hint_at_a_class() -> None:
    for text, classes in (
        ("dgx_a100:nodes=2", {"nvlink", "rdma"}),
        ("two_boxes:ranks=4,inside=400 Mbit/s,between=50 Mbit/s", {"tcp"}),
        ("loopback:ranks=3", {"shared_memory"}),
        ("torus:dims=2x4,bandwidth=50 GB/s", {"rdma"}),
    ):
        assert set(link_costs(load_topology(text)).classes.values()) == classes, text


def test_one_model_for_simulator_bound_select_and_runtime() -> None:
    """What a file says of a class reaches all of them, in the same measure."""
    slow = load_topology("ring:ranks=4,bandwidth=1 GB/s")
    late = replace(slow, link_classes=(StatedClass(name="tcp", latency_s=1e-3, piece_bytes=(1 << 18,)),))
    collective = Collective(name="all_gather", num_ranks=4)
    runs, bounds, estimates = [], [], []
    for topology in (slow, late):
        tree = synthesize(topology, collective, "tree")
        runs.append(simulate(tree, 1 << 10).seconds)
        bounds.append(bound_seconds(topology, collective).seconds(1 << 10))
        estimates.append(estimate_seconds(tree, 1 << 10, 1 << 14))
    for before, after in (runs, bounds, estimates):
        assert after - before == pytest.approx(2e-3, rel=1e-2)  # two messages one after the other
    row = select(late, collective, [1 << 10]).rows[0]
    assert row.seconds["tree"] == runs[1]
    assert row.least_s == bounds[1]
    assert choose({"tree": tree}, 1 << 26).piece_bytes == 1 << 18


def test_all_links_can_be_said_to_be_of_one_class() -> None:
    fabric = load_topology("ring:ranks=4,bandwidth=1 GB/s")
    times = [
        select(fabric, "all_gather", [1 << 10], links=name).rows[0].seconds["tree"] for name in ("nvlink", "rdma")
    ]
    assert times[1] - times[0] == pytest.approx(2 * (2.7e-6 - 0.6e-6))
    with pytest.raises(UsageError, match="unknown class of links 'copper'; known: nvlink"):
        select(fabric, "all_gather", [1 << 10], links="copper")
    with pytest.raises(UsageError, match="one of the two"):
        link_costs(fabric, links="tcp", overhead_s=0.0)


def test_the_command_shows_them(tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("classes") / "cluster.yaml"
    file.write_text(FILE, encoding="utf-8")
    shown = CliRunner().invoke(build_app(), ["show", str(file)]).output
    assert re.search(r"left/0 <-> core +25 GB/s, 1 us, rdma\n", shown)
    assert "rdma  3.5 us, wake 0 ns, work 0 ns, pieces 16KB 1MB (the topology, where it says so)" in shown
    record = json.loads(CliRunner().invoke(build_app(), ["show", str(file), "--json"]).output)
    assert {"xgmi", "rdma", "pcie", "tcp"} == set(record["link_classes"])
    assert record["link_classes"]["tcp"]["wake_s"] == 40e-6
    chosen = CliRunner().invoke(
        build_app(),
        ["select", str(file), "--collective", "all_gather", "--sizes", "1KB", "--json", "--links", "rdma"],
    )
    assert json.loads(chosen.output)["links"] == ["rdma"]
