"""YAML form: what it means, and that every complaint names its line."""

from __future__ import annotations

from pathlib import Path

import networkx as nx
import pytest

from mycel.errors import TopologyError
from mycel.topology import Topology, load_topology, parse_topology, to_yaml
from mycel.topology.builders import ring, star, torus, two_boxes

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"


def graph(topology: Topology) -> nx.DiGraph:
    """The fabric without names."""
    result = nx.DiGraph()
    for number, vertex in enumerate(topology.vertices):
        result.add_node(number, kind=vertex.kind)
    for link in topology.links:
        result.add_edge(link.src, link.dst, rate=(link.capacity, topology.unit, link.latency_s))
    return result


def same_fabric(a: Topology, b: Topology) -> bool:
    return nx.is_isomorphic(graph(a), graph(b), node_match=lambda x, y: x == y, edge_match=lambda x, y: x == y)


def read(text: str) -> Topology:
    return parse_topology(text, source="clusters/mine.yaml")


def complaint(text: str) -> str:
    with pytest.raises(TopologyError) as raised:
        read(text)
    message = str(raised.value)
    assert "\n" not in message
    return message


# -- what it means ----------------------------------------------------------------------------------------------


def test_examples_are_what_the_builders_make() -> None:
    assert load_topology(CLUSTERS / "two_boxes.yaml") == two_boxes(latency="50us")
    shared = two_boxes(between="200 Mbit/s", shared_uplink=True, latency="50us")
    assert load_topology(CLUSTERS / "shared_uplink.yaml") == shared
    for count in (4, 8):
        assert same_fabric(load_topology(CLUSTERS / f"star{count}.yaml"), star(num_ranks=count, latency="50us"))
        circle = ring(num_ranks=count, bandwidth="200 Mbit/s", latency="50us")
        assert same_fabric(load_topology(CLUSTERS / f"ring{count}.yaml"), circle)
    grid = torus(dims=(2, 4), bandwidth="200 Mbit/s", latency="50us")
    assert same_fabric(load_topology(CLUSTERS / "torus_2x4.yaml"), grid)


def test_slow_nic_example() -> None:
    topology = load_topology(CLUSTERS / "slow_nic.yaml")
    assert [topology.capacity[vertex, 4] for vertex in topology.ranks] == [400, 400, 400, 100]
    assert [topology.capacity[4, vertex] for vertex in topology.ranks] == [400, 400, 400, 100]


