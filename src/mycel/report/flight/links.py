"""Which link is slow: what the kernel counted on connections, laid over the paths that they take.

A connection's rate while it is busy, beside its part of its path's capacity, says how much of what was promised the
path gave. The part is that of its bytes among all bytes that the same collective sends over each link. A connection
gets more than its part while others are not busy, up to what the whole path carries: it has then got all of it, and
how much of the path it filled is another figure. A link is suspected for what its connections have in common: the
cable over which most of the slow ones and fewest of the fast ones go.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from mycel.brief import brief
from mycel.report.flight.records import Dump, Group, Program

__all__ = ["Carried", "Suspect", "carried", "suspect"]

#: Connections that moved less, or were busy for less time, say nothing about their path.
_LEAST_BYTES, _LEAST_BUSY_S = 1 << 20, 0.02
#: A connection is slow if it gets less than this part of what the best quarter gets. (Two of the three connections of
#: a ring touch a slow rank: a median would call them usual.) On emulated fabrics that carry what they promise, eight
#: ranks on two busy cores, the slowest of some 180 connections got 0.72 of its part; over a cable of a quarter of the
#: promised rate none got more than 0.35.
_SLOW = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """One connection beside what its path was to carry.

    Attributes:
        src, dst: ranks of the whole job.
        path: labels of the vertices.
        rate: bytes a second while it was busy and the receiver had room.
        fair: bytes a second that are its part of its path's capacity.
        limit: bytes a second that the narrowest link of its path carries in this direction.
        receiver_full_s: the rest of busy time, in which the receiver had no room.
    """

    src: int
    dst: int
    path: tuple[str, ...]
    num_bytes: int
    rate: float
    fair: float
    limit: float
    receiver_full_s: float
    retransmitted: int

    __repr__ = brief

    @property
    def reached(self) -> float:
        """How much of ``fair`` it got; 1 where it got more, while others were not busy."""
        return min(1.0, self.rate / self.fair)

    @property
    def of_path(self) -> float | None:
        """Part of ``limit`` that it got; ``None`` where that is more than all of it.

        Such a path is not what the topology says, or it lets some bytes through at once, as shaped links do.
        """
        return self.rate / self.limit if self.rate <= self.limit else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A cable, and what speaks against it.

    Attributes:
        ends: labels of its vertices.
        reached: best part of its promised rate that one of its slow connections got.
        slow, fast: connections over it that are slow, and that are not.
        others: cables of which the records say the same.
    """

    ends: tuple[str, str]
    reached: float
    slow: int
    fast: int
    others: tuple[tuple[str, str], ...]

    __repr__ = brief


def carried(dumps: Sequence[Dump]) -> list[Carried]:
    """Connections that moved enough to say something, the slowest first."""
    parts = _fair_parts(dumps)
    found = []
    for dump in dumps:
        for group in dump.groups.values():
            unit = group.topology.bytes_per_second_per_unit
            for connection in group.connections:
                fair = parts.get((group.identity, connection.path))
                busy_s = connection.busy_s - connection.receiver_full_s
                if fair is None or unit is None or connection.sent_bytes < _LEAST_BYTES or busy_s < _LEAST_BUSY_S:
                    continue
                found.append(
                    Carried(
                        src=group.ranks[connection.src],
                        dst=group.ranks[connection.dst],
                        path=tuple(group.topology.label(vertex) for vertex in connection.path),
                        num_bytes=connection.sent_bytes,
                        rate=connection.sent_bytes / busy_s,
                        fair=fair * float(unit),
                        limit=float(unit * min(group.topology.capacity[hop] for hop in pairwise(connection.path))),
                        receiver_full_s=connection.receiver_full_s,
                        retransmitted=connection.retransmitted,
                    )
                )
    return sorted(found, key=lambda c: c.rate / c.fair)


def _fair_parts(dumps: Sequence[Dump]) -> dict[tuple[str, tuple[int, ...]], float]:
    """By group and path: capacity that a connection was to get, on average over its bytes, in the topology's unit.

    Channels of one collective share a link in proportion to their bytes on it; those of different collectives of a
    group are not busy at the same time.
    """
    together: defaultdict[tuple[str, int, bool], dict[int, Program]] = defaultdict(dict)
    groups: dict[str, Group] = {}
    for dump in dumps:
        described = {name: group for name, group in dump.groups.items() if group.described}
        groups |= described
        for call in dump.calls:
            if call.group in described:
                together[call.key][dump.rank] = call.program
    counts = Counter((name, tuple(sorted(mine.items(), key=_rank))) for (name, _, _), mine in together.items())
    moved: defaultdict[tuple[str, tuple[int, ...]], float] = defaultdict(float)
    needed: defaultdict[tuple[str, tuple[int, ...]], float] = defaultdict(float)
    for (name, mine), count in counts.items():
        group = groups[name]
        sent = [
            (path, num_bytes)
            for rank, program in mine
            for (src, _), path, num_bytes in zip(program.channels, program.paths, program.num_bytes, strict=True)
            if group.ranks[src] == rank
        ]
        load: Counter[tuple[int, int]] = Counter()
        for path, num_bytes in sent:
            for hop in pairwise(path):
                load[hop] += num_bytes
        for path, num_bytes in sent:
            moved[name, path] += count * num_bytes
            needed[name, path] += count * max(load[hop] / group.topology.capacity[hop] for hop in pairwise(path))
    return {key: moved[key] / needed[key] for key in moved if needed[key] > 0}


def _rank(item: tuple[int, Program]) -> int:
    return item[0]


def suspect(connections: Sequence[Carried]) -> Suspect | None:
    """The cable that explains slow connections best; ``None`` where none is slower than most."""
    if len(connections) < 2:
        return None
    usual = statistics.quantiles((c.reached for c in connections), n=4, method="inclusive")[2]
    slow = [c for c in connections if c.reached < _SLOW * min(usual, 1.0)]
    if not slow:
        return None
    over: defaultdict[tuple[str, str], list[Carried]] = defaultdict(list)
    for connection in connections:
        for a, b in pairwise(connection.path):
            over[min(a, b), max(a, b)].append(connection)

    def weight(cable: tuple[str, str]) -> tuple[int, int]:
        number = sum(c in slow for c in over[cable])
        return number, number - len(over[cable])

    best = max(over, key=weight)
    alike = [cable for cable in over if weight(cable) == weight(best)]
    number, fast = weight(best)
    return Suspect(
        ends=best,
        reached=max(c.reached for c in over[best] if c in slow),
        slow=number,
        fast=-fast,
        others=tuple(cable for cable in alike if cable != best),
    )
