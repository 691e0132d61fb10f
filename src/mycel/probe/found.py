"""From fitted capacities to a topology with round numbers, and sentences on what it is and how sure that is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import median

import numpy as np

from mycel.brief import brief
from mycel.probe.fit import Estimate, Fit
from mycel.probe.observations import Pair
from mycel.probe.structure import Hop, Structure, free_name, machine_switch
from mycel.topology.capacities import fitting_unit
from mycel.topology.model import Link, Topology, Vertex
from mycel.topology.yaml_format import to_yaml
from mycel.units import RATE_UNITS, format_seconds

__all__ = [
    "Found",
    "LinkNote",
    "build",
    "describe",
    "found_yaml",
    "level",
    "link_latencies",
    "round_rate",
    "summary_lines",
]

#: A round number within this part of a measured one stands for it.
_ROUNDING = 0.025
#: Measured capacities this close to the next one, and this close to the least of them, are taken to be one.
_NEXT, _SAME = 1.03, 1.08
#: A rank this much slower than the middle one is worth a sentence, as is a cable this uneven.
_SLOW, _UNEVEN = 0.75, 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkNote:
    """How one link's capacity was found.

    Attributes:
        src, dst: vertices of the topology.
        measured: bytes a second, as measured.
        num_evidence: patterns of traffic in which nothing but this link (or others in series with it) held a flow
            back; 0: ``measured`` is only the most that was seen.
        spread: (largest - smallest) / measured of the evidence.
        series: how many links are in series with it, so that only the least of them is known.

    Examples:
        >>> seen = LinkNote(src=0, dst=2, measured=1.25e7, num_evidence=0, spread=0.0, series=0)
        >>> seen.text()
        'at least: no traffic was found that this link alone holds back'
    """

    src: int
    dst: int
    measured: float
    num_evidence: int
    spread: float
    series: int

    __repr__ = brief

    def text(self) -> str:
        """How sure, in words.

        Examples:
            >>> LinkNote(src=0, dst=1, measured=5e7, num_evidence=3, spread=0.012, series=0).text()
            'measured 3 times, 1.2 % apart'
        """
        if not self.num_evidence:
            return "at least: no traffic was found that this link alone holds back"
        times = f"{self.num_evidence} times, {100 * self.spread:.1f} % apart" if self.num_evidence > 1 else "once"
        if self.series:
            return f"measured {times}, as the least of {self.series + 1} links in series"
        return f"measured {times}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a probe found.

    Attributes:
        topology: the fabric.
        links: one note a link of the topology, in its order.
        reason: why it has this structure.
        explained: part of all flows whose rate some full link on their way explains.
        foretold: flows of patterns that were kept for checking that the topology explains, and how many there were.
        largest_load: in those patterns, the largest load of a link over its capacity.
        findings: sentences on what is worth knowing.
        notes: sentences on what was left out.
        seconds: that the probe took, from the first answer of all ranks.
        num_bytes: that it sent.
        num_patterns: of traffic that it measured.

    Examples:
        >>> from mycel.topology import load_topology
        >>> pair = load_topology("star:ranks=2,bandwidth=100 Mbit/s")
        >>> note = LinkNote(src=0, dst=2, measured=1.25e7, num_evidence=2, spread=0.01, series=0)
        >>> found = Found(topology=pair, links=(note,), reason="one switch", explained=1.0, foretold=(19, 20))
        >>> found.confidence
        'high'
    """

    topology: Topology
    links: tuple[LinkNote, ...]
    reason: str
    explained: float
    foretold: tuple[int, int] = (0, 0)
    largest_load: float = 0.0
    findings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    num_bytes: int = 0
    num_patterns: int = 0

    __repr__ = brief

    @property
    def confidence(self) -> str:
        """``"high"``, ``"medium"`` or ``"low"``, from how much of the traffic the topology explains."""
        part = self.foretold[0] / self.foretold[1] if self.foretold[1] else 0.0
        if self.explained >= 0.97 and part >= 0.95 and self.largest_load <= 1.1:
            return "high"
        return "medium" if self.explained >= 0.9 and part >= 0.8 and self.largest_load <= 1.25 else "low"


def round_rate(bits_per_second: float) -> int:
    """The roundest number near a measured rate, in bit/s.

    Examples:
        >>> round_rate(396.2e6), round_rate(49.3e6), round_rate(24.6e9), round_rate(123.4e6)
        (400000000, 50000000, 25000000000, 123000000)
    """
    for digits in (1, 2):
        rounded = float(f"{bits_per_second:.{digits - 1}e}")
        if abs(rounded / bits_per_second - 1) <= _ROUNDING:
            return int(rounded)
    return int(float(f"{bits_per_second:.2e}"))


