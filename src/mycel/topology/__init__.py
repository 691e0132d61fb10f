"""What the cluster is: topologies, the files that describe them, and builders for the usual fabrics."""

from __future__ import annotations

from mycel.topology.json_format import from_json, to_json
from mycel.topology.load import load_topology, parse_topology
from mycel.topology.model import Link, Topology, Vertex, VertexKind

__all__ = [
    "Link",
    "Topology",
    "Vertex",
    "VertexKind",
    "from_json",
    "load_topology",
    "parse_topology",
    "to_json",
]
