"""Putting a fabric together by names, with bandwidths as people write them."""

from __future__ import annotations

from fractions import Fraction

from mycel.errors import MycelError, TopologyError
from mycel.topology.capacities import fitting_unit, read_rate, read_seconds, unit_of
from mycel.topology.limits import MAX_LINKS, MAX_VERTICES
from mycel.topology.model import Link, Topology, Vertex, VertexKind
from mycel.units import RATE_UNITS

__all__ = ["Assembly", "Bandwidth", "Latency", "positive"]

#: A rate such as ``"400 Mbit/s"``, or a positive integer: a relative capacity (unit ``link``).
Bandwidth = int | str
#: Seconds, or text such as ``"50us"``.
Latency = float | str


class Assembly:
    """A fabric in the making. Ranks are numbered in the order in which they are added; switches come after them.

    Args:
        name: of the topology.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._vertices: dict[str, Vertex] = {}
        self._rates: dict[tuple[str, str], Fraction] = {}
        self._latency_s: dict[tuple[str, str], float] = {}
        self._units: set[str] = set()

    def rank(self, label: str, node: str | None = None) -> str:
        """Add a rank; returns its label."""
        return self._add("rank", label, node)

    def switch(self, label: str, node: str | None = None, *, computes: bool = False) -> str:
        """Add a switch, on request one that can copy and add; returns its label."""
        return self._add("switch", label, node, computes=computes)

    def _add(self, kind: VertexKind, label: str, node: str | None, *, computes: bool = False) -> str:
        if len(self._vertices) >= MAX_VERTICES:
            raise TopologyError(f"{self._name}: more than {MAX_VERTICES} ranks and switches")
        if label in self._vertices:
            raise TopologyError(f"{self._name}: two vertices are called {label!r}")
        self._vertices[label] = Vertex(kind=kind, label=label, node=node, computes=computes)
        return label

    def connect(self, a: str, b: str, bandwidth: Bandwidth, latency: Latency = 0.0) -> None:
        """Add a cable, both ways. A second one between the same two adds its bandwidth to the first's.

        Raises:
            TopologyError: the bandwidth or latency cannot be read, or relative capacities meet rates.
        """
        rate, unit = self._rate(bandwidth)
        self._units.add(unit)
        if "link" in self._units and len(self._units) > 1:
            raise TopologyError(
                f"{self._name}: bandwidth {bandwidth!r}: either all are rates, or all are plain numbers"
            )
        latency_s = self._seconds(latency)
        for ends in ((a, b), (b, a)):
            self._rates[ends] = self._rates.get(ends, Fraction(0)) + rate
            self._latency_s[ends] = max(self._latency_s.get(ends, 0.0), latency_s)
        if len(self._rates) > MAX_LINKS:
            raise TopologyError(f"{self._name}: more than {MAX_LINKS} links")

    def _rate(self, bandwidth: Bandwidth) -> tuple[Fraction, str]:
        if isinstance(bandwidth, str):
            if bandwidth.strip().isdecimal() and len(bandwidth) < 20:
                bandwidth = int(bandwidth)
            else:
                try:
                    return read_rate(bandwidth), unit_of(bandwidth)
                except MycelError as error:
                    raise TopologyError(f"{self._name}: {error}") from None
        if isinstance(bandwidth, bool) or not isinstance(bandwidth, int) or bandwidth <= 0:
            raise TopologyError(
                f"{self._name}: bandwidth {bandwidth!r} must be a positive integer or a text such as '400 Mbit/s'"
            )
        return Fraction(bandwidth), "link"

    def _seconds(self, latency: Latency) -> float:
        try:
            latency_s = read_seconds(latency) if isinstance(latency, str) else float(latency)
        except (MycelError, TypeError, ValueError) as error:
            raise TopologyError(f"{self._name}: {error}") from None
        if not 0 <= latency_s < float("inf"):
            raise TopologyError(f"{self._name}: latency {latency!r} must be zero or more seconds")
        return latency_s

    def topology(self) -> Topology:
        """The finished fabric, in the largest unit in which every capacity is whole.

        Raises:
            TopologyError: it cannot work, for example because it has one rank only.
        """
        unit = "link" if "link" in self._units else fitting_unit(self._rates.values(), self._units)
        scale = RATE_UNITS.get(unit, Fraction(1))
        vertices = [v for kind in ("rank", "switch") for v in self._vertices.values() if v.kind == kind]
        index = {vertex.label: number for number, vertex in enumerate(vertices)}
        links = []
        for ends, rate in self._rates.items():
            capacity = rate / scale
            if capacity.denominator != 1:
                raise TopologyError(f"{self._name}: link {ends[0]} -> {ends[1]}: {capacity} {unit} is not whole")
            latency_s = self._latency_s[ends]
            links.append(Link(src=index[ends[0]], dst=index[ends[1]], capacity=int(capacity), latency_s=latency_s))
        return Topology(name=self._name, unit=unit, vertices=tuple(vertices), links=tuple(links))


def positive(value: int, what: str, least: int = 1) -> int:
    """``value``, when it is a whole number from ``least`` to ``MAX_VERTICES``.

    Raises:
        TopologyError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise TopologyError(f"{what} must be a whole number of at least {least}, got {value!r}")
    if value > MAX_VERTICES:
        raise TopologyError(f"{what} must be at most {MAX_VERTICES}, got {value}")
    return value
