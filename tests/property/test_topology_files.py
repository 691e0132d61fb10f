"""Any topology survives its JSON and YAML forms unchanged, and no text makes a reader fail in another way."""

from __future__ import annotations

import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mycel.errors import TopologyError
from mycel.topology import Link, Topology, Vertex, from_json, parse_topology, to_json, to_yaml
from mycel.units import RATE_UNITS

LABELS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
LATENCIES = st.one_of(st.just(0.0), st.floats(0, 1e308, allow_nan=False), st.floats(1e-9, 1e-3))

#: No judgement of speed: the machine may be busy.
QUIET = settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Strongly connected fabrics with switches, odd names, boxes, one-way links and odd latencies."""
    labels = draw(st.lists(LABELS, min_size=2, max_size=7, unique=True))
    others = st.lists(st.sampled_from(["rank", "switch"]), min_size=len(labels) - 2, max_size=len(labels) - 2)
    kinds = draw(st.permutations(["rank", "rank", *draw(others)]))
    boxes = [draw(st.one_of(st.none(), LABELS)) for _ in labels]
    vertices = tuple(
        Vertex(kind=kind, label=label, node=box) for kind, label, box in zip(kinds, labels, boxes, strict=True)
    )
    count = len(labels)
    circle = draw(st.permutations(range(count)))
    pairs = {(a, b) for a, b in zip(circle, [*circle[1:], circle[0]], strict=True)}
    pairs |= draw(st.sets(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=8))
    ordered = draw(st.permutations(sorted((a, b) for a, b in pairs if a != b)))
    some_latency = draw(LATENCIES)
    links = tuple(
        Link(
            src=a,
            dst=b,
            capacity=draw(st.one_of(st.integers(1, 3), st.integers(1, 10**15))),
            latency_s=draw(st.one_of(st.just(some_latency), LATENCIES)),
        )
        for a, b in ordered
    )
    unit = draw(st.sampled_from(["link", *RATE_UNITS]))
    return Topology(name=draw(LABELS), unit=unit, vertices=vertices, links=links)


@given(topologies())
@QUIET
def test_json_round_trip(topology: Topology) -> None:
    again = from_json(json.loads(json.dumps(to_json(topology))))
    assert again == topology
    assert again.fingerprint == topology.fingerprint


@given(topologies())
@QUIET
def test_yaml_round_trip(topology: Topology) -> None:
    again = parse_topology(to_yaml(topology), source="any.yaml")
    assert again == topology
    assert again.fingerprint == topology.fingerprint


JSON_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 9), st.floats(), st.sampled_from(["gpu", "switch", "0", ""])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(["nodes", "links", "id", "type", "src", "dst", "capacity", "latency", "name", "unit"]),
            inner,
            max_size=5,
        ),
    ),
    max_leaves=20,
)


@given(JSON_VALUES)
@QUIET
def test_any_json_is_a_topology_or_a_clear_error(data: object) -> None:
    try:
        topology = parse_topology(json.dumps(data), source="any.json")
    except TopologyError as error:
        assert str(error).startswith("any.json")
        assert "\n" not in str(error)
    else:
        assert topology.num_ranks >= 2


WORDS = ["boxes", "ranks", "switches", "links", "name", "from", "to", "bandwidth", "inside", "uplink", "per", "rank"]
MARKS = [": ", "- ", "\n", "\n  ", "\n    ", "{", "}", "[", "]", ", ", "*", "&", "'", "!"]
YAML_PIECES = [*WORDS, *MARKS, "2", "1 GB/s", "a"]


@given(st.lists(st.sampled_from(YAML_PIECES), max_size=25).map("".join))
@QUIET
def test_any_text_is_a_topology_or_a_clear_error(text: str) -> None:
    try:
        topology = parse_topology(text, source="any.yaml")
    except TopologyError as error:
        assert str(error).startswith("any.yaml:")
        assert "\n" not in str(error)
    else:
        assert topology.num_ranks >= 2
