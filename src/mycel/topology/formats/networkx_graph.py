"""To and from networkx graphs, for people who already have their fabric as one.

networkx is imported when ``to_networkx`` is called, not before; ``from_networkx`` does not need the package itself.

Attributes of a node: ``kind`` (``"rank"``, the default, or ``"switch"``), ``label`` (default: the node as text),
``box``, ``computes`` (of a switch: true where it can copy and add). Of an edge: ``capacity`` (a positive integer, or
a rate such as ``"25 GB/s"``; default 1) and ``latency_s``. Of the graph: ``name``, and ``unit`` for integer
capacities (default ``"link"``). Edges of an undirected graph are cables that carry their capacity each way; parallel
edges of a multigraph add up.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from fractions import Fraction
from typing import Any

from mycel.errors import MycelError, TopologyError
from mycel.topology.capacities import fitting_unit, read_rate, unit_of
from mycel.topology.model import Link, Topology, Vertex
from mycel.units import RATE_UNITS

__all__ = ["from_networkx", "to_networkx"]


def from_networkx(graph: Any) -> Topology:  # Any: networkx has no types, and need not be installed
    """The topology that a networkx graph describes; vertices and ranks are in the order of its nodes.

    Args:
        graph: a ``Graph``, ``DiGraph`` or either's multigraph.

    Raises:
        TopologyError: an attribute makes no sense, rates are mixed with plain numbers, or the fabric cannot work.

    Examples:
        >>> import networkx as nx
        >>> from_networkx(nx.cycle_graph(4)).capacity[0, 3]
        1
    """
    if not all(hasattr(graph, name) for name in ("nodes", "edges", "is_directed", "graph")):
        raise TopologyError(f"expected a networkx graph, got {type(graph).__name__}")
    name = str(graph.graph.get("name") or "graph")
    index: dict[Hashable, int] = {}
    vertices: list[Vertex] = []
    for node, data in graph.nodes(data=True):
        kind, box = data.get("kind", "rank"), data.get("box")
        if kind not in ("rank", "switch"):
            raise TopologyError(f"{name}: node {node!r}: kind {kind!r} is neither 'rank' nor 'switch'")
        index[node] = len(vertices)
        computes = data.get("computes", False)
        if not isinstance(computes, bool):
            raise TopologyError(f"{name}: node {node!r}: computes {computes!r} is neither True nor False")
        label = str(data.get("label", node))
        vertices.append(Vertex(kind=kind, label=label, node=None if box is None else str(box), computes=computes))
    rates: dict[tuple[int, int], Fraction] = {}
    latencies: dict[tuple[int, int], float] = {}
    units: set[str] = set()
    declared = graph.graph.get("unit", "link")
    for src, dst, data in graph.edges(data=True):
        where = f"{name}: edge {src!r} - {dst!r}"
        rate, unit = _rate(data.get("capacity", 1), declared, where)
        latency_s = data.get("latency_s", 0.0)
        real = isinstance(latency_s, int | float) and not isinstance(latency_s, bool)
        if not real or not math.isfinite(latency_s) or latency_s < 0:
            raise TopologyError(f"{where}: latency_s {latency_s!r} must be zero or more seconds")
        units.add(unit)
        a, b = index[src], index[dst]
        for ends in ((a, b),) if graph.is_directed() else ((a, b), (b, a)):
            rates[ends] = rates.get(ends, Fraction(0)) + rate
            latencies[ends] = max(latencies.get(ends, 0.0), float(latency_s))
    if "link" in units and len(units) > 1:
        raise TopologyError(f"{name}: some capacities are rates and some plain numbers; say 'unit' for the graph")
    plain = units <= {declared}
    unit = declared if plain else fitting_unit(rates.values(), units)
    scale = Fraction(1) if unit == "link" else RATE_UNITS[unit]
    links = []
    for (a, b), rate in rates.items():
        capacity = rate / scale
        if capacity.denominator != 1:
            ends_text = f"{vertices[a].label} -> {vertices[b].label}"
            raise TopologyError(f"{name}: edge {ends_text}: {float(capacity)} {unit} is not whole")
        links.append(Link(src=a, dst=b, capacity=int(capacity), latency_s=latencies[a, b]))
    return Topology(name=name, unit=unit, vertices=tuple(vertices), links=tuple(links))


def to_networkx(topology: Topology) -> Any:  # Any: networkx has no types
    """A ``networkx.DiGraph`` whose nodes are vertex numbers; ``from_networkx`` reads it back;
    only the order of links may change.

    Raises:
        ImportError: networkx is not installed.

    Examples:
        >>> from mycel.topology import load_topology
        >>> sorted(to_networkx(load_topology("ring:ranks=3,bandwidth=1")).edges)
        [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    """
    import networkx as nx

    graph = nx.DiGraph(name=topology.name, unit=topology.unit)
    for number, vertex in enumerate(topology.vertices):
        graph.add_node(number, kind=vertex.kind, label=vertex.label, box=vertex.node)
        if vertex.computes:
            graph.nodes[number]["computes"] = True
    for link in topology.links:
        graph.add_edge(link.src, link.dst, capacity=link.capacity, latency_s=link.latency_s)
    return graph


def _rate(capacity: object, declared: object, where: str) -> tuple[Fraction, str]:
    if not isinstance(declared, str) or (declared != "link" and declared not in RATE_UNITS):
        raise TopologyError(f"{where}: the graph's unit {declared!r} is unknown")
    if isinstance(capacity, str):
        try:
            return read_rate(capacity), unit_of(capacity)
        except MycelError as error:
            raise TopologyError(f"{where}: {error}") from None
    if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity <= 0:
        raise TopologyError(f"{where}: capacity {capacity!r} must be a positive integer or a text such as '25 GB/s'")
    return Fraction(capacity) * RATE_UNITS.get(declared, Fraction(1)), declared