@pytest.mark.parametrize("path", sorted(CLUSTERS.glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_round_trip(path: Path) -> None:
    topology = load_topology(path)
    assert topology.name == path.stem
    assert topology.unit == "Mbit/s"
    assert read(to_yaml(topology)) == topology


def test_boxes_in_full() -> None:
    topology = read("""
name: everything
boxes:
  - name: gpu
    count: 2
    ranks: 2
    inside: {bandwidth: 25 GB/s, latency: 2us}
    uplink:
      - {to: rail0, bandwidth: 100 Gbit/s, latency: 5us, per: rank, ranks: [0]}
      - {to: rail1, bandwidth: 100 Gbit/s, latency: 5us, per: rank, ranks: [1]}
      - {to: spine, bandwidth: 10 Gbit/s, per: box}
    overrides:
      - {rank: 1, inside: {bandwidth: 12.5 GB/s}}
  - {name: cpu, ranks: 1, uplink: {to: spine, bandwidth: 10 Gbit/s, per: rank}}
ranks: [monitor]
switches: [rail0, rail1, spine]
links:
  - {from: rail0, to: rail1, bandwidth: 400 Gbit/s}
  - {from: monitor, to: spine, bandwidth: 1 Gbit/s, latency: 1ms, one_way: true}
  - {from: spine, to: monitor, bandwidth: 5 Gbit/s, one_way: yes}
  - {from: spine, to: rail0, bandwidth: 40 Gbit/s}
""")
    index = {vertex.label: number for number, vertex in enumerate(topology.vertices)}
    ranks = ["gpu0/0", "gpu0/1", "gpu1/0", "gpu1/1", "cpu/0", "monitor"]
    assert [topology.label(vertex) for vertex in topology.ranks] == ranks
    assert [topology.vertices[vertex].node for vertex in topology.ranks] == [
        "gpu0",
        "gpu0",
        "gpu1",
        "gpu1",
        "cpu",
        None,
    ]
    assert topology.unit == "Gbit/s"

    def both(a: str, b: str) -> list[tuple[int, float]]:
        return [
            (topology.capacity[index[x], index[y]], topology.latency_s[index[x], index[y]])
            for x, y in ((a, b), (b, a))
        ]

    assert both("gpu1/0", "gpu1/switch") == [(200, 2e-6)] * 2
    assert both("gpu1/1", "gpu1/switch") == [(100, 2e-6)] * 2
    assert both("gpu0/1", "rail1") == [(100, 5e-6)] * 2
    assert both("gpu0/switch", "spine") == [(10, 0.0)] * 2
    assert both("monitor", "spine") == [(1, 1e-3), (5, 0.0)]
    assert (index["gpu0/0"], index["rail1"]) not in topology.capacity
    assert len(topology.links) == 2 * (2 * 2 + 4 + 2 + 1 + 1 + 1 + 1)


def test_overrides_of_uplinks_and_of_all_copies() -> None:
    topology = read("""
boxes:
  - name: n
    count: 2
    ranks: 2
    inside: {bandwidth: 400 Mbit/s}
    uplink: {to: core, bandwidth: 50 Mbit/s, latency: 1ms, per: rank}
    overrides: [{rank: 1, uplink: {bandwidth: 25 Mbit/s}}]
switches: [core]
""")
    core = next(number for number, vertex in enumerate(topology.vertices) if vertex.label == "core")
    assert [topology.capacity[vertex, core] for vertex in topology.ranks] == [50, 25, 50, 25]
    assert {topology.latency_s[core, vertex] for vertex in topology.ranks} == {1e-3}


@pytest.mark.parametrize(
    ("rates", "unit", "capacities"),
    [
        (("400 Mbit/s", "50 Mbit/s"), "Mbit/s", [400, 50]),
        (("1 Gbit/s", "50 Mbit/s"), "Mbit/s", [1000, 50]),
        (("1000 Mbit/s", "2000 Mbps"), "Mbit/s", [1000, 2000]),
        (("2.5 Gb/s", "10 Gb/s"), "Mbit/s", [2500, 10000]),
        (("25 GB/s", "12.5 GB/s"), "MB/s", [25000, 12500]),
        (("25 GB/s", "100 Gbit/s"), "Gbit/s", [200, 100]),
        (("0.5 bit/s", "8 B/s"), None, ["0.5 bit/s", "0.0625 B/s"]),
    ],
)
def test_units_make_capacities_whole(rates: tuple[str, str], unit: str | None, capacities: list[object]) -> None:
    text = (
        f"ranks: 3\nlinks:\n- {{from: 0, to: 1, bandwidth: {rates[0]}}}\n- {{from: 1, to: 2, bandwidth: {rates[1]}}}"
    )
    if unit is None:
        message = complaint(text)
        assert message.startswith("clusters/mine.yaml:3: link 0 -> 1")
        assert "not a whole number" in message
        return
    topology = read(text)
    assert topology.unit == unit
    assert [topology.links[0].capacity, topology.links[2].capacity] == capacities


def test_declared_unit_takes_plain_numbers() -> None:
    topology = read("{unit: Mbit/s, ranks: 2, links: [{from: 0, to: 1, bandwidth: 1 Gbit/s}]}")
    assert (topology.unit, topology.capacity[0, 1]) == ("Mbit/s", 1000)
    topology = read("{unit: link, ranks: 2, links: [{from: 0, to: 1, bandwidth: 3}]}")
    assert (topology.unit, topology.capacity[0, 1]) == ("link", 3)


def test_names_are_read_as_written() -> None:
    topology = read(
        "ranks: [no, 007, 1e3, 'null', \"a b\"]\nswitches: [on]\nlinks:\n"
        + "\n".join(
            f"- {{from: {name}, to: on, bandwidth: 1 GB/s}}" for name in ("no", "007", "1e3", "'null'", "a b")
        )
    )
    assert [vertex.label for vertex in topology.vertices] == ["no", "007", "1e3", "null", "a b", "on"]


# -- what is wrong with it --------------------------------------------------------------------------------------

BOX = """\
boxes:
  - name: left
    ranks: 2
    inside: {bandwidth: 400 Mbit/s, latency: 50us}
    uplink: {to: core, bandwidth: 50 Mbit/s, latency: 50us, per: rank}
    overrides:
      - {rank: 1, uplink: {bandwidth: 25 Mbit/s}}
switches: [core]
links:
  - from: left/0
    to: left/1
    bandwidth: 10 Mbit/s
    one_way: false
"""


def test_the_text_that_is_broken_below_is_right() -> None:
    assert len(read(BOX).links) == 10


@pytest.mark.parametrize(
    ("old", "new", "line", "expected"),
    [
        ("to: left/1", "to: left/9", 11, ["no rank or switch is called 'left/9'", "did you mean 'left/"]),
        ("to: left/1", "to: x", 11, ["called 'x'", "there are left/0, left/1"]),
        ("to: left/1", "to:", 11, ["a link's to must be a text; got nothing"]),
        ("to: left/1", "to: [a]", 11, ["got a list"]),
        ("to: left/1", "to: left/0", 10, ["cannot end where it starts"]),
        ("to: left/1", "to: core", 10, ["duplicate link left/0 -> core", "already given on line 5"]),
        ("    to: left/1\n", "", 10, ["a link: 'to' is missing"]),
        ("bandwidth: 10 Mbit/s", "bandwith: 10 Mbit/s", 12, ["unknown key 'bandwith'", "did you mean 'bandwidth'"]),
        ("bandwidth: 10 Mbit/s", "bandwidth: 0 Mbit/s", 12, ["must be positive"]),
        ("bandwidth: 10 Mbit/s", "bandwidth: -5 Mbit/s", 12, ["'-5 Mbit/s' must be positive"]),
        ("bandwidth: 10 Mbit/s", "bandwidth: 10", 12, ["no unit", "'10 Mbit/s'"]),
        ("bandwidth: 10 Mbit/s", "bandwidth: true", 12, ["'true'", "bandwidth"]),
        ("bandwidth: 10 Mbit/s", "bandwidth: .inf", 12, ["'.inf'", "bandwidth"]),
        ("bandwidth: 10 Mbit/s", "bandwidth: " + "9" * 9999 + " B/s", 12, ["bandwidth"]),
        ("bandwidth: 10 Mbit/s", "bandwidth: 10 parsecs", 12, ["'10 parsecs'"]),
        ("one_way: false", "one_way: 1", 13, ["true or false", "'1'"]),
        ("one_way: false", "latency: .nan", 13, ["'.nan'", "time"]),
        ("one_way: false", "latency: -1us", 13, ["zero or more"]),
        ("one_way: false", "latency: 0.001", 13, ["'0.001'", "50us"]),
        ("one_way: false", "latency: 1e99999999s", 13, ["out of range"]),
        ("one_way: false", "latency: 1e999s", 13, ["out of range"]),
        ("one_way: false", "to: left/1", 13, ["'to' is already given on line 11"]),
        ("one_way: false", "[a]: b", 13, ["unknown key a list"]),
        ("ranks: 2", "ranks: true", 3, ["ranks must be a whole number", "truth value true"]),
        ("ranks: 2", "ranks: '2'", 3, ["whole number"]),
        ("ranks: 2", "ranks: 2.0", 3, ["whole number", "'2.0'"]),
        ("ranks: 2", "ranks: 0", 3, ["from 1 to 65536; got 0"]),
        ("ranks: 2", "ranks: 1000000000", 3, ["from 1 to 65536"]),
        ("ranks: 2", "ranks: 2\n    count: 60000", 4, ["60000 boxes of 2", "more than 65536"]),
        ("ranks: 2", "rank: 2", 3, ["unknown key 'rank'", "did you mean 'ranks'"]),
        ("name: left", "name: ''", 2, ["a box's name must be a text"]),
        ("name: left", "title: left", 2, ["unknown key 'title'"]),
        ("inside: {bandwidth: 400 Mbit/s,", "inside: {", 4, ["inside: 'bandwidth' is missing"]),
        ("inside: {bandwidth: 400 Mbit/s, latency: 50us}", "inside: 3", 4, ["inside must be a mapping", "'3'"]),
        ("to: core", "to: cor", 5, ["called 'cor'", "did you mean 'core'"]),
        ("per: rank", "per: host", 5, ["'rank' (one a rank) or 'box'", "'host'"]),
        (", per: rank", "", 5, ["uplink: 'per' is missing"]),
        ("per: rank", "per: box", 7, ["shared by the box"]),
        ("per: rank", "per: rank, ranks: [0, 2]", 5, ["rank must be from 0 to 1; got 2"]),
        ("per: rank", "per: rank, ranks: [0, 0]", 5, ["duplicate link left/0 -> core"]),
        ("rank: 1,", "rank: 2,", 7, ["rank must be from 0 to 1; got 2"]),
        ("rank: 1,", "", 7, ["override: 'rank' is missing"]),
        (
            "{bandwidth: 25 Mbit/s}}",
            "{bandwidth: 25 Mbit/s}}\n      - {rank: 1}",
            8,
            ["already overridden on line 7"],
        ),
        ("{bandwidth: 25 Mbit/s}", "{bandwdth: 25 Mbit/s}", 7, ["did you mean 'bandwidth'"]),
        ("switches: [core]", "switches: [core, core]", 8, ["two vertices are called 'core'", "on line 8"]),
        ("switches: [core]", "switches: [core, left/0]", 8, ["called 'left/0'", "on line 2"]),
        ("switches: [core]", "switches: core", 8, ["switches must be a list", "'core'"]),
        ("switches: [core]", "swiches: [core]", 8, ["unknown key 'swiches'", "did you mean 'switches'"]),
        ("switches: [core]", "switches: [core]\nunit: Mbits", 9, ["unknown unit 'Mbits'"]),
        ("switches: [core]", "switches: [core]\nunit: GB/s", 4, ["link left/0 -> left/switch", "0.05 GB/s"]),
        ("switches: [core]", "switches: [core]\nunit: link", 4, ["plain numbers"]),
        ("switches: [core]", "switches: [core]\nranks: [alone]", 9, ["disconnected: rank 2 (alone)"]),
        ("switches: [core]", "switches: [core]\nranks: -1", 9, ["from 1 to 65536; got -1"]),
        ("switches: [core]", "switches: [core]\nvertices: []", 9, ["'vertices' cannot stand beside 'boxes'"]),
        ("boxes:\n", "boxes: {}\nmore:\n", 2, ["unknown key 'more'"]),
        ("- name: left", "- left: name", 2, ["unknown key 'left'"]),
        ("ranks: 2", "ranks: [a, b]", 3, ["whole number", "a list"]),
    ],
)
def test_every_complaint_names_its_line(old: str, new: str, line: int, expected: list[str]) -> None:
    assert BOX.count(old) >= 1
    message = complaint(BOX.replace(old, new, 1))
    assert message.startswith(f"clusters/mine.yaml:{line}: "), message
    for part in expected:
        assert part in message


@pytest.mark.parametrize(
    ("text", "place", "expected"),
    [
        ("ranks: 2\nlinks: [", ":2:9: not YAML", "flow"),
        ("ranks:\n\t2", ":2:1: not YAML", "token"),
        ("ranks: 2\n---\nranks: 3", ":2:1: not YAML", "document"),
        ("ranks: 2\nname: \x07", ":2: not YAML", "special characters"),
        ("a: *b", ":1:4: not YAML", "alias"),
        ("# nothing but a comment", ": empty", ""),
        ("[" * 5_000, ": not a topology", "nested too deeply"),
        ("- a\n- b", ":1: a topology must be a mapping", "a list"),
        ("just words", ":1: a topology must be a mapping", "'just words'"),
        ("null", ":1: a topology must be a mapping", "nothing"),
        ("name: only", ":1: ", "0 rank(s)"),
        ("ranks: 1", ":1: ", "1 rank(s)"),
        ("\nboxes:\n  - {name: a, ranks: 1}", ":3: ", "1 rank(s)"),
        ("ranks:\n  - a\n  - b", ":3: ", "disconnected: rank 1 (b)"),
        ("ranks: [a,\n  b]\nlinks: [{from: b, to: a, bandwidth: 1 B/s, one_way: true}]", ":2: ", "rank 1 (b)"),
        ("boxes:\n  - name: a\n    ranks: 2\n    uplink: {to: s, bandwidth: 1 B/s, per: box}\nswitches: [s]", ":4: ",
         "'inside'"),
        ("boxes:\n  - {name: a, ranks: 2, overrides: [{rank: 0, inside: {}}]}", ":2: ", "no 'inside' to override"),
        ("vertices:\n  - {rank: a}\n  - {rank: b, switch: c}", ":3: ", "either"),
        ("vertices:\n  - {rank: a}\n  - {rank: a}", ":3: ", "line 2"),
        ("name: x\nname: y", ":2: ", "already given on line 1"),
    ],
)  # fmt: skip
def test_other_texts_that_are_no_topology(text: str, place: str, expected: str) -> None:
    message = complaint(text)
    assert message.startswith(f"clusters/mine.yaml{place}"), message
    assert expected in message
