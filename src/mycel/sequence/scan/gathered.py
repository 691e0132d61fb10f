"""LASP-2's way: every rank gets the maps of all runs, and folds those before its own.

References:
    Sun et al., "LASP-2: Rethinking Sequence Parallelism for Linear Attention and Its Hybrid", arXiv 2502.07563.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mycel.sequence.scan.courier import Courier
from mycel.sequence.scan.line import Line
from mycel.sequence.scan.maps import Maps, Shape
from mycel.sequence.scan.messages import Round

__all__ = ["gathered", "gathered_messages"]


def _most(line: Line, num_ranks: int) -> int:
    """Runs that give, on the rank with most of them."""
    return max((sum(map(line.gives, line.of(rank))) for rank in range(num_ranks)), default=0)


def gathered_messages(line: Line, shape: Shape, num_ranks: int, nodes: tuple[tuple[int, ...], ...]) -> list[Round]:
    """As many maps of every rank as the one with most of them has."""
    each = _most(line, num_ranks) * (shape.transition + shape.update)
    pairs = {(a, b): each for a in range(num_ranks) for b in range(num_ranks) if a != b}
    return [Round(numbers=pairs, is_gather=True)] if each else []


def gathered(courier: Courier, line: Line, maps: Maps, nodes: tuple[tuple[int, ...], ...]) -> Tensor:
    """States that come in, of shape (runs here, heads, values, keys).

    Args:
        courier: sends.
        line: all runs.
        maps: of the runs here, in order.
        nodes: of no use here.
    """
    shape, own = maps.shape, line.of(courier.rank)
    most, found = _most(line, courier.num_ranks), torch.zeros_like(maps.update)
    if not most:
        return found
    each = shape.transition + shape.update
    giving = [number for number, place in enumerate(own) if line.gives(place)]
    sent = maps.update.new_zeros(most * each)
    if giving:
        packed = torch.cat([maps[number].pack() for number in giving])
        sent[: len(packed)] = packed
    everything = courier.gather(sent)
    taken = [0] * courier.num_ranks
    state: Tensor | None = None
    last = max(own, default=-1)
    for place, owner in enumerate(line.owners[: last + 1]):
        if owner == courier.rank and line.joined[place] and state is not None:
            found[own.index(place)] = state[0]
        if line.gives(place):
            vector = everything[owner, taken[owner] * each : (taken[owner] + 1) * each]
            taken[owner] += 1
            given = Maps.unpack(vector, shape)
            state = given.update if line.resets[place] or state is None else given.leaves(state)
        else:
            state = None
    return found
