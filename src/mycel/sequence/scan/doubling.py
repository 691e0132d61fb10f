"""Every run sends what it has composed so far one, two, four places on: as many rounds as the logarithm of the runs.

References:
    Hillis, Steele, "Data Parallel Algorithms", Communications of the ACM 29(12), 1986 (sums of all prefixes).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mycel.sequence.scan.courier import Courier
from mycel.sequence.scan.line import Line
from mycel.sequence.scan.maps import Maps, Shape
from mycel.sequence.scan.messages import Round

__all__ = ["doubling", "doubling_messages"]


def _steps(line: Line) -> list[list[tuple[int, int]]]:
    """For each round, which place sends to which: where what lies between does not hide what is farther away."""
    firsts, steps, distance = line.firsts, [], 1
    while distance < len(line):
        pairs = []
        for place in range(distance, len(line)):
            source = place - distance
            if source >= firsts[place] and not any(line.resets[source + 1 : place]):
                pairs.append((source, place))
        if pairs:
            steps.append(pairs)
        distance *= 2
    return steps


def doubling_messages(line: Line, shape: Shape, num_ranks: int, nodes: tuple[tuple[int, ...], ...]) -> list[Round]:
    """A map for every pair of places of a round that are on different ranks."""
    rounds = []
    for pairs in _steps(line):
        sent: dict[tuple[int, int], int] = {}
        for source, place in pairs:
            pair = line.owners[source], line.owners[place]
            if pair[0] != pair[1]:
                sent[pair] = sent.get(pair, 0) + shape.transition + shape.update
        if sent:
            rounds.append(Round(numbers=sent))
    return rounds


def doubling(courier: Courier, line: Line, maps: Maps, nodes: tuple[tuple[int, ...], ...]) -> Tensor:
    """States that come in, of shape (runs here, heads, values, keys).

    Args:
        courier: sends.
        line: all runs.
        maps: of the runs here, in order.
        nodes: of no use here.
    """
    shape, own = maps.shape, line.of(courier.rank)
    number_of = {place: number for number, place in enumerate(own)}
    before: dict[int, Maps | None] = dict.fromkeys(own)  # what lies before each run, composed as far as it is known
    each = shape.transition + shape.update
    for pairs in _steps(line):
        inclusive: dict[int, Maps] = {}
        for source, _ in pairs:
            if source in number_of and source not in inclusive:
                earlier, this = before[source], maps[number_of[source]]
                inclusive[source] = this if earlier is None else earlier.then(this)
        coming = {}
        for source, place in pairs:
            if place in number_of and source not in number_of:
                coming[place] = courier.start_receive(line.owners[source], each, maps.update)
        for source, place in pairs:
            if source in number_of and place not in number_of:
                courier.send(line.owners[place], inclusive[source].pack())
        for source, place in pairs:
            if place in number_of:
                there = inclusive[source] if source in number_of else Maps.unpack(coming[place].wait(), shape)
                known = before[place]
                before[place] = there if known is None else there.then(known)
        courier.finish()
    found = torch.zeros_like(maps.update)
    for place, earlier in before.items():
        if earlier is not None:
            found[number_of[place]] = earlier.update[0]
    return found
