"""LASP's way: every run waits for the state of the one before it, and sends on its own.

A run inside which a document begins sends without waiting.

References:
    Sun et al., "Linear Attention Sequence Parallelism", arXiv 2404.02882, section 3 (its ring of states).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mycel.sequence.scan.courier import Courier
from mycel.sequence.scan.line import Line
from mycel.sequence.scan.maps import Maps, Shape
from mycel.sequence.scan.messages import Round

__all__ = ["chain", "chain_messages"]


def chain_messages(line: Line, shape: Shape, num_ranks: int, nodes: tuple[tuple[int, ...], ...]) -> list[Round]:
    """One state after the other; those that wait for nothing at once."""
    rounds: dict[int, dict[tuple[int, int], int]] = {}
    depth = 0
    for place in range(len(line) - 1):
        depth = depth + 1 if line.joined[place] and not line.resets[place] else 0
        pair = line.owners[place], line.owners[place + 1]
        if line.gives(place) and pair[0] != pair[1]:
            sent = rounds.setdefault(depth, {})
            sent[pair] = sent.get(pair, 0) + shape.update
    return [Round(numbers=rounds[depth]) for depth in sorted(rounds)]


def chain(courier: Courier, line: Line, maps: Maps, nodes: tuple[tuple[int, ...], ...]) -> Tensor:
    """States that come in, of shape (runs here, heads, values, keys).

    Args:
        courier: sends.
        line: all runs.
        maps: of the runs here, in order.
        nodes: of no use here.
    """
    shape = maps.shape
    found = torch.zeros_like(maps.update)
    left: Tensor | None = None  # of the run before, where that is here as well
    for number, place in enumerate(line.of(courier.rank)):
        ends_here = line.gives(place) and line.owners[place + 1] == courier.rank
        sends_to = line.owners[place + 1] if line.gives(place) and not ends_here else None
        if sends_to is not None and line.resets[place]:
            courier.send(sends_to, maps.update[number].flatten())
        if line.joined[place]:
            before = line.owners[place - 1]
            if before == courier.rank and left is not None:
                found[number] = left
            else:
                found[number] = courier.receive(before, shape.update, maps.update).view_as(found[number])
        if ends_here or (sends_to is not None and not line.resets[place]):
            left = maps[number].leaves(found[number : number + 1])[0]
            if sends_to is not None:
                courier.send(sends_to, left.flatten())
    courier.finish()
    return found
