"""Capacities of a structure's links from observed rates, and how much of the rates they explain.

Nothing is assumed about how flows share a link. A flow that is sent as fast as the network takes it is held back by
some link of its way that is full: so a link's load is a lower bound of its capacity at all times, and equals it
whenever a flow has no other full link on its way. A structure on which flows are slower than every link of their
way would let them be has the wrong links.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from mycel.probe.observations import Observation, Pair
from mycel.probe.structure import Hop, Structure

__all__ = ["Estimate", "Fit", "Section", "explained", "fit", "sections_of"]

#: A link counts as full from this part of the most it ever carried.
FULL = 0.88
#: Flows below this part of the fastest say nothing: they may have been started late or starved.
_NOTHING = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Links that the same pairs use, one behind the other: no end-to-end measurement can tell them apart.

    Attributes:
        links: in ascending order.
        pairs: whose way leads over them.
    """

    links: tuple[Hop, ...]
    pairs: frozenset[Pair]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What was found out about one section.

    Attributes:
        section: which links.
        rate: bytes a second that they carry.
        evidence: loads in the observations in which nothing else held some flow back; empty: ``rate`` is the most
            that was seen, and more may be possible.
    """

    section: Section
    rate: float
    evidence: tuple[float, ...]

    @property
    def is_certain(self) -> bool:
        """Whether the section itself was seen to be the limit, and not only seen carrying so much."""
        return bool(self.evidence)

    @property
    def spread(self) -> float:
        """(largest - smallest) / rate of the evidence."""
        return (max(self.evidence) - min(self.evidence)) / self.rate if self.evidence else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Capacities for one structure.

    Attributes:
        structure: which.
        estimates: one a section.
        explained: part of all flows that some link of their way, being full, explains.
        rates: bytes a second of each link, as in ``estimates``.
    """

    structure: Structure
    estimates: tuple[Estimate, ...]
    explained: float
    rates: Mapping[Hop, float] = field(repr=False)


def sections_of(structure: Structure) -> list[Section]:
    """Links grouped by the pairs that use them."""
    users: dict[Hop, set[Pair]] = {}
    for pair in structure.paths:
        for hop in structure.hops(pair):
            users.setdefault(hop, set()).add(pair)
    grouped: dict[frozenset[Pair], list[Hop]] = {}
    for hop in sorted(users):
        grouped.setdefault(frozenset(users[hop]), []).append(hop)
    return [Section(links=tuple(links), pairs=pairs) for pairs, links in grouped.items()]


def fit(structure: Structure, observations: Sequence[Observation], *, excused: Collection[Pair] = ()) -> Fit:
    """Capacities that follow from the observations, if this is the structure.

    Args:
        structure: the links.
        observations: what was measured.
        excused: pairs that do not count in ``explained``: within a machine, processors set the pace.

    A section that was the only full one on some flow's way has the upper quartile of its loads at those times, or of
    all times at which it was full, if that is more: a busy processor makes loads smaller, and nothing makes them
    larger. Any other has the most that it was seen to carry.
    """
    sections = sections_of(structure)
    number = {hop: i for i, section in enumerate(sections) for hop in section.links}
    ways = {pair: tuple(dict.fromkeys(number[hop] for hop in structure.hops(pair))) for pair in structure.paths}
    loads = [_loads(ways, observation) for observation in observations]
    most = [max((load.get(i, 0.0) for load in loads), default=0.0) for i in range(len(sections))]
    evidence: list[dict[int, float]] = [{} for _ in sections]
    num_explained = num_flows = 0
    for position, (observation, load) in enumerate(zip(observations, loads, strict=True)):
        floor = _NOTHING * max(observation.rates.values(), default=0.0)
        for pair, rate in observation.rates.items():
            if rate <= floor:
                continue
            full = [i for i in ways[pair] if load[i] >= FULL * most[i]]
            if pair not in excused:
                num_flows += 1
                num_explained += bool(full)
            if len(full) == 1:
                evidence[full[0]][position] = load[full[0]]
    estimates = tuple(
        Estimate(
            section=section,
            rate=_rate(list(evidence[i].values()), [load.get(i, 0.0) for load in loads], most[i]),
            evidence=tuple(evidence[i].values()),
        )
        for i, section in enumerate(sections)
    )
    return Fit(
        structure=structure,
        estimates=estimates,
        explained=num_explained / num_flows if num_flows else 0.0,
        rates={hop: estimate.rate for estimate in estimates for hop in estimate.section.links},
    )


def explained(found: Fit, observation: Observation) -> tuple[int, int, float]:
    """How an observation that was not fitted agrees: flows explained, flows, and the largest load over capacity."""
    load: dict[Hop, float] = {}
    for pair, rate in observation.rates.items():
        for hop in found.structure.hops(pair):
            load[hop] = load.get(hop, 0.0) + rate
    worst = max((load[hop] / found.rates[hop] for hop in load if found.rates[hop] > 0), default=0.0)
    count = sum(
        any(load[hop] >= FULL * found.rates[hop] for hop in found.structure.hops(pair)) for pair in observation.rates
    )
    return count, len(observation.rates), worst


def _rate(evidence: Sequence[float], loads: Sequence[float], most: float) -> float:
    if not evidence:
        return most
    return max(_upper_quartile(evidence), _upper_quartile([load for load in loads if load >= FULL * most]))


def _upper_quartile(values: Sequence[float]) -> float:
    """The value that a quarter of the others, rounded down, exceed.

    Examples:
        >>> _upper_quartile([3.0, 1.0]), _upper_quartile([1.0, 2.0, 3.0, 4.0, 5.0])
        (3.0, 4.0)
    """
    return sorted(values)[-1 - (len(values) - 1) // 4]


def _loads(ways: Mapping[Pair, tuple[int, ...]], observation: Observation) -> dict[int, float]:
    load: dict[int, float] = {}
    for pair, rate in observation.rates.items():
        for section in ways[pair]:
            load[section] = load.get(section, 0.0) + rate
    return load