def level(rates: Mapping[Hop, float], certain: Collection[Hop]) -> dict[Hop, float]:
    """Rates with those that differ by no more than measurements do made equal: machines are bought in dozens.

    Args:
        rates: of links.
        certain: links whose rate was measured; where there are any among equal ones, they decide.
    """
    leveled: dict[Hop, float] = {}
    group: list[Hop] = []

    def settle() -> None:
        deciding = [rates[hop] for hop in group if hop in certain] or [rates[hop] for hop in group]
        leveled.update(dict.fromkeys(group, median(deciding)))
        group.clear()

    for hop in sorted(rates, key=lambda hop: rates[hop]):
        if group and (rates[hop] > _NEXT * rates[group[-1]] or rates[hop] > _SAME * rates[group[0]]):
            settle()
        group.append(hop)
    if group:
        settle()
    return leveled


def link_latencies(structure: Structure, latency_s: Mapping[Pair, float]) -> dict[Hop, float]:
    """Latencies of links that add up to those of pairs, as nearly as non-negative ones can.

    Both directions of a cable get the same. What no measurement divides among cables in series is divided evenly.
    """
    cables = sorted({(min(hop), max(hop)) for hop in structure.links()})
    column = {cable: i for i, cable in enumerate(cables)}
    pairs = [pair for pair in latency_s if pair in structure.paths]
    if not pairs:
        return {}
    rows = np.zeros((len(pairs), len(cables)))
    for row, pair in enumerate(pairs):
        for a, b in structure.hops(pair):
            rows[row, column[min(a, b), max(a, b)]] += 1
    # The even division: the smallest deviation from what each cable would have if all were alike.
    wanted = np.array([latency_s[pair] for pair in pairs])
    alike = float(wanted.sum() / rows.sum())
    weight = 1e-2
    system = np.vstack([rows, weight * np.eye(len(cables))])
    from scipy.optimize import nnls  # takes longer to import than all of mycel

    solution, _ = nnls(system, np.concatenate([wanted, np.full(len(cables), weight * alike)]))
    out: dict[Hop, float] = {}
    for (a, b), seconds in zip(cables, solution, strict=True):
        out[a, b] = out[b, a] = float(f"{seconds:.1e}")
    return out


def build(
    name: str,
    found: Fit,
    machines: Sequence[str],
    latency_s: Mapping[Pair, float],
) -> tuple[Topology, tuple[LinkNote, ...]]:
    """The topology of a fit, and how each of its links was found.

    Args:
        name: of the topology.
        found: structure and rates.
        machines: of each rank.
        latency_s: of pairs, one way.
    """
    structure = found.structure
    estimates: dict[Hop, Estimate] = {hop: e for e in found.estimates for hop in e.section.links if e.rate > 0}
    rates = {hop: estimates[hop].rate for hop in estimates}
    for hops in _within_machines(structure, machines).values():
        # Processes of one machine are no better or worse connected than each other; what differs is who had a core.
        rates |= dict.fromkeys(hops, median(rates.get(hop, 0.0) for hop in hops))
    leveled = level(rates, {hop for hop in estimates if estimates[hop].is_certain and rates[hop] > 0})
    bits = {hop: round_rate(8 * rate) for hop, rate in leveled.items()}
    unit = fitting_unit([Fraction(b, 8) for b in bits.values()], ["Gbit/s", "Mbit/s"])
    latencies = link_latencies(structure, latency_s)
    # Both directions of a cable side by side, as the file has them.
    order = sorted(bits, key=lambda hop: (min(hop), max(hop), hop))
    links = tuple(
        Link(
            src=a,
            dst=b,
            capacity=int(Fraction(bits[a, b], 8) / RATE_UNITS[unit]),
            latency_s=latencies.get((a, b), 0.0),
        )
        for a, b in order
    )
    topology = Topology(name=name, unit=unit, vertices=_vertices(structure, machines), links=links)
    notes = tuple(
        LinkNote(
            src=hop[0],
            dst=hop[1],
            measured=estimates[hop].rate,
            num_evidence=len(estimates[hop].evidence),
            spread=estimates[hop].spread,
            series=len(estimates[hop].section.links) - 1,
        )
        for hop in order
    )
    return topology, notes


