"""The tokens of a rank in chunks of equal length, so that all segments are worked on at once, of whatever length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from mycel.brief import brief

__all__ = ["Table", "table_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Chunks of segments, first chunks of all before second ones, segments with most chunks first.

    So the segments that have an n-th chunk are always the first ones, as in torch's packed sequences.

    Attributes:
        index: int64 of shape (chunks, chunk): which token; one more than there are where a chunk ends early.
        place: int64 of shape (tokens,): where each token is among all places of all chunks.
        sizes: how many segments have a first chunk, a second one and so on.
        segments: their numbers in this order; those without tokens are left out.
    """

    index: Tensor
    place: Tensor
    sizes: tuple[int, ...]
    segments: tuple[int, ...]

    __repr__ = brief

    def rows(self, chosen: Sequence[int]) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
        """Only some segments: their chunks, as in ``sizes`` how many there are of each number, and their order."""
        kept = set(chosen)
        rows: list[int] = []
        sizes: list[int] = []
        first = 0
        for size in self.sizes:
            here = [first + at for at, segment in enumerate(self.segments[:size]) if segment in kept]
            if here:
                rows += here
                sizes.append(len(here))
            first += size
        order = tuple(segment for segment in self.segments if segment in kept)
        return torch.tensor(rows, dtype=torch.int64), tuple(sizes), order


def table_of(borders: Sequence[int], chunk: int) -> Table:
    """Chunks of the segments between borders.

    Args:
        borders: where segments begin and end among the tokens of a rank.
        chunk: tokens of a chunk.

    Examples:
        >>> table = table_of((0, 1, 4), 2)
        >>> table.index.tolist(), table.sizes, table.segments, table.place.tolist()
        ([[1, 2], [0, 4], [3, 4]], (2, 1), (1, 0), [2, 0, 1, 4])
    """
    tokens = borders[-1]
    lengths = [stop - start for start, stop in pairwise(borders)]
    counts = [-(-length // chunk) for length in lengths]
    order = sorted((s for s in range(len(counts)) if counts[s]), key=lambda s: -counts[s])
    starts: list[tuple[int, int]] = []
    sizes = []
    for number in range(max(counts, default=0)):
        here = [s for s in order if counts[s] > number]
        sizes.append(len(here))
        starts += [(borders[s] + number * chunk, borders[s + 1]) for s in here]
    begin = torch.tensor([start for start, _ in starts], dtype=torch.int64)
    end = torch.tensor([stop for _, stop in starts], dtype=torch.int64)
    index = begin[:, None] + torch.arange(chunk)
    is_token = index < end[:, None]
    place = torch.empty(tokens, dtype=torch.int64)
    place[index[is_token]] = torch.arange(index.numel()).view_as(index)[is_token]
    return Table(index=torch.where(is_token, index, tokens), place=place, sizes=tuple(sizes), segments=tuple(order))
