"""A fabric with something changed: a faster link, a cable less, a cable more, other network interfaces.

Changes are written as people say them: ``A->B=400 Mbit/s`` is one direction, ``A<->B=400 Mbit/s`` both. Ends are
labels of vertices; ``*`` stands for any text in one, so that ``left/*<->core`` is every uplink of a node.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from fractions import Fraction

from mycel.errors import MycelError, UsageError
from mycel.names import nearest
from mycel.topology.capacities import fitting_unit, read_rate, unit_of
from mycel.topology.model import Link, Topology
from mycel.units import RATE_UNITS

__all__ = ["add_link", "change_link", "compute_in_switch", "remove_link", "scale_interfaces", "scale_link"]

_Rates = dict[tuple[int, int], Fraction]
_INTERFACE = re.compile(r"(nic|mlx|hca|eth|efa|ib)[\w:.-]*", re.IGNORECASE)
_FACTOR = re.compile(r"\d{1,6}(\.\d{1,6})?")


def change_link(topology: Topology, text: str) -> Topology:
    """The fabric with links of another bandwidth: ``A->B=400 Mbit/s``.

    Raises:
        UsageError: the text cannot be read, or there is no such link.
        TopologyError: the fabric could not work.

    Examples:
        >>> from mycel.topology.load import load_topology
        >>> slow = change_link(load_topology("star:ranks=3"), "0<->switch=100 Mbit/s")
        >>> sorted(slow.capacity.values())
        [100, 100, 400, 400, 400, 400]
    """
    pattern, rate, unit = _read(topology, text, "'A->B=400 Mbit/s'")
    return _replaced(topology, dict.fromkeys(_links(topology, pattern), rate), unit)


def compute_in_switch(topology: Topology, text: str) -> Topology:
    """The fabric with switches that copy and add: a label, or a pattern such as ``*/nvswitch``.

    Raises:
        UsageError: no switch is called so.

    Examples:
        >>> from mycel.topology.load import load_topology
        >>> compute_in_switch(load_topology("star:ranks=3"), "switch").compute_vertices
        (0, 1, 2, 3)
    """
    chosen = {v for v in _vertices(topology, text.strip()) if topology.vertices[v].kind == "switch"}
    if not chosen:
        raise UsageError(f"{topology.name}: {text!r} is no switch; every rank copies and adds")
    return topology.with_vertices(
        replace(vertex, computes=True) if number in chosen else vertex
        for number, vertex in enumerate(topology.vertices)
    )


def add_link(topology: Topology, text: str) -> Topology:
    """The fabric with a cable more: ``A<->B=400 Mbit/s``. Between ends that have one, their bandwidths add up.

    Raises:
        UsageError, TopologyError: as ``change_link``; an end that does not exist.
    """
    (src, arrow, dst), rate, unit = _read(topology, text, "'A<->B=400 Mbit/s'")
    pairs = [(a, b) for a in _vertices(topology, src) for b in _vertices(topology, dst) if a != b]
    if not pairs:
        raise UsageError(f"{text!r}: a link cannot end where it starts")
    ends = {*pairs, *((b, a) for a, b in pairs if arrow == "<->")}
    present = _rates(topology)
    return _replaced(topology, {pair: present.get(pair, Fraction(0)) + rate for pair in sorted(ends)}, unit)


def remove_link(topology: Topology, text: str) -> Topology:
    """The fabric without links: ``A->B``.

    Raises:
        UsageError, TopologyError: as ``change_link``; above all, ranks that can no longer reach each other.
    """
    gone = set(_links(topology, _ends(text, text, "'A->B'")))
    links = tuple(k for k in topology.links if (k.src, k.dst) not in gone)
    return replace(topology, links=links)


def scale_link(topology: Topology, text: str) -> Topology:
    """The fabric with links of so many times their bandwidth: ``A->B=2``.

    Raises:
        UsageError, TopologyError: as ``change_link``; the number is not positive.
    """
    ends, equals, factor_text = text.rpartition("=")
    if not equals:
        raise UsageError(f"cannot read {text!r}; write for example 'A->B=2'")
    factor = _factor(factor_text)
    rates = _rates(topology)
    chosen = _links(topology, _ends(ends, text, "'A->B=2'"))
    return _replaced(topology, {pair: rates[pair] * factor for pair in chosen}, topology.unit)


def scale_interfaces(topology: Topology, text: str) -> Topology:
    """The fabric with network interfaces of so many times their bandwidth.

    Those are the links that leave a node, and the links of switches in a node that are called after an interface
    (``nic0``, ``mlx5_1``, ``eth0``, ...).

    Raises:
        UsageError: no link leaves a node, or the number is not positive.
    """
    factor, rates = _factor(text), _rates(topology)
    nodes = [vertex.node for vertex in topology.vertices]
    cards = [
        v.kind == "switch" and v.node is not None and bool(_INTERFACE.fullmatch(v.label.rpartition("/")[2]))
        for v in topology.vertices
    ]
    chosen = [(a, b) for a, b in rates if nodes[a] != nodes[b] or cards[a] or cards[b]]
    if not chosen:
        raise UsageError(f"{topology.name}: no link leaves a node, so there are no network interfaces to scale")
    return _replaced(topology, {pair: rates[pair] * factor for pair in chosen}, topology.unit)


# -- reading ------------------------------------------------------------------------------------------------------


def _read(topology: Topology, text: str, example: str) -> tuple[tuple[str, str, str], Fraction, str]:
    """Ends, rate (bytes a second; of relative capacities, the capacity) and the unit it is written in."""
    ends, equals, rate_text = text.rpartition("=")
    if not equals:
        raise UsageError(f"cannot read {text!r}; write for example {example}")
    pattern, rate_text = _ends(ends, text, example), rate_text.strip()
    if rate_text.isdecimal() and len(rate_text) < 19:
        rate = int(rate_text) * RATE_UNITS.get(topology.unit, Fraction(1))
        unit = topology.unit
    elif topology.unit == "link":
        raise UsageError(f"{text!r}: capacities of {topology.name} are relative; write a whole number")
    else:
        try:
            rate, unit = read_rate(rate_text), unit_of(rate_text)
        except MycelError as error:
            raise UsageError(f"{text!r}: {error}") from None
    if rate <= 0:
        raise UsageError(f"{text!r}: the bandwidth must be positive; to take a link away, remove it")
    return pattern, rate, unit


def _ends(ends: str, text: str, example: str) -> tuple[str, str, str]:
    arrow = "<->" if "<->" in ends else "->"
    src, found, dst = (part.strip() for part in ends.partition(arrow))
    if not (src and found and dst):
        raise UsageError(f"cannot read {text!r}; write for example {example}")
    return src, arrow, dst


def _factor(text: str) -> Fraction:
    if not _FACTOR.fullmatch(text.strip()) or not Fraction(text.strip()):
        raise UsageError(f"cannot read {text!r} as a factor; write for example 2 or 1.5")
    return Fraction(text.strip())


def _vertices(topology: Topology, pattern: str) -> list[int]:
    labels = [vertex.label for vertex in topology.vertices]
    if pattern in labels:
        return [labels.index(pattern)]
    matches = _matcher(pattern)
    found = [number for number, label in enumerate(labels) if matches(label)]
    if not found:
        raise UsageError(f"{topology.name}: no vertex is called {pattern!r}{nearest(pattern, labels)}")
    return found


def _matcher(pattern: str) -> Callable[[str], object]:
    return re.compile(".*".join(map(re.escape, re.split(r"\*+", pattern)))).fullmatch


def _links(topology: Topology, pattern: tuple[str, str, str]) -> list[tuple[int, int]]:
    src, arrow, dst = pattern
    sources, targets = set(_vertices(topology, src)), set(_vertices(topology, dst))
    found = [
        (a, b)
        for a, b in topology.capacity
        if (a in sources and b in targets) or (arrow == "<->" and a in targets and b in sources)
    ]
    if not found:
        raise UsageError(f"{topology.name}: there is no link {src} {arrow} {dst}")
    return found


# -- building -----------------------------------------------------------------------------------------------------


def _rates(topology: Topology) -> _Rates:
    scale = RATE_UNITS.get(topology.unit, Fraction(1))
    return {ends: capacity * scale for ends, capacity in topology.capacity.items()}


def _replaced(topology: Topology, new: _Rates, written: str) -> Topology:
    """The fabric with these rates, in its own unit where all are whole in it."""
    rates = _rates(topology) | new
    unit = topology.unit
    if unit != "link":
        unit = fitting_unit(rates.values(), [topology.unit])
        unit = fitting_unit(rates.values(), [topology.unit, written]) if unit != topology.unit else unit
    scale = RATE_UNITS.get(unit, Fraction(1))
    _check_whole(topology, rates.items(), scale)
    known = {(link.src, link.dst): link for link in topology.links}
    links = tuple(
        replace(known.get((a, b)) or Link(src=a, dst=b, capacity=1), capacity=int(rate / scale))
        for (a, b), rate in rates.items()
    )
    return replace(topology, unit=unit, links=links)


def _check_whole(topology: Topology, rates: Iterable[tuple[tuple[int, int], Fraction]], scale: Fraction) -> None:
    for (a, b), rate in rates:
        if (rate / scale).denominator != 1:
            ends = f"{topology.label(a)} -> {topology.label(b)}"
            raise UsageError(f"{topology.name}: {ends}: {float(rate / scale)} is no whole capacity; choose another")