def _nodes(structure: Structure) -> dict[int, tuple[int, ...]]:
    """Ranks of each node by its switches: those that some ranks, and only they, are connected to."""
    attached: dict[int, set[int]] = {}
    for a, b in structure.links():
        for switch, rank in ((a, b), (b, a)):
            if switch >= structure.num_ranks > rank:
                attached.setdefault(switch, set()).add(rank)
    partial = {s: tuple(sorted(r)) for s, r in attached.items() if 2 <= len(r) < structure.num_ranks}
    groups = set(partial.values())
    overlapping = {g for g in groups for h in groups if g != h and set(g) & set(h)}
    return {switch: ranks for switch, ranks in partial.items() if ranks not in overlapping}


def _vertices(structure: Structure, machines: Sequence[str]) -> tuple[Vertex, ...]:
    nodes = _nodes(structure)
    names: dict[tuple[int, ...], str] = {}
    for number, ranks in enumerate(sorted(set(nodes.values()))):
        of = {machines[rank] for rank in ranks}
        whole = len(of) == 1 and list(machines).count(next(iter(of))) == len(ranks)
        names[ranks] = next(iter(of)) if whole else f"node{number}"
    if len(set(machines)) == 1 and not nodes:
        names[tuple(range(structure.num_ranks))] = machines[0]
    place = {rank: (names[ranks], ranks.index(rank)) for ranks in names for rank in ranks}
    vertices = []
    for rank in range(structure.num_ranks):
        node, number = place.get(rank, (None, rank))
        alone = machines[rank] if list(machines).count(machines[rank]) == 1 else str(rank)
        vertices.append(Vertex(kind="rank", label=f"{node}/{number}" if node else alone, node=node))
    taken = {vertex.label for vertex in vertices}
    others = len(structure.names) - len(nodes)
    for number, name in enumerate(structure.names):
        switch = structure.num_ranks + number
        node = names[nodes[switch]] if switch in nodes else None
        if node is None and len(names) == 1 and len(structure.names) == 1 and len(set(machines)) == 1:
            node = machines[0]
        wanted = f"{node}/switch" if node else "core" if nodes and others == 1 else name
        label = free_name(wanted, taken)
        taken.add(label)
        vertices.append(Vertex(kind="switch", label=label, node=node))
    return tuple(vertices)


def describe(topology: Topology, machines: Collection[str] = ()) -> tuple[str, ...]:
    """Sentences on what is worth knowing: nodes, direct cables, slow ranks, shared and uneven cables.

    Args:
        topology: the fabric.
        machines: nodes whose ranks talk through memory; how fast, is no property of a cable.
    """
    return (*_shape(topology), *_slow_ranks(topology, machines), *_shared(topology), *_uneven(topology))


def _within_machines(structure: Structure, machines: Sequence[str]) -> dict[str, list[Hop]]:
    """Links between ranks of one machine and the switch that stands for its memory."""
    found: dict[str, list[Hop]] = {}
    for a, b in structure.links():
        rank, switch = min(a, b), max(a, b)
        if rank < structure.num_ranks <= switch:
            machine = machines[rank]
            if structure.names[switch - structure.num_ranks] == machine_switch(machine):
                found.setdefault(machine, []).append((a, b))
    return found


def _shape(topology: Topology) -> list[str]:
    nodes: dict[str, list[int]] = {}
    for rank, vertex in enumerate(topology.ranks):
        node = topology.vertices[vertex].node
        if node is not None:
            nodes.setdefault(node, []).append(rank)
    sentences = []
    if len(nodes) > 1:
        parts = ", ".join(f"{name} (ranks {_span(ranks)})" for name, ranks in nodes.items())
        sentences.append(f"{len(nodes)} nodes: {parts}")
    direct = sum(link.src in topology.rank_of and link.dst in topology.rank_of for link in topology.links)
    if direct and not topology.switches:
        sentences.append("ranks are connected directly; no switch was seen")
    elif len(topology.switches) == 1 and not nodes:
        sentences.append("all ranks are at one switch")
    return sentences


