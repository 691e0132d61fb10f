"""How words reach ranks that this one has no control connection to: which have passed already, and where they go on.

A word for everybody has its author's name and number. Each rank that has not seen it before takes it in and passes it
on to all neighbours but the one it came from, so that it comes to everybody over every way there is, and each
connection carries it twice at most. A word for one rank goes from neighbour to neighbour that is nearer to it. Who
sends it takes any neighbour for the first step: where it is said again, because nothing came of it, it takes another
way, and one rank that has been stopped does not hold it up for ever.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from mycel.runtime.control_graph import Graph, distances
from mycel.runtime.messages import Calling, Gone, Identity, Message, Relayed, Routed

__all__ = ["Relay"]

#: Numbers below the highest of an author's that are told apart: words that come by a longer way than later ones.
_WINDOW = 1024
#: How far ahead a number may be. Authors count, and what waits for a slow rank is bounded.
_FURTHEST = 1 << 20
#: Ranks of which the ways to them are kept.
_MOST_WAYS = 64


class Relay:
    """What one rank knows of the graph, and of what has passed; not for several threads at once.

    Args:
        rank: this one.
        graph: the neighbours of each rank.
        hosts: name of each rank's machine.

    Attributes:
        neighbours: of this rank.
        here: ranks of this rank's machine.
    """

    def __init__(self, rank: int, graph: Graph, hosts: Sequence[str]) -> None:
        self.rank = rank
        self.neighbours = graph[rank]
        self.here = frozenset(each for each, host in enumerate(hosts) if host == hosts[rank])
        self._graph = graph
        self._last = 0
        self._dice = random.Random()  # not the one that users seed
        #: Of each author the highest number, and a bit for each of those below it that have been seen.
        self._seen: dict[int, tuple[int, int]] = {}
        self._ways: OrderedDict[int, list[int]] = OrderedDict()

    def next_number(self) -> int:
        """For a word of this rank's."""
        self._last += 1
        return self._last

    def opened(self, word: Relayed | Routed, read: Callable[[Mapping[str, Any]], Message]) -> Message | None:
        """What a neighbour brings that is for this rank; ``None``: it has come before.

        Args:
            word: as it came.
            read: makes a message of what its author has said; raises ``ValueError`` where that is none.

        Raises:
            ValueError: no author would say such a thing, or not in such a word.
        """
        is_relayed = isinstance(word, Relayed)
        if isinstance(word, Relayed) and self.is_known(word.by, word.number):
            return None
        said = read(word.said)
        if isinstance(said, Identity | Relayed | Routed) or isinstance(said, Calling) is is_relayed:
            raise ValueError(f"of type {word.TYPE!r}, it holds one of type {said.TYPE!r}")
        if getattr(said, "by", word.by) != word.by:
            raise ValueError(f"of type {word.TYPE!r}, rank {word.by} speaks for another one")
        if isinstance(said, Gone) and word.by not in self._graph[said.rank]:
            raise ValueError(f"of type {said.TYPE!r}, rank {word.by} is no neighbour of rank {said.rank}")
        if isinstance(word, Relayed):
            self.note(word.by, word.number)
        return said

    def is_known(self, by: int, number: int) -> bool:
        """Whether a word has come before, or is so old that nobody would know.

        Raises:
            ValueError: its author cannot have come to such a number yet.
        """
        if by == self.rank:
            return True
        highest, bits = self._seen.get(by, (0, 0))
        if number > highest + _FURTHEST:
            raise ValueError(f"number {number} of rank {by} comes after {highest}")
        behind = highest - number
        return behind >= _WINDOW or (behind >= 0 and bool(bits >> behind & 1))

    def note(self, by: int, number: int) -> None:
        """Take down that a word has come."""
        highest, bits = self._seen.get(by, (0, 0))
        if number > highest:
            bits = bits << min(number - highest, _WINDOW) & ((1 << _WINDOW) - 1)
            highest = number
        self._seen[by] = (highest, bits | 1 << highest - number)

    def next_hop(self, to: int, open_to: Collection[int], came_from: int | None) -> int | None:
        """Which neighbour a word for another rank goes to; ``None``: there is none.

        Args:
            to: the rank.
            open_to: neighbours that are still connected.
            came_from: the one that the word came from; ``None``: it begins here.
        """
        if to in open_to:
            return to
        choices = [each for each in open_to if each != came_from]
        if came_from is not None:
            away = self._away(to)
            nearest = min((away[each] for each in choices), default=0)
            choices = [each for each in choices if away[each] == nearest]
        return self._dice.choice(choices) if choices else None

    def _away(self, to: int) -> list[int]:
        if to not in self._ways:
            self._ways[to] = distances(self._graph, to)
            if len(self._ways) > _MOST_WAYS:
                self._ways.popitem(last=False)
        return self._ways[to]
