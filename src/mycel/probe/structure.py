"""Candidate structures of a fabric: vertices, and the links on the way from each rank to each other one.

Where routers answered, their answers are the structure. Where nothing answered (one Ethernet, or routers that keep
silent), several structures are possible, and the measured rates must choose: see ``fit``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise

from mycel.probe.observations import Pair

__all__ = ["Route", "Structure", "candidates", "fast_groups", "free_name", "machine_switch", "merge_routers"]

#: One link, as two vertices.
Hop = tuple[int, int]

#: Pairs are of different kinds where one is so many times as fast as the other.
_GAP = 1.5

#: What answered on the way to a rank, nearest first: a rank's number, a router's address, ``None`` for silence.
Route = tuple[int | str | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """Who is connected with whom, without capacities.

    Attributes:
        name: which kind of candidate it is.
        num_ranks: vertices ``0 .. num_ranks - 1`` are the ranks, the others are switches.
        names: of each switch, for people; unique.
        paths: vertices of the way of each ordered pair of ranks, both ends included.
        reason: where it comes from, as a sentence for people.
    """

    name: str
    num_ranks: int
    names: tuple[str, ...]
    paths: Mapping[Pair, tuple[int, ...]]
    reason: str

    def hops(self, pair: Pair) -> Iterator[Hop]:
        """Links of a pair's way."""
        return pairwise(self.paths[pair])

    def links(self) -> list[Hop]:
        """All links, in ascending order."""
        return sorted({hop for pair in self.paths for hop in self.hops(pair)})


def free_name(wanted: str, taken: Collection[str]) -> str:
    """The name itself, or with the first number that makes it a new one.

    Examples:
        >>> free_name("core", ["core", "core2"])
        'core3'
    """
    if wanted not in taken:
        return wanted
    return next(name for i in count(2) if (name := f"{wanted}{i}") not in taken)


def machine_switch(machine: str) -> str:
    """Name of the switch that stands for what ranks of one machine share."""
    return f"{machine}/switch"


@dataclass(slots=True)
class _Draft:
    """A structure in the making; switches are made when their key is first asked for."""

    num_ranks: int
    keys: dict[object, int] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    paths: dict[Pair, tuple[int, ...]] = field(default_factory=dict)

    def switch(self, key: object, name: str) -> int:
        if key not in self.keys:
            self.keys[key] = self.num_ranks + len(self.names)
            self.names.append(free_name(name, self.names))
        return self.keys[key]

    def finish(self, name: str, reason: str) -> Structure:
        return Structure(
            name=name, num_ranks=self.num_ranks, names=tuple(self.names), paths=dict(self.paths), reason=reason
        )


def merge_routers(routes: Mapping[Pair, Route]) -> dict[Pair, Route]:
    """The routes with one name for each router, although it answers to each side with another address.

    Taken to be the same: what answers at the same place of the way there and, counted from the other end, of the
    way back, if both are equally long. That is so wherever both ways are the same; where they are not, two routers
    side by side may become one.
    """
    parent: dict[str, str] = {}

    def find(address: str) -> str:
        while parent.setdefault(address, address) != address:
            address = parent[address]
        return address

    for (src, dst), way in routes.items():
        back = routes.get((dst, src), ())
        if len(back) == len(way):
            for here, there in zip(way, reversed(back), strict=True):
                if isinstance(here, str) and isinstance(there, str):
                    low, high = sorted((find(here), find(there)))
                    parent[high] = low
    return {pair: tuple(find(hop) if isinstance(hop, str) else hop for hop in way) for pair, way in routes.items()}


def fast_groups(rates: Mapping[Pair, float], num_ranks: int) -> list[list[int]]:
    """Groups of ranks that are much faster among themselves than with others; one group if there is no such gap.

    Args:
        rates: of each ordered pair alone; a pair without one does not connect.
        num_ranks: world size.

    Examples:
        >>> slow = {(a, b): 50.0 for a in range(4) for b in range(4)}
        >>> fast_groups(slow | {(0, 1): 400.0, (1, 0): 400.0, (2, 3): 390.0, (3, 2): 400.0}, 4)
        [[0, 1], [2, 3]]
    """
    strength: dict[Pair, float] = {}
    for (a, b), rate in rates.items():
        if a != b:
            key = (min(a, b), max(a, b))
            strength[key] = min(rate, strength.get(key, rate))
    if not strength:
        return [list(range(num_ranks))]
    ordered = sorted(strength.values())
    gaps = [(high / low if low > 0 else float("inf"), high) for low, high in pairwise(ordered)]
    ratio, threshold = max(gaps, default=(1.0, ordered[0]))
    if ratio < _GAP:
        return [list(range(num_ranks))]
    group = list(range(num_ranks))
    for (a, b), rate in strength.items():
        if rate >= threshold and group[a] != group[b]:
            old, new = max(group[a], group[b]), min(group[a], group[b])
            group = [new if g == old else g for g in group]
    return [[rank for rank in range(num_ranks) if group[rank] == name] for name in sorted(set(group))]


