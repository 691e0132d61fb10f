"""What the machines of a running job say of themselves: the topology by their tools, without measuring."""

from __future__ import annotations

from mycel.discover.cluster import cluster_of
from mycel.discover.facts import Interface, Node, read_node
from mycel.discover.job import discover

__all__ = ["Interface", "Node", "cluster_of", "discover", "read_node"]
