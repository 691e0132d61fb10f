"""In which order states pass over the ranks of a layout: runs of segments that one rank holds, one after the other.

Segments in the order of documents and positions form one line. What follows each other there on one rank is one run,
with one map: a contiguous layout has one run a rank, however many documents there are, and a zig-zag two. Runs that
neither take a state nor give one are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from mycel.brief import brief
from mycel.planning.sequence import Layout

__all__ = ["Line", "Run", "line_of", "runs_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Segments of one rank that follow each other in the line.

    Attributes:
        rank: who holds them.
        segments: their numbers on that rank, in order.
        tail: the place among ``segments`` of the first one of the last document.
        takes: whether the first one goes on with a document that another rank began.
        gives: whether another rank goes on with the last document.
    """

    rank: int
    segments: tuple[int, ...]
    tail: int
    takes: bool
    gives: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Runs as what a scan needs to know of them.

    Attributes:
        owners: rank of each run.
        joined: whether a run takes what the one before it gives. The first one never does.
        resets: whether what leaves a run does not depend on what comes in, because a document begins inside.

    Examples:
        >>> line = Line(owners=(0, 1, 2), joined=(False, True, True), resets=(True, False, False))
        >>> line.reversed().owners, line.reversed().joined, line.firsts
        ((2, 1, 0), (False, True, True), (0, 0, 0))
    """

    owners: tuple[int, ...]
    joined: tuple[bool, ...]
    resets: tuple[bool, ...]

    __repr__ = brief

    def __len__(self) -> int:
        return len(self.owners)

    def of(self, rank: int) -> tuple[int, ...]:
        """Places of a rank's runs in the line."""
        return tuple(place for place, owner in enumerate(self.owners) if owner == rank)

    def gives(self, place: int) -> bool:
        """Whether the next run takes what leaves this one."""
        return place + 1 < len(self.owners) and self.joined[place + 1]

    @property
    def firsts(self) -> tuple[int, ...]:
        """Of each run the place of the first one whose state can reach it."""
        found: list[int] = []
        for place, is_joined in enumerate(self.joined):
            found.append(found[-1] if is_joined else place)
        return tuple(found)

    def reversed(self) -> Line:
        """The line as gradients pass it."""
        return Line(
            owners=self.owners[::-1], joined=(False, *self.joined[:0:-1])[: len(self)], resets=self.resets[::-1]
        )


def runs_of(layout: Layout) -> tuple[Run, ...]:
    """The runs of a layout, in order, those left out that neither take nor give.

    Args:
        layout: of the documents.

    Examples:
        >>> from mycel.planning.sequence import contiguous, zigzag
        >>> [(run.rank, run.takes, run.gives) for run in runs_of(zigzag([8], 2))]
        [(0, False, True), (1, True, True), (0, True, False)]
        >>> [run.segments for run in runs_of(contiguous([3, 3, 2], 2))]
        [(0, 1), (0, 1)]
    """
    held = sorted(
        (segment.document, segment.start, rank, number)
        for rank, mine in enumerate(layout.ranks)
        for number, segment in enumerate(mine)
        if len(segment)
    )
    grouped: list[list[tuple[int, int, int, int]]] = []
    for entry in held:
        if grouped and grouped[-1][-1][2] == entry[2]:
            grouped[-1].append(entry)
        else:
            grouped.append([entry])
    found = []
    for entries, following in zip(grouped, [*grouped[1:], None], strict=True):
        documents = [document for document, *_ in entries]
        run = Run(
            rank=entries[0][2],
            segments=tuple(number for *_, number in entries),
            tail=documents.index(documents[-1]),
            takes=entries[0][1] > 0,
            gives=following is not None and following[0][1] > 0,
        )
        if run.takes or run.gives:
            found.append(run)
    return tuple(found)


def line_of(layout: Layout) -> Line:
    """The line of a layout.

    Args:
        layout: of the documents.

    Examples:
        >>> from mycel.planning.sequence import contiguous
        >>> line_of(contiguous([3, 3, 2], 2))
        Line(owners=(0, 1), joined=(False, True), resets=(True, True))
    """
    runs = runs_of(layout)
    return Line(
        owners=tuple(run.rank for run in runs),
        joined=tuple(run.takes for run in runs),
        resets=tuple(run.tail > 0 or not run.takes for run in runs),
    )
