"""Every rank scans its share of the rows of all states: one exchange brings the rows, another takes the results back.

Rows of a state are independent of each other, so each rank needs only its share of every map: half as many bytes as
there are ranks fewer than where every rank gets all maps, at the price of a second latency.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mycel.sequence.scan.courier import Courier
from mycel.sequence.scan.line import Line
from mycel.sequence.scan.maps import Maps, Shape, assembled, unframed
from mycel.sequence.scan.messages import Round

__all__ = ["two_exchanges", "two_exchanges_messages"]


def two_exchanges_messages(
    line: Line, shape: Shape, num_ranks: int, nodes: tuple[tuple[int, ...], ...]
) -> list[Round]:
    """Rows of every run that gives to all ranks, and back to every run that takes."""
    there: dict[tuple[int, int], int] = {}
    back: dict[tuple[int, int], int] = {}
    for place, owner in enumerate(line.owners):
        for holder, rows in enumerate(shape.cut(num_ranks)):
            if holder != owner and line.gives(place):
                there[owner, holder] = there.get((owner, holder), 0) + shape.packed(rows)
            if holder != owner and line.joined[place]:
                back[holder, owner] = back.get((holder, owner), 0) + (rows[1] - rows[0]) * shape.keys
    return [Round(numbers=sent) for sent in (there, back) if sent]


def two_exchanges(courier: Courier, line: Line, maps: Maps, nodes: tuple[tuple[int, ...], ...]) -> Tensor:
    """States that come in, of shape (runs here, heads, values, keys).

    Args:
        courier: sends.
        line: all runs.
        maps: of the runs here, in order.
        nodes: of no use here.
    """
    shape, ranks = maps.shape, range(courier.num_ranks)
    cuts = shape.cut(courier.num_ranks)
    mine, own = cuts[courier.rank], line.of(courier.rank)
    giving = [number for number, place in enumerate(own) if line.gives(place)]
    given = Maps(transition=maps.transition[giving], update=maps.update[giving])
    counts = [sum(map(line.gives, line.of(rank))) for rank in ranks]
    got = courier.exchange([given.pack(rows) for rows in cuts], [n * shape.packed(mine) for n in counts])
    replies: list[list[Tensor]] = [[] for _ in ranks]
    # With more ranks than rows some have none to scan.
    parts = [Maps.unpack(vector, shape, mine) for vector in got] if mine[0] < mine[1] else []
    taken = [0] * courier.num_ranks
    state: Tensor | None = None
    for place, owner in enumerate(line.owners if parts else ()):
        if line.joined[place] and state is not None:
            replies[owner].append(unframed(state, shape, mine).flatten())
        if line.gives(place):
            part = parts[owner][taken[owner]]
            taken[owner] += 1
            state = part.update if line.resets[place] or state is None else part.leaves(state)
        else:
            state = None
    takers = [number for number, place in enumerate(own) if line.joined[place]]
    sizes = [(high - low) * shape.keys for low, high in cuts]
    nothing = maps.update.new_zeros(0)
    answers = courier.exchange(
        [torch.cat(reply) if reply else nothing for reply in replies], [len(takers) * size for size in sizes]
    )
    found = torch.zeros_like(maps.update)
    if takers:
        found[takers] = assembled([a.view(len(takers), -1) for a in answers if len(a)], shape)
    return found