def _slow_ranks(topology: Topology, machines: Collection[str]) -> list[str]:
    """Ranks whose links, added up, carry much less than those of most."""
    sentences = []
    for verb, end in (("sends", 0), ("receives", 1)):
        total = {
            rank: sum(k.capacity for k in topology.links if (k.src, k.dst)[end] == vertex)
            for rank, vertex in enumerate(topology.ranks)
            if topology.vertices[vertex].node not in machines
        }
        if not total:
            continue
        middle = median(total.values())
        best = max(total.values())
        usual = middle if middle >= _SLOW * best else best
        for rank, capacity in total.items():
            if capacity < _SLOW * usual:
                sentences.append(
                    f"slow: rank {rank} ({topology.label(topology.ranks[rank])}) {verb} at {capacity} "
                    f"{topology.unit}, others at {usual:g}"
                )
    return sentences


def _shared(topology: Topology) -> list[str]:
    """Cables of a node that carry less than its ranks together could use."""
    sentences = []
    for switch in topology.switches:
        node = topology.vertices[switch].node
        if node is None:
            continue
        ranks = [r for r, v in enumerate(topology.ranks) if topology.vertices[v].node == node]
        inside = sum(k.capacity for k in topology.links if k.dst == switch and k.src in topology.rank_of)
        sentences += [
            f"shared: ranks {_span(ranks)} have together {link.capacity} {topology.unit} from "
            f"{topology.label(switch)} to {topology.label(link.dst)}"
            for link in topology.links
            if link.src == switch and link.dst in topology.switches and link.capacity < inside
        ]
    return sentences


def _uneven(topology: Topology) -> list[str]:
    sentences = []
    for link in topology.links:
        back = topology.capacity.get((link.dst, link.src))
        if back is not None and link.capacity < _UNEVEN * back:
            sentences.append(
                f"uneven: {topology.label(link.src)} -> {topology.label(link.dst)} carries {link.capacity} "
                f"{topology.unit}, the other direction {back}"
            )
    return sentences


def _span(ranks: Sequence[int]) -> str:
    """Numbers as people write them.

    Examples:
        >>> _span([0, 1, 2, 3]), _span([0, 2])
        ('0-3', '0, 2')
    """
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))


def summary_lines(found: Found) -> list[str]:
    """What was found and how sure it is, for people and for the head of the file.

    Args:
        found: what a probe found.

    Returns:
        Sentences, a line each.

    Examples:
        >>> from mycel.topology import load_topology
        >>> pair = load_topology("star:ranks=2,bandwidth=100 Mbit/s")
        >>> note = LinkNote(src=0, dst=2, measured=1.25e7, num_evidence=2, spread=0.01, series=0)
        >>> found = Found(topology=pair, links=(note,), reason="one switch", explained=1.0, foretold=(19, 20))
        >>> summary_lines(found)[0]
        'structure: one switch'
    """
    flows, of = found.foretold
    lines = [*found.findings, f"structure: {found.reason}"]
    lines.append(
        f"confidence: {found.confidence}; some full link explains {100 * found.explained:.0f} % of the measured flows"
        + (
            f", and {flows} of {of} flows in patterns kept for checking (largest load {found.largest_load:.2f} of a "
            "link's capacity)"
            if of
            else "; no pattern was kept for checking"
        )
    )
    lines += found.notes
    lines.append(
        f"measured {found.num_patterns} patterns of traffic, {found.num_bytes / 1e6:.0f} MB, in "
        f"{format_seconds(found.seconds)}"
    )
    return lines


def found_yaml(found: Found) -> str:
    """The topology file: the YAML that mycel reads, with how each value was found as comments.

    Args:
        found: what a probe found; its topology's unit is a rate.

    Returns:
        Text of the file; ``load_topology`` reads it back.

    Examples:
        >>> from mycel.topology import load_topology
        >>> pair = load_topology("star:ranks=2,bandwidth=100 Mbit/s")
        >>> note = LinkNote(src=0, dst=2, measured=1.25e7, num_evidence=2, spread=0.01, series=0)
        >>> found = Found(topology=pair, links=(note,), reason="one switch", explained=1.0, foretold=(19, 20))
        >>> print(found_yaml(found).splitlines()[5])
        #   0 -> switch: 100, measured 2 times, 1.0 % apart
    """
    topology = found.topology
    scale = float(RATE_UNITS[topology.unit])
    head = [f"# {line}" for line in ("Found by mycel probe.", *summary_lines(found))]
    head.append(f"# links, as measured in {topology.unit} (headers included) before rounding:")
    head += [
        f"#   {topology.label(note.src)} -> {topology.label(note.dst)}: {note.measured / scale:.4g}, {note.text()}"
        for note in found.links
    ]
    head.append("# latency: half of a small packet's way there and back, divided among the cables of its way")
    return "\n".join(head) + "\n" + to_yaml(topology)
