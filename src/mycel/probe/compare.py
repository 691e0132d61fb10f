"""A fabric beside another one: the same cables? and if so, how far apart are their capacities?"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from fractions import Fraction

from mycel.errors import UsageError
from mycel.topology.model import Topology

__all__ = ["Difference", "compare", "match"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One link, as expected and as found.

    Attributes:
        src, dst: labels of its ends, as expected.
        expected: capacity in the unit of the expected fabric.
        found: capacity in the same unit.
    """

    src: str
    dst: str
    expected: float
    found: float

    @property
    def ratio(self) -> float:
        """Found over expected."""
        return self.found / self.expected


def match(found: Topology, expected: Topology) -> dict[int, int] | None:
    """Vertex of ``found`` for each vertex of ``expected`` such that both have the same links.

    Ranks go to ranks of the same number, switches to those with the same surroundings, whatever they are called.

    Returns:
        ``None`` where the fabrics differ by more than names and capacities.
    """
    if found.num_ranks != expected.num_ranks or len(found.vertices) != len(expected.vertices):
        return None
    colours, wanted = _colours(found), _colours(expected)
    if sorted(colours) != sorted(wanted):
        return None
    places: dict[str, list[int]] = {}
    for vertex, colour in enumerate(colours):
        places.setdefault(colour, []).append(vertex)
    mapping = {vertex: places[colour].pop(0) for vertex, colour in enumerate(wanted)}
    same = {(mapping[link.src], mapping[link.dst]) for link in expected.links} == set(found.capacity)
    return mapping if same else None


def _colours(topology: Topology) -> list[str]:
    """A name for each vertex that says which ranks are how far away by which ways (colour refinement)."""
    colours = [
        f"rank {topology.rank_of[v]}" if vertex.kind == "rank" else "switch"
        for v, vertex in enumerate(topology.vertices)
    ]
    # Short names for long ones, the same ones for the same surroundings in any topology.
    for _ in topology.vertices:
        refined = []
        for v, colour in enumerate(colours):
            after = sorted(colours[link.dst] for link in topology.links if link.src == v)
            before = sorted(colours[link.src] for link in topology.links if link.dst == v)
            refined.append(_short(f"{colour}|{after}|{before}"))
        colours = refined
    return colours


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def compare(found: Topology, expected: Topology) -> list[Difference] | None:
    """Every link of the expected fabric beside the found one; ``None`` where the structure differs.

    Raises:
        UsageError: one of the two has only relative capacities.
    """
    units = (found.bytes_per_second_per_unit, expected.bytes_per_second_per_unit)
    if units[0] is None or units[1] is None:
        raise UsageError("fabrics with capacities in unit 'link' cannot be compared with measured ones")
    scale = Fraction(units[0]) / units[1]
    mapping = match(found, expected)
    if mapping is None:
        return None
    return [
        Difference(
            src=expected.label(link.src),
            dst=expected.label(link.dst),
            expected=float(link.capacity),
            found=float(found.capacity[mapping[link.src], mapping[link.dst]] * scale),
        )
        for link in expected.links
    ]