def candidates(hosts: Sequence[str], routes: Mapping[Pair, Route], rates: Mapping[Pair, float]) -> list[Structure]:
    """Structures that would explain what answered, simplest assumption first.

    Args:
        hosts: machine of each rank; ranks of one machine share what connects it.
        routes: what answered on the way from a rank to another; a pair that is missing was not reached.
        rates: of pairs alone, in bytes a second.

    Returns:
        At least one.
    """
    merged = merge_routers(routes)
    pairs = [(a, b) for a in range(len(hosts)) for b in range(len(hosts)) if a != b]
    outside = [(a, b) for a, b in pairs if hosts[a] != hosts[b]]
    known = all(pair in merged and None not in merged[pair] for pair in outside)
    answered = known and any(merged[pair] for pair in outside)
    found: list[Structure] = []
    if known and outside:
        reason = (
            "every hop answered packets of small time to live"
            if answered
            else "every rank reaches every other without a router between"
        )
        found.append(_traced(hosts, merged, reason))
    if not answered:
        found.append(_one_switch(hosts, "no router answered; all machines at one switch explain the rates"))
    elif any(not merged[pair] for pair in outside):
        found.append(_traced_switches(hosts, merged))
    groups = fast_groups(rates, len(hosts))
    if not answered and len(set(hosts)) == len(hosts) and 1 < len(groups) < len(hosts):
        found.append(_nodes(groups, len(hosts), shared=False))
        found.append(_nodes(groups, len(hosts), shared=True))
    return found


class _Machines:
    """The ends of ways: a rank that has a machine to itself, or the switch in the machine of several."""

    def __init__(self, hosts: Sequence[str], draft: _Draft) -> None:
        self._hosts, self._draft = hosts, draft
        self._several = {host for host in hosts if list(hosts).count(host) > 1}

    def leave(self, rank: int) -> tuple[int, ...]:
        """Vertices from a rank to where its machine is connected."""
        host = self._hosts[rank]
        if host not in self._several:
            return (rank,)
        return rank, self._draft.switch(("host", host), machine_switch(host))

    def way(self, src: int, dst: int, between: Sequence[int]) -> tuple[int, ...]:
        """The whole way between two ranks."""
        if self._hosts[src] == self._hosts[dst]:
            return *self.leave(src), dst
        return *self.leave(src), *between, *reversed(self.leave(dst))

    def gate(self, rank: int) -> int:
        """Where a rank's machine is connected."""
        return self.leave(rank)[-1]


def _draft_of(hosts: Sequence[str]) -> tuple[_Draft, _Machines, list[Pair]]:
    draft = _Draft(num_ranks=len(hosts))
    pairs = [(a, b) for a in range(len(hosts)) for b in range(len(hosts)) if a != b]
    return draft, _Machines(hosts, draft), pairs


def _traced(hosts: Sequence[str], routes: Mapping[Pair, Route], reason: str) -> Structure:
    """Routers as they answered; where none is between two machines, a cable."""
    draft, machines, pairs = _draft_of(hosts)
    for src, dst in pairs:
        between = [_vertex(draft, machines, hop) for hop in routes.get((src, dst), ())]
        draft.paths[src, dst] = machines.way(src, dst, between)
    return draft.finish("hops", reason)


def _traced_switches(hosts: Sequence[str], routes: Mapping[Pair, Route]) -> Structure:
    """Routers as they answered; machines that reach each other without one share a switch that does not answer."""
    draft, machines, pairs = _draft_of(hosts)
    names = sorted(set(hosts))
    segment = {host: host for host in names}
    for src, dst in pairs:
        if hosts[src] != hosts[dst] and not routes[src, dst]:
            low, high = sorted((segment[hosts[src]], segment[hosts[dst]]))
            segment = {host: low if of == high else of for host, of in segment.items()}
    sizes = {name: list(segment.values()).count(name) for name in names}

    def at(rank: int) -> list[int]:
        name = segment[hosts[rank]]
        return [draft.switch(("segment", name), "switch")] if sizes[name] > 1 else []

    for src, dst in pairs:
        between = [_vertex(draft, machines, hop) for hop in routes.get((src, dst), ())]
        ends = [*at(src), *between, *at(dst)]
        draft.paths[src, dst] = machines.way(src, dst, [v for i, v in enumerate(ends) if i == 0 or ends[i - 1] != v])
    reason = "routers answered; machines without one between them are taken to share a switch"
    return draft.finish("hops and switches", reason)


def _vertex(draft: _Draft, machines: _Machines, hop: int | str | None) -> int:
    assert hop is not None, "only complete routes get here"
    return draft.switch(("router", hop), "router") if isinstance(hop, str) else machines.gate(hop)


def _one_switch(hosts: Sequence[str], reason: str) -> Structure:
    draft, machines, pairs = _draft_of(hosts)
    alone = len(set(hosts)) == 1
    for src, dst in pairs:
        between = [] if alone else [draft.switch("network", "switch")]
        draft.paths[src, dst] = machines.way(src, dst, between)
    return draft.finish("switch", "all ranks are on one machine" if alone else reason)


def _nodes(groups: Sequence[Sequence[int]], num_ranks: int, *, shared: bool) -> Structure:
    """A switch for each group; groups meet in a core, by a cable of each rank or by one of each group."""
    draft = _Draft(num_ranks=num_ranks)
    node = {rank: number for number, group in enumerate(groups) for rank in group}
    core = draft.switch("core", "core")

    def ends(rank: int) -> tuple[int, ...]:
        number = node[rank]
        if not shared or len(groups[number]) == 1:
            return (rank,)
        return rank, draft.switch(("box", number), f"node{number}/switch")

    for src in range(num_ranks):
        for dst in range(num_ranks):
            if src == dst:
                continue
            if node[src] == node[dst]:
                inside = draft.switch(("box", node[src]), f"node{node[src]}/switch")
                draft.paths[src, dst] = (src, inside, dst)
            else:
                draft.paths[src, dst] = (*ends(src), core, *reversed(ends(dst)))
    how = "one cable of each node to the others" if shared else "a cable of each rank to the other nodes"
    return draft.finish(
        "nodes with shared uplinks" if shared else "nodes", f"no router answered; nodes with {how} explain the rates"
    )
