"""Which reader a file goes to, and files that cannot be read at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mycel.errors import TopologyError
from mycel.topology import load_topology, parse_topology, to_json, to_yaml
from mycel.topology.builders import BUILDERS, build, star, two_boxes

STAR = star(num_ranks=3)


@pytest.mark.parametrize("name", ["s.json", "s.JSON", "s", "s.txt"])
def test_json_by_ending_or_content(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(to_json(STAR)), encoding="utf-8")
    assert load_topology(path) == STAR


@pytest.mark.parametrize("name", ["s.yaml", "s.yml", "s", "s.conf"])
def test_yaml_by_ending_or_content(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("\ufeff" + to_yaml(STAR), encoding="utf-8")
    assert load_topology(path) == STAR


def test_json_is_yaml_too_but_not_this_form() -> None:
    with pytest.raises(TopologyError, match=r"^s\.yaml:1: a topology: unknown key 'nodes'"):
        parse_topology(json.dumps(to_json(STAR)), source="s.yaml")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=r"nowhere\.json: no such file"):
        load_topology(tmp_path / "nowhere.json")
    with pytest.raises(TopologyError, match="is a directory"):
        load_topology(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"ranks: \xff\xfe")
    with pytest.raises(TopologyError, match=r"binary\.yaml: not a text file: byte 7"):
        load_topology(binary)
    with pytest.raises(TopologyError, match="cannot be read"):
        load_topology("a\0b")
    with pytest.raises(TopologyError, match="cannot be read"):
        load_topology(binary / "below.yaml")


def test_builder_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_topology("star:ranks=3") == STAR
    assert load_topology("star:num_ranks=3, bandwidth=400 Mbps") == STAR
    assert load_topology("two_boxes") == two_boxes()
    assert load_topology("two_boxes:shared_uplink=yes,between=200 Mbit/s") == two_boxes(
        shared_uplink=True, between="200 Mbit/s"
    )
    monkeypatch.chdir(tmp_path)
    Path("star").write_text(to_yaml(two_boxes()), encoding="utf-8")
    assert load_topology("star") == two_boxes()  # a file of that name wins


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("two_node:ranks=8", "did you mean 'two_boxes'"),
        ("star:rank=3", "did you mean 'ranks'"),
        ("star:ranks", "write key=value"),
        ("star:ranks=3,num_ranks=4", "given twice"),
        ("star:ranks=many", "ranks='many' is not a whole number"),
        ("star:ranks=1", "at least 2, got 1"),
        ("star:ranks=-2", "at least 2, got -2"),
        ("star:ranks=999999999", "at most 65536, got 999999999"),
        ("star:bandwidth=fast", "cannot read 'fast' as a bandwidth"),
        ("star:bandwidth=0", "positive"),
        ("star:latency=soon", "cannot read 'soon' as a time"),
        ("star:latency=1e99999999s", "out of range"),
        ("star:latency=1e999s", "out of range"),
        ("loopback", "'ranks' is missing"),
        ("torus:dims=2by4", "dims='2by4'"),
        ("torus:dims=1", "1 rank"),
        ("torus:dims=0x4", "at least 1, got 0"),
        ("torus:dims=9999x9999", "99980001 rank"),
        ("ring:ranks=999999999", "at most 65536"),
        ("hypercube:dim=40", "2**40"),
        ("full_mesh:ranks=9999", "more than 1048576 links"),
        ("fat_tree:k=3", "even"),
        ("dragonfly:groups=1,routers=1,ranks_per_router=1", "1 rank"),
        ("two_boxes:shared_uplink=perhaps", "neither true nor false"),
        ("two_boxes:inside=3,between=2 Gb/s", "plain numbers"),
    ],
)
def test_builder_specs_that_make_no_sense(spec: str, expected: str) -> None:
    with pytest.raises(TopologyError) as raised:
        load_topology(spec)
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)


def test_every_builder_has_a_spec() -> None:
    for name in BUILDERS:
        topology = build("loopback:ranks=2" if name == "loopback" else name)
        assert topology.num_ranks >= 2
    with pytest.raises(TopologyError, match="no builder is called 'tree'"):
        build("tree")
