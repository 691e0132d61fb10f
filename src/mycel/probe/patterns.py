"""Which flows run at the same time: designed so that every link is once the only one that can hold a flow back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from mycel.probe.fit import Section
from mycel.probe.observations import Pair
from mycel.probe.structure import Structure

__all__ = ["between", "from_one", "rounds", "saturating", "shift", "to_one"]


def rounds(structure: Structure | None, num_ranks: int, *, at_once: int) -> list[tuple[Pair, ...]]:
    """Every ordered pair once, as many together as share no link: each rate is what the pair gets alone.

    Args:
        structure: whose links must not be shared; ``None``: nothing is known, and every pair gets its own round.
        num_ranks: world size.
        at_once: flows in one round at most.

    Examples:
        >>> rounds(None, 2, at_once=4)
        [((0, 1),), ((1, 0),)]
    """
    # By distance round the circle of ranks, so that consecutive pairs have different ends.
    waiting = [(a, (a + k) % num_ranks) for k in range(1, num_ranks) for a in range(num_ranks)]
    if structure is None:
        return [(pair,) for pair in waiting]
    made: list[tuple[Pair, ...]] = []
    while waiting:
        taken: list[Pair] = []
        used: set[tuple[int, int]] = set()
        for pair in waiting:
            hops = set(structure.hops(pair))
            if len(taken) < at_once and not hops & used:
                taken.append(pair)
                used |= hops
        waiting = [pair for pair in waiting if pair not in set(taken)]
        made.append(tuple(taken))
    return made


def from_one(rank: int, num_ranks: int) -> tuple[Pair, ...]:
    """A rank to all others."""
    return tuple((rank, other) for other in range(num_ranks) if other != rank)


def to_one(rank: int, num_ranks: int) -> tuple[Pair, ...]:
    """All others to a rank."""
    return tuple((other, rank) for other in range(num_ranks) if other != rank)


def between(group: Sequence[int], other: Sequence[int]) -> tuple[Pair, ...]:
    """All of one group to all of another, each to a partner of its own as far as there are enough."""
    count = max(len(group), len(other))
    return tuple(dict.fromkeys((group[i % len(group)], other[i % len(other)]) for i in range(count)))


def shift(num_ranks: int, step: int) -> tuple[Pair, ...]:
    """All at once: every rank to the one ``step`` further."""
    return tuple((rank, (rank + step) % num_ranks) for rank in range(num_ranks))


def saturating(
    structure: Structure, section: Section, rates: Mapping[tuple[int, int], float], *, at_once: int
) -> tuple[Pair, ...]:
    """Flows over one section whose ways overlap elsewhere as little as can be, so that it fills up first.

    Args:
        structure: the fabric.
        section: what is to be filled.
        rates: of links as far as they are known; narrow ones are loaded last.
        at_once: flows at most.
    """
    own = set(section.links)
    load: dict[tuple[int, int], int] = {}
    chosen: list[Pair] = []
    left = sorted(section.pairs)
    while left and len(chosen) < at_once:

        def burden(pair: Pair) -> tuple[float, int, Pair]:
            others = [hop for hop in pairwise(structure.paths[pair]) if hop not in own]
            return (
                max(((load.get(hop, 0) + 1) / max(rates[hop], 1.0) for hop in others), default=0.0),
                len(others),
                pair,
            )

        best = min(left, key=burden)
        left.remove(best)
        chosen.append(best)
        for hop in pairwise(structure.paths[best]):
            load[hop] = load.get(hop, 0) + 1
    return tuple(chosen)
