"""JSON form: the suite of fabrics, and every way a file can be wrong."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mycel.errors import TopologyError
from mycel.topology import from_json, load_topology, parse_topology, to_json

SUITE = Path(__file__).parents[1] / "data" / "topologies"
FABRICS = sorted(path for path in SUITE.glob("*.json") if path.stem != "expected")


def star() -> dict[str, Any]:
    """Three ranks on a switch, as decoded JSON; tests break it in one place."""
    nodes = [{"id": i, "type": "gpu", "label": f"r{i}"} for i in range(3)] + [
        {"id": 3, "type": "switch", "label": "sw"}
    ]
    links = [{"src": a, "dst": b, "capacity": 10} for i in range(3) for a, b in ((i, 3), (3, i))]
    return {"name": "star", "unit": "Gb/s", "nodes": nodes, "links": links}


def test_the_suite_is_complete() -> None:
    assert len(FABRICS) == 19
    assert {path.stem for path in FABRICS} == set(json.loads((SUITE / "expected.json").read_text()))


@pytest.mark.parametrize("path", FABRICS, ids=lambda path: path.stem)
def test_suite_says_what_its_files_say(path: Path) -> None:
    raw, topology = json.loads(path.read_text()), load_topology(path)
    assert (topology.name, topology.unit) == (path.stem, raw["unit"])
    assert (topology.num_ranks, len(topology.switches)) == (raw["gpus"], raw["switches"])
    assert topology.capacity == {(item["src"], item["dst"]): item["capacity"] for item in raw["links"]}
    assert [vertex.label for vertex in topology.vertices] == [node["label"] for node in raw["nodes"]]
    into, out = Counter[int](), Counter[int]()
    for link in topology.links:
        into[link.dst] += link.capacity
        out[link.src] += link.capacity
    assert (into == out) == raw["eulerian"]
    assert from_json(json.loads(json.dumps(to_json(topology)))) == topology


def test_ids_in_any_order_latencies_and_boxes() -> None:
    data = star()
    data["nodes"].reverse()
    data["nodes"][0]["box"] = "rack"
    data["links"][0] |= {"latency": 5e-05, "capacity": 10.0}
    topology = from_json(data)
    assert [vertex.label for vertex in topology.vertices] == ["r0", "r1", "r2", "sw"]
    assert topology.vertices[3].node == "rack"
    assert topology.latency_s[0, 3] == 5e-05
    assert topology.capacity[0, 3] == 10


@pytest.mark.parametrize(
    ("place", "value", "expected"),
    [
        (("links", 4, "dst"), 9, ["link 4", "2 -> 9", "no vertex 9", "0..3"]),
        (("links", 4, "dst"), -1, ["link 4", "no vertex -1"]),
        (("links", 4, "dst"), 2, ["link 4", "r2 -> r2", "cannot end where it starts"]),
        (("links", 4, "src"), True, ["link 4", "src must be a whole number", "truth value true"]),
        (("links", 4, "src"), "2", ["link 4", "src must be a whole number", "'2'"]),
        (("links", 4), 7, ["link 4", "expected an object", "7"]),
        (("links", 0, "capacity"), 0, ["link 0", "r0 -> sw", "capacity 0", "positive"]),
        (("links", 1, "capacity"), -3, ["link 1", "sw -> r0", "capacity -3"]),
        (("links", 1, "capacity"), 2.5, ["link 1", "sw -> r0", "2.5", "smaller unit"]),
        (("links", 1, "capacity"), None, ["link 1", "capacity", "null"]),
        (("links", 1, "capacity"), True, ["link 1", "capacity", "truth value"]),
        (("links", 1, "capcity"), 3, ["link 1", "unknown key 'capcity'", "did you mean 'capacity'"]),
        (("links", 1, "latency"), -1e-6, ["link 1", "latency -1e-06"]),
        (("links", 1, "latency"), "5us", ["link 1", "latency", "seconds", "'5us'"]),
        (("links", 1, "latency"), False, ["link 1", "latency", "truth value false"]),
        (("links", 1, "latency"), 10**400, ["link 1", "latency", "401 digits"]),
        (("links", 2), {"src": 0, "dst": 3, "capacity": 1}, ["link 2", "r0 -> sw", "duplicate"]),
        (("links", 2), {"src": 0, "dst": 3}, ["link 2", "'capacity' is missing"]),
        (("links",), {}, ["'links' must be a list", "an object"]),
        (("links",), [], ["disconnected", "rank 1 (r1)"]),
        (("nodes",), [], ["0 rank(s)", "at least 2"]),
        (("nodes", 1, "id"), 0, ["node 1", "second node with id 0"]),
        (("nodes", 1, "id"), 17, ["node 1", "id 17", "0..3"]),
        (("nodes", 1, "type"), "cpu", ["node 1", "'cpu'", "'switch'"]),
        (("nodes", 1, "type"), ["gpu"], ["node 1", "type"]),
        (("nodes", 1, "label"), "r0", ["two vertices are called 'r0'"]),
        (("nodes", 1, "label"), 4, ["node 1", "label must be a text"]),
        (("nodes", 1, "box"), 4, ["node 1", "box must be a text"]),
        (("nodes", 1, "lable"), "x", ["node 1", "unknown key 'lable'", "'label'"]),
        (("nodes", 1), None, ["node 1", "expected an object", "null"]),
        (("unit",), "GiB/s", ["unknown unit 'GiB/s'", "GB/s"]),
        (("unit",), 3, ["unit must be a text"]),
        (("name",), None, ["name must be a text", "null"]),
    ],
)
def test_wrong_values_are_named_with_their_place(place: tuple[Any, ...], value: object, expected: list[str]) -> None:
    data = star()
    target: Any = data
    for step in place[:-1]:
        target = target[step]
    target[place[-1]] = value
    with pytest.raises(TopologyError) as raised:
        parse_topology(json.dumps(data), source="fabrics/star.json")
    message = str(raised.value)
    assert message.startswith("fabrics/star.json: ")
    assert "\n" not in message
    for part in expected:
        assert part in message


def test_one_rank_only() -> None:
    data = star()
    for node in data["nodes"][1:]:
        node["type"] = "switch"
    with pytest.raises(TopologyError, match=r"^s\.json: star: 1 rank\(s\)"):
        parse_topology(json.dumps(data), source="s.json")


def test_disconnected_names_the_rank_and_the_direction() -> None:
    data = star()
    data["links"] = [link for link in data["links"] if (link["src"], link["dst"]) != (2, 3)]
    with pytest.raises(TopologyError, match=r"disconnected: rank 2 \(r2\) cannot reach rank 0 \(r0\)"):
        from_json(data)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ["empty"]),
        (" \n\t\n", ["empty"]),
        ('{"nodes": [],\n "links": [}', [":2:12: not JSON"]),
        ('{"nodes": [NaN], "links": []}', ["not JSON", "NaN"]),
        ('{"nodes": [], "nodes": [], "links": []}', ["key 'nodes' twice"]),
        ("[" * 100_000, ["nested too deeply"]),
        ("1" * 5_000, ["not JSON"]),
        ("[1, 2]", ["expected a JSON object", "a list"]),
        ("3", ["expected a JSON object"]),
        ('{"links": []}', ["'nodes' is missing"]),
        ('{"nodes": [], "links": [], "units": "GB/s"}', ["'unit' is missing", "'units'"]),
        ('{"node": [], "links": []}', ["'nodes' is missing", "'node'"]),
    ],
)
def test_texts_that_are_no_topology(text: str, expected: list[str]) -> None:
    with pytest.raises(TopologyError) as raised:
        parse_topology(text, source="bad.json")
    message = str(raised.value)
    assert message.startswith("bad.json")
    assert "\n" not in message
    for part in expected:
        assert part in message


def test_name_defaults_to_the_file(tmp_path: Path) -> None:
    data = star()
    del data["name"], data["unit"]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    assert (load_topology(path).name, load_topology(str(path)).unit) == ("mine", "link")
