"""What a written collective is given: the array, cut into spans, which its statements add and copy.

An ``Array`` writes down what is said, in the order in which it is said. It moves nothing, and knows the fabric only
so far as statements ask for ways through it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from itertools import pairwise
from typing import NoReturn, SupportsIndex, overload

from mycel.collectives.language.statement import Statement, Where, where_called
from mycel.collectives.routes import Route, way_through
from mycel.collectives.spec import Collective
from mycel.errors import ScheduleError, SynthesisError
from mycel.names import nearest
from mycel.topology.model import Topology

__all__ = ["Array", "Span", "Spans"]

#: Transfers that a written collective may have: some minutes of Python, and more than a fabric of 512 ranks needs.
MOST_STATEMENTS = 1 << 20
#: Seconds that a function may take to say them.
MOST_SECONDS = 120.0


class Array:
    """The array of a collective, over the ranks of a fabric, for a function that says how it moves.

    Args:
        topology: the fabric.
        collective: what is to be done.
        instance, instances: which of so many equal parts of every block this is about.

    Attributes:
        topology, collective: as given.
        instance: number of this part, from 0; 0 where there is one.
        num_ranks: ranks are ``0 .. num_ranks - 1``.
        root: of broadcast, reduce, gather and scatter; ``None`` of others.

    Examples:
        >>> from mycel.topology import load_topology
        >>> array = Array(load_topology("ring:ranks=4"), Collective("all_reduce", 4))
        >>> for owner, span in enumerate(array.cut(4)):
        ...     span.add((owner + 1) % 4, owner)
        >>> len(array.statements)
        4
    """

    def __init__(self, topology: Topology, collective: Collective, instance: int = 0, instances: int = 1) -> None:
        self.topology, self.collective, self.instance = topology, collective, instance
        self.num_ranks, self.root = collective.num_ranks, collective.root
        self.statements: list[Statement] = []
        self._first, self._share = Fraction(instance, instances), Fraction(1, instances)
        self._step, self._is_in_step = 0, False
        self._ways: dict[tuple[int, ...], tuple[int, ...] | None] = {}
        self._routes: dict[int, dict[int, Route]] = {}
        self._deadline = time.monotonic() + MOST_SECONDS

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.num_ranks)

    @property
    def switches(self) -> tuple[int, ...]:
        """Switches that copy and add, by the numbers that statements take; they follow those of ranks."""
        return tuple(range(self.num_ranks, len(self.topology.compute_vertices)))

    @property
    def nodes(self) -> list[list[int]]:
        """Ranks by node, as many in each.

        Raises:
            SynthesisError: a rank is in no node, there is one node only, or they differ in size.
        """
        nodes = self.topology.ranks_by_node
        found = ", ".join(f"{node!r}: {len(ranks)}" for node, ranks in nodes.items())
        if None in nodes or len(nodes) < 2 or len({len(ranks) for ranks in nodes.values()}) > 1:
            raise SynthesisError(
                f"{where_called().quoted}: {self.topology.name} has no two or more nodes with equally many ranks "
                f"(found {found or 'none'}); array.ranks needs none"
            )
        return [list(ranks) for ranks in nodes.values()]

    def cut(self, parts: int) -> Spans:
        """The whole array in equal parts, in order.

        Args:
            parts: how many; of a collective whose array has blocks (all_gather has one a rank), a multiple of these.

        Raises:
            ScheduleError: no such number.
        """
        blocks = self.collective.num_blocks
        _check_parts(parts, "cut")
        if parts % blocks:
            raise ScheduleError(
                f"{where_called().quoted}: the array of {self.collective.name} over {self.num_ranks} ranks has "
                f"{blocks} blocks, and {parts} parts would cross them; cut it into a multiple of {blocks}"
            )
        return Spans([span for block in range(blocks) for span in self._block(block).split(parts // blocks)])

    def block(self, *place: int) -> Span:
        """What one rank owns (all_gather, reduce_scatter, gather, scatter); what goes between two (all_to_all).

        Args:
            place: the rank, or for all_to_all the two ranks, ``block(src, dst)``; nothing for others, whose array is
                one block.

        Raises:
            ScheduleError: other places, or no such ranks.
        """
        name, blocks = self.collective.name, self.collective.num_blocks
        wanted = 2 if name == "all_to_all" else 1 if blocks > 1 else 0
        if len(place) != wanted:
            forms = ("block()", "block(rank)", "block(src, dst)")
            raise ScheduleError(f"{where_called().quoted}: blocks of {name} are {forms[wanted]}")
        for rank in place:
            self._check_end(rank, self.num_ranks)
        return self._block(place[0] * self.num_ranks + place[1] if wanted == 2 else place[0] if wanted else 0)

    @contextmanager
    def step(self) -> Iterator[None]:
        """A ``with`` block in which all happens at once: statements read what was there before any of them wrote.

        Where partners add each other's sums, in all_reduce, each forms a new sum apart from the one it sends.

        Raises:
            ScheduleError: a step within a step.
        """
        if self._is_in_step:
            raise ScheduleError(f"{where_called().quoted}: a step within a step; close the first one before")
        self._step, self._is_in_step = self._step + 1, True
        try:
            yield
        finally:
            self._is_in_step = False

    def _block(self, block: int) -> Span:
        return Span(self, block, self._first, self._first + self._share)

    def _check_end(self, vertex: object, most: int) -> None:
        if isinstance(vertex, bool) or not isinstance(vertex, SupportsIndex) or not 0 <= int(vertex) < most:
            n = self.num_ranks
            switches = f", switches that copy and add {n}..{most - 1}" if most > n else ""
            raise ScheduleError(f"{where_called().quoted}: no {vertex!r} here; ranks are 0..{n - 1}{switches}")

    def say(self, span: Span, vertices: Sequence[int], via: Via, *, adds: bool) -> None:
        """Write down that a span goes along some vertices, one statement a hop.

        Raises:
            ScheduleError: no such vertices, or there is no end to it.
            SynthesisError: there is no such way.
        """
        verb, where = "add" if adds else "copy", where_called()
        if len(vertices) < 2:
            raise ScheduleError(f"{where.quoted}: {verb} needs two ranks at least, from which and to which")
        if via is not None and len(vertices) > 2:
            raise ScheduleError(f"{where.quoted}: via= is the way between two ranks, and here are {len(vertices)}")
        for vertex in vertices:
            self._check_end(vertex, len(self.topology.compute_vertices))
        if adds and not self.collective.reduces:
            raise ScheduleError(
                f"{where.quoted}: {self.collective.name} combines nothing, so nothing is added; copy instead"
            )
        for src, dst in pairwise(map(int, vertices)):
            if src == dst:
                raise ScheduleError(f"{where.quoted}: rank {src} does not send to itself")
            if not self._is_in_step:
                self._step += 1
            self.statements.append(
                Statement(
                    adds=adds,
                    block=span.number,
                    start=span.start,
                    stop=span.stop,
                    src=src,
                    dst=dst,
                    path=self._way(src, dst, via, where),
                    step=self._step,
                    where=where,
                )
            )
        if len(self.statements) > MOST_STATEMENTS:
            raise ScheduleError(f"{where.quoted}: more than {MOST_STATEMENTS:,} transfers; does this never end?")
        if time.monotonic() > self._deadline:
            raise ScheduleError(
                f"{where.quoted}: after {MOST_SECONDS:.0f} s and {len(self.statements):,} transfers there is no end "
                "yet; does this never end?"
            )

    def _way(self, src: int, dst: int, via: Via, where: Where) -> tuple[int, ...]:
        ends, topology = self.topology.compute_vertices, self.topology
        stops = (ends[src], *self._stops(via, where), ends[dst])
        if stops not in self._ways:
            self._ways[stops] = way_through(topology, stops, self._routes)
        way = self._ways[stops]
        if way is None:
            far = [r for r in self.ranks if r != src and way_through(topology, (ends[src], ends[r]), self._routes)]
            through = "".join(f" through {topology.label(vertex)}" for vertex in stops[1:-1])
            reached = ", ".join(map(str, far[:16])) + (", ..." if len(far) > 16 else "")
            raise SynthesisError(
                f"{where.quoted}: on {topology.name} no way leads from {src} to {dst}{through} that passes no other "
                f"rank; from {src} it is one step to {reached or 'no rank'}: go by one of these, in two statements"
            )
        return way

    def _stops(self, via: Via, where: Where) -> tuple[int, ...]:
        named = () if via is None else (via,) if isinstance(via, (str, int)) else tuple(via)
        topology = self.topology
        labels = {topology.label(vertex): vertex for vertex in topology.switches}
        for one in named:
            if one not in labels and one not in topology.switches:
                raise SynthesisError(
                    f"{where.quoted}: no switch {one!r} in {topology.name}{nearest(str(one), labels)}; "
                    f"its switches: {', '.join(list(labels)[:16]) or 'none'}"
                )
        return tuple(labels[one] if isinstance(one, str) else one for one in named)


#: What ``via=`` takes: a switch, or several in order, by label or by vertex.
Via = str | int | Sequence[str | int] | None


class Span:
    """A run of the array, at every rank its own: what statements add and copy.

    Examples:
        >>> from mycel.topology import load_topology
        >>> array = Array(load_topology("ring:ranks=4"), Collective("all_gather", 4))
        >>> first, second = array.block(0).split(2)
        >>> first.copy(0, 1, 2, 3)  # one way round, rank by rank
        >>> second.copy(0, 3, 2, 1)  # and the other
    """

    __slots__ = ("_array", "number", "start", "stop")

    def __init__(self, array: Array, number: int, start: Fraction, stop: Fraction) -> None:
        self._array, self.number, self.start, self.stop = array, number, start, stop

    def __repr__(self) -> str:
        return f"<{self.start} to {self.stop} of block {self.number}>"

    def add(self, *ranks: int, via: Via = None) -> None:
        """The first rank sends what it holds of this to the second, which adds it to its own; that one to the third.

        Args:
            ranks: from which to which, and further; switches that copy and add may be among them.
            via: the switch, or switches in order, through which the way leads; the best way if not given.

        Raises:
            ScheduleError: there are no such ranks, or the collective combines nothing.
            SynthesisError: there is no such way.
        """
        self._array.say(self, ranks, via, adds=True)

    def copy(self, *ranks: int, via: Via = None) -> None:
        """The first rank sends what it holds of this to the second, in place of what was there; that to the third.

        Args:
            ranks, via: as for ``add``.

        Raises:
            ScheduleError: there are no such ranks.
            SynthesisError: there is no such way.
        """
        self._array.say(self, ranks, via, adds=False)

    def split(self, parts: int) -> Spans:
        """This run in equal parts, in order.

        Args:
            parts: how many.

        Raises:
            ScheduleError: no such number.
        """
        _check_parts(parts, "split")
        part = (self.stop - self.start) / parts
        return Spans(
            [Span(self._array, self.number, self.start + i * part, self.start + (i + 1) * part) for i in range(parts)]
        )


class Spans(Sequence[Span]):
    """Spans in a row; one that is not there is an error that names the line."""

    __slots__ = ("_spans",)

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = tuple(spans)

    def __len__(self) -> int:
        return len(self._spans)

    @overload
    def __getitem__(self, place: SupportsIndex) -> Span: ...
    @overload
    def __getitem__(self, place: slice) -> Spans: ...
    def __getitem__(self, place: SupportsIndex | slice) -> Span | Spans:
        if isinstance(place, slice):
            return Spans(self._spans[place])
        try:
            return self._spans[place]
        except (IndexError, TypeError):
            _no_such(place, len(self))

    def __iter__(self) -> Iterator[Span]:
        return iter(self._spans)


def _no_such(place: object, length: int) -> NoReturn:
    raise ScheduleError(f"{where_called().quoted}: no chunk {place!r}; chunks are 0..{length - 1}") from None


def _check_parts(parts: object, verb: str) -> None:
    if isinstance(parts, bool) or not isinstance(parts, int) or not 1 <= parts <= MOST_STATEMENTS:
        raise ScheduleError(f"{where_called().quoted}: {verb} into {parts!r} parts; a whole number from 1 is needed")
