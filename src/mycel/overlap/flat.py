"""Parameters as one vector for each group and type, cut into tiles of which every rank works on a slice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Flat", "Piece", "Tile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Where a parameter lies in a vector.

    Attributes:
        name: of the parameter.
        parameter: views the vector.
        begin, stop: its elements.
    """

    name: str
    parameter: nn.Parameter
    begin: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Consecutive elements of a vector, as many for every rank.

    Attributes:
        begin: the first, in the vector.
        each: elements of a rank.
        values: of all ranks, a view of the vector.
        gradients: the same of gradients.
        own: this rank's values, a view that an optimizer steps.
        own_begin: its first element in the vector.
        reached: places in ``Flat.pieces`` of the parameters that lie in the tile.
    """

    begin: int
    each: int
    values: Tensor
    gradients: Tensor
    own: nn.Parameter
    own_begin: int
    reached: tuple[int, ...]


class Flat:
    """A vector of parameters, which become views of it, and one for their gradients.

    Args:
        named: parameters of one type and device, the first to get gradients first.
        options: of their group.
        tiles: how many.
        rank, size: this process among the ranks.
    """

    def __init__(
        self, named: Sequence[tuple[str, nn.Parameter]], options: dict[str, Any], tiles: int, rank: int, size: int
    ) -> None:
        self.options = options
        lengths = [parameter.numel() for _, parameter in named]
        each = max(1, -(-sum(lengths) // (tiles * size)))
        num_tiles = max(1, -(-sum(lengths) // (each * size)))
        first = named[0][1]
        self.values = torch.zeros(num_tiles * each * size, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros_like(self.values)
        pieces, begin = [], 0
        for (name, parameter), length in zip(named, lengths, strict=True):
            pieces.append(Piece(name=name, parameter=parameter, begin=begin, stop=begin + length))
            view = self.values[begin : begin + length].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
            begin += length
        self.pieces = tuple(pieces)
        self.tiles = tuple(self._tile(number * each * size, each, rank, size) for number in range(num_tiles))

    def _tile(self, begin: int, each: int, rank: int, size: int) -> Tile:
        stop, own = begin + each * size, begin + each * rank
        return Tile(
            begin=begin,
            each=each,
            values=self.values[begin:stop].view(size, each),
            gradients=self.gradients[begin:stop].view(size, each),
            own=nn.Parameter(self.values[own : own + each]),
            own_begin=own,
            reached=tuple(i for i, p in enumerate(self.pieces) if p.begin < stop and p.stop > begin),
        )

    def take(self, piece: Piece, share: float) -> None:
        """A parameter's gradient times a number; zeros where it has none."""
        place = self.gradients[piece.begin : piece.stop]
        gradient = piece.parameter.grad
        if gradient is None:
            place.zero_()
        else:
            torch.mul(gradient.reshape(-1), share, out=place)

    def segments(self, tile: Tile) -> list[tuple[int, int, int]]:
        """Of this rank's slice: place of a parameter in ``pieces``, and its first and last element in the slice."""
        found = []
        for place in tile.reached:
            piece = self.pieces[place]
            begin = max(piece.begin, tile.own_begin) - tile.own_begin
            stop = min(piece.stop, tile.own_begin + tile.each) - tile.own_begin
            if begin < stop:
                found.append((place, begin, stop))
        return found
