"""Where everything stands in an order, and how a place in it is said and drawn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mycel.errors import VerificationError
from mycel.pipeline.order import Action, Order

__all__ = ["Place", "at", "drawn", "places_of", "wrong"]

#: Lines and columns of a drawing: what a terminal shows.
_MOST_STEPS, _MOST_RANKS, _AROUND = 28, 12, 3


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A cell: a rank, and a position in its row, counted from 0."""

    rank: int
    step: int

    def __str__(self) -> str:
        return f"rank {self.rank}, step {self.step}"


def places_of(order: Order) -> Iterator[tuple[Place, Action]]:
    """Every action without parts with the cell it stands in, row by row.

    Args:
        order: that is gone through.
    """
    for rank, row in enumerate(order.rows):
        for step, action in enumerate(row):
            for leaf in action.leaves:
                yield Place(rank, step), leaf


def at(order: Order, place: Place) -> str:
    """A cell in words, such as ``rank 1, step 3: 1F0``.

    Args:
        order: that it is of.
        place: which.
    """
    return f"{place}: {order.rows[place.rank][place.step]}"


def wrong(order: Order, message: str, marked: Iterable[Place] = ()) -> VerificationError:
    """The error that says what is wrong with an order, with a drawing of the cells around it.

    Args:
        order: that is wrong.
        message: what is wrong.
        marked: cells to be marked.
    """
    return VerificationError(message, grid=drawn(order, marked))


def drawn(order: Order, marked: Iterable[Place]) -> str:
    """Steps down, ranks across, marked cells between ``>`` and ``<``; of a large order only what is around them.

    Args:
        order: to be drawn.
        marked: cells to be marked.

    Examples:
        >>> order = Order.from_csv("0F0,0B0\\n1B0,1F0\\n")
        >>> print(drawn(order, [Place(1, 0)]))
                rank 0  rank 1
        step 0  0F0     >1B0<
        step 1  0B0     1F0
    """
    cells = set(marked)
    longest = max(map(len, order.rows))
    steps = _near({place.step for place in cells} or {0}, longest, _MOST_STEPS)
    ranks = _near({place.rank for place in cells} or {0}, order.ranks, _MOST_RANKS)
    table = [["", *(f"rank {rank}" for rank in ranks)]]
    before = -1
    for step in steps:
        if step != before + 1:
            table.append(["..."])
        before = step
        row = [f"step {step}"]
        for rank in ranks:
            text = str(order.rows[rank][step]) if step < len(order.rows[rank]) else ""
            row.append(f">{text}<" if Place(rank, step) in cells else text)
        table.append(row)
    if before + 1 < longest:
        table.append(["..."])
    widths: dict[int, int] = defaultdict(int)
    for row in table:
        for column, text in enumerate(row):
            widths[column] = max(widths[column], len(text))
    return "\n".join("  ".join(text.ljust(widths[c]) for c, text in enumerate(row)).rstrip() for row in table)


def _near(wanted: set[int], count: int, most: int) -> list[int]:
    """Numbers below a count around those wanted, in ascending order: all of them where there are few."""
    if count <= most:
        return list(range(count))
    kept: dict[int, None] = {}
    for distance in range(_AROUND + 1):
        for number in sorted(wanted):
            for near in (number - distance, number + distance):
                if 0 <= near < count and len(kept) < most:
                    kept[near] = None
    return sorted(kept)
