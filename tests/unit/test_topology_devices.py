"""Devices of ranks in topologies and their files."""

from __future__ import annotations

import json

import pytest

from mycel.errors import TopologyError, UsageError
from mycel.planning.machines import known_machines, load_machine
from mycel.topology import Topology, Vertex, from_json, parse_topology, to_json, to_yaml
from mycel.topology.builders import star
from mycel.topology.device import DEVICES, Device, device_called, device_from_json
from mycel.topology.json_format import parse_json
from mycel.topology.yaml_format import parse_yaml

FILE = """
device: A100
boxes:
  - {name: left, ranks: 2, inside: {bandwidth: 1 GB/s}, uplink: {to: core, bandwidth: 1 Gbit/s, per: box}}
  - {name: right, ranks: 2, device: {name: odd one, flops: 5e12, memory: 10GiB, memory_gbps: 300.5, source: "me: 1"},
     inside: {bandwidth: 1 GB/s}, uplink: {to: core, bandwidth: 1 Gbit/s, per: box}}
switches: [core]
devices: {right/1: T4}
"""


def fabric() -> Topology:
    """Four ranks of three kinds."""
    return parse_yaml(FILE, source="some.yaml")


def test_what_stands_nearest_counts() -> None:
    """By rank before by box before for all."""
    assert [device.name for device in fabric().devices if device] == [
        "A100 SXM 80GB", "A100 SXM 80GB", "odd one", "T4",
    ]  # fmt: skip


def test_forms_round_trip() -> None:
    """YAML and JSON give an equal topology with the same hash and fingerprint."""
    topology = fabric()
    for again in (parse_yaml(to_yaml(topology), source="x.yaml"), from_json(to_json(topology))):
        assert again == topology and hash(again) == hash(topology) and again.fingerprint == topology.fingerprint
    assert parse_json(json.dumps(to_json(topology)), source="x.json") == topology
    alike = topology.with_devices([device_called("h100")] * 4)
    assert "device: H100\n" in to_yaml(alike)
    assert parse_yaml(to_yaml(alike), source="x.yaml") == alike


def test_files_without_devices_are_as_they_were() -> None:
    """No device in text, hash or fingerprint."""
    plain = star(num_ranks=3)
    assert plain.devices == (None, None, None)
    assert "device" not in to_yaml(plain) and "device" not in json.dumps(to_json(plain))
    assert plain.with_devices([device_called("T4")] * 3).fingerprint != plain.fingerprint
    assert plain.with_devices([None] * 3) == plain


def test_parts_keep_their_devices() -> None:
    """Sub-groups and other orders; a rank that only forwards computes nothing."""
    topology = fabric()
    assert topology.subset([1, 3]).devices == (topology.devices[1], topology.devices[3])
    assert topology.reordered([3, 2, 1, 0]).devices == topology.devices[::-1]
    assert all(vertex.device is None for vertex in topology.subset([0, 1]).vertices if vertex.kind == "switch")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("device: H1000", r"pair.yaml:1: device: no device called 'H1000' is known \(did you mean 'H100'"),
        ("devices: {9: T4}", r"devices: unknown key '9'"),
        ("device: {name: a, flops: x, memory: 1GiB, memory_gbps: 1}", r"flops must be a number, such as 60e12"),
        ("device: {name: a, flops: nan, memory: 1GiB, memory_gbps: 1}", r"must be a number above 0"),
        ("device: {name: a}", r"'flops' is missing"),
        ("device: {name: a, flops: 1, memory: lots, memory_gbps: 1}", r"cannot read 'lots' as a size"),
        ("device: [T4]", r"device"),
    ],
)
def test_devices_that_cannot_be_read(text: str, message: str) -> None:
    """File, line and what would do."""
    with pytest.raises(TopologyError, match=message) as error:
        parse_topology(f"{{ranks: 2, links: [{{from: 0, to: 1, bandwidth: 10 Gb/s}}], {text}}}", source="pair.yaml")
    assert str(error.value).startswith("pair.yaml:1") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "data",
    [3, "B2000", {"name": "a"}, {"name": "a", "flops": "1", "memory_bytes": 1, "memory_gbps": 1}, {"speed": 1}],
)
def test_devices_of_json_that_cannot_be_read(data: object) -> None:
    """An error line that says where."""
    with pytest.raises(UsageError, match=r"^there: "):
        device_from_json(data, where="there")


def test_only_ranks_compute() -> None:
    """A switch with a device is refused."""
    pair = star(num_ranks=2)
    with pytest.raises(TopologyError, match="only ranks compute"):
        pair.with_vertices([*pair.vertices[:2], Vertex(kind="switch", label="switch", device=device_called("T4"))])
    with pytest.raises(TopologyError, match="give one for each"):
        pair.with_devices([None])


def test_the_table_is_that_of_the_machines() -> None:
    """A device in the table has the numbers of the machine's file of that name."""
    own = {name.lower(): device for name, device in DEVICES.items()}
    shared = [name for name in known_machines() if name in own]
    assert set(shared) >= {"a100", "h100", "h200", "mi250x"}
    for name in shared:
        device: Device = load_machine(name).device
        for field in ("name", "flops", "memory_bytes", "memory_gbps", "float8_flops"):
            assert getattr(own[name], field) == getattr(device, field), (name, field)
