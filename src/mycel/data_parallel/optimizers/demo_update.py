"""DeMo: decoupled momentum, of which each rank tells the others a few strong frequencies in each step.

    M = mu M + G,  q = the top-k coefficients of each chunk's cosine transform,  M = M - q,  X -= lr sign(mean of q)

Gradients are not averaged: a momentum has what its rank has seen and not told yet, so it is momentum and error
feedback in one. Matrices are cut into square chunks, vectors into lengths; where a side is no multiple of the
chunk's, chunks are the fewest that are as long as each other, and padded with zeros. What is taken off a momentum is
what the others heard, cut to the parameter, so that padding loses nothing.

Means are over all ranks. The authors' program divides each coefficient by the number of ranks that sent it; what was
sent by one would weigh as much as what all agree on.

References:
    Peng, Quesnelle, Kingma, "DeMo: Decoupled Momentum Optimization", 2024, arXiv 2411.19870, algorithm 1 (with the
    sign of section 3.4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from mycel.data_parallel.compress.rounds import AllGather, Conversation, Outcome
from mycel.data_parallel.exchange import exchange
from mycel.data_parallel.optimizers.entries import Change, Entry, Ranks
from mycel.data_parallel.stats import CommStats

__all__ = ["LARGEST_CHUNK", "changes"]

#: The side of a chunk whose places two bytes can name.
LARGEST_CHUNK = 256


def changes(entries: Sequence[Entry], ranks: Ranks, stats: CommStats) -> list[Change]:
    """A change for each entry; one all_gather for all of them."""
    momenta = [
        torch.add(entry.gradient, entry.kept("momentum"), alpha=entry.options["momentum"]) for entry in entries
    ]
    cuts = [_Cut.of(entry.parameter.shape, entry.options["chunk"]) for entry in entries]
    wires = [entry.options["wire"] or entry.gradient.dtype for entry in entries]
    places, values = [], []
    for entry, cut, momentum, wire in zip(entries, cuts, momenta, wires, strict=True):
        found = cut.frequencies(momentum)
        top = found.abs().topk(min(entry.options["top_k"], found.shape[1]), dim=1, sorted=False).indices
        places.append(top)
        values.append(found.gather(1, top).to(wire))
    told = _everybody(places, values, ranks, stats)
    made = []
    for i, (entry, cut, momentum) in enumerate(zip(entries, cuts, momenta, strict=True)):
        total = momentum.new_zeros(cut.chunks, cut.numel)
        for heard in told:
            total.scatter_add_(1, heard[i][0], heard[i][1].to(total.dtype))
        own = momentum.new_zeros(cut.chunks, cut.numel).scatter_(1, places[i], values[i].to(total.dtype))
        made.append(_change(entry, momentum - cut.back(own), cut.back(total.div_(len(told)))))
    return made


class _Cut(NamedTuple):
    """A parameter as a matrix of ``rows`` by ``columns`` in ``down`` by ``across`` chunks of ``height`` by ``width``.

    A vector is one row.
    """

    shape: torch.Size
    rows: int
    columns: int
    down: int
    across: int
    height: int
    width: int

    @classmethod
    def of(cls, shape: torch.Size, chunk: int) -> _Cut:
        rows = shape[0] if len(shape) > 1 else 1
        columns = shape.numel() // rows
        down, across = -(-rows // chunk), -(-columns // chunk)
        return cls(shape, rows, columns, down, across, -(-rows // down), -(-columns // across))

    @property
    def chunks(self) -> int:
        return self.down * self.across

    @property
    def numel(self) -> int:
        return self.height * self.width

    def frequencies(self, tensor: Tensor) -> Tensor:
        """Coefficients of each chunk: shape ``[chunks, numel]``."""
        matrix = tensor.reshape(self.rows, self.columns)
        beyond = (0, self.across * self.width - self.columns, 0, self.down * self.height - self.rows)
        if any(beyond):
            matrix = torch.nn.functional.pad(matrix, beyond)
        squares = matrix.view(self.down, self.height, self.across, self.width).transpose(1, 2)
        left, right = (_cosines(n, tensor.dtype, tensor.device) for n in (self.height, self.width))
        return (left @ squares @ right.mT).reshape(self.chunks, self.numel)

    def back(self, found: Tensor) -> Tensor:
        """The tensor of these coefficients, without what is padding."""
        left, right = (_cosines(n, found.dtype, found.device) for n in (self.height, self.width))
        squares = left.mT @ found.view(self.down, self.across, self.height, self.width) @ right
        matrix = squares.transpose(1, 2).reshape(self.down * self.height, self.across * self.width)
        return matrix[: self.rows, : self.columns].reshape(self.shape)


@lru_cache(maxsize=64)
def _cosines(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The orthonormal cosine transform (DCT-II); a frequency a row."""
    at = torch.arange(length, dtype=torch.float64, device=device)
    waves = torch.cos(math.pi / length * (at + 0.5) * at[:, None]) * math.sqrt(2 / length)
    waves[0] = math.sqrt(1 / length)
    return waves.to(dtype)


def _everybody(
    places: Sequence[Tensor], values: Sequence[Tensor], ranks: Ranks, stats: CommStats
) -> list[list[tuple[Tensor, Tensor]]]:
    """By rank and entry: places and values of what it tells. Two bytes name a place in a chunk."""
    if ranks.replicas is None:
        return [list(zip(places, values, strict=True))]
    named = [(p - (1 << 15)).to(torch.int16) for p in places]
    pieces = [piece.reshape(-1).view(torch.uint8) for pair in zip(named, values, strict=True) for piece in pair]
    lengths = [len(piece) for piece in pieces]
    asked = _gathered(torch.cat(pieces), ranks.replicas.size())
    told = []
    for outcome in exchange([asked], ranks.replicas, stats)[0]:
        parts = [part.clone() for part in outcome.mean.split_with_sizes(lengths)]  # numbers begin where they may
        told.append(
            [
                (
                    parts[2 * i].view(torch.int16).long().add_(1 << 15).view(value.shape),
                    parts[2 * i + 1].view(value.dtype).view(value.shape),
                )
                for i, value in enumerate(values)
            ]
        )
    return told


def _gathered(tensor: Tensor, size: int) -> Conversation:
    heard: list[Tensor] = yield AllGather(tensor=tensor, sizes=[len(tensor)] * size)
    return [Outcome(mean=part) for part in heard]


def _change(entry: Entry, momentum: Tensor, mean: Tensor) -> Change:
    def apply() -> None:
        entry.kept("momentum").copy_(momentum)
        entry.move(lambda x, factor: x.add_(mean.sign(), alpha=factor))

    return Change(values=mean, apply=apply)
