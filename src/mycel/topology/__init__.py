"""What the cluster is: topologies, the files that describe them, and builders for the usual fabrics."""

from __future__ import annotations

from mycel.topology.builders import BUILDERS, build, hosts, loopback
from mycel.topology.device import Device
from mycel.topology.formats.description import Reading
from mycel.topology.formats.networkx_graph import from_networkx, to_networkx
from mycel.topology.json_format import from_json, to_json
from mycel.topology.load import load_topology, parse_topology, read_topology
from mycel.topology.model import Link, Topology, Vertex, VertexKind
from mycel.topology.yaml_format import to_yaml

__all__ = [
    "BUILDERS",
    "Device",
    "Link",
    "Reading",
    "Topology",
    "Vertex",
    "VertexKind",
    "build",
    "from_json",
    "from_networkx",
    "hosts",
    "load_topology",
    "loopback",
    "parse_topology",
    "read_topology",
    "to_json",
    "to_networkx",
    "to_yaml",
]
