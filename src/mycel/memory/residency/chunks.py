"""Chunks of equal size for a model's tensors, in order of use, none across a border; the size that wastes least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mycel.brief import brief
from mycel.errors import UsageError

__all__ = ["ChunkLayout", "layout_of", "search_layout"]


@dataclass(frozen=True, kw_only=True)
class ChunkLayout:
    """Which tensors stand in which chunk.

    Attributes:
        chunk_elements: numbers that a chunk has room for.
        chunks: indices of the tensors of each chunk, in order of use.
        used_elements: numbers of all tensors.

    Examples:
        >>> layout = layout_of([3, 2, 4, 1], chunk_elements=5)
        >>> layout.chunks, layout.waste
        (((0, 1), (2, 3)), 0.0)
    """

    chunk_elements: int
    chunks: tuple[tuple[int, ...], ...]
    used_elements: int

    __repr__ = brief

    @property
    def waste(self) -> float:
        """Part of the chunks' room that nothing stands in."""
        return 1.0 - self.used_elements / (len(self.chunks) * self.chunk_elements)


def layout_of(sizes: Sequence[int], *, chunk_elements: int) -> ChunkLayout:
    """The layout with chunks of a size: each chunk takes tensors as long as they fit.

    Args:
        sizes: numbers of each tensor, in order of use.
        chunk_elements: numbers of a chunk.

    Raises:
        UsageError: a tensor is larger than a chunk, or there is none.
    """
    if not sizes:
        raise UsageError("chunks: there are no tensors")
    largest = max(range(len(sizes)), key=lambda index: sizes[index])
    if sizes[largest] > chunk_elements:
        raise UsageError(
            f"chunks of {chunk_elements} elements: tensor {largest} has {sizes[largest]}, "
            f"{sizes[largest] - chunk_elements} more"
        )
    chunks: list[list[int]] = [[]]
    room = chunk_elements
    for index, size in enumerate(sizes):
        if size > room:
            chunks.append([])
            room = chunk_elements
        chunks[-1].append(index)
        room -= size
    return ChunkLayout(
        chunk_elements=chunk_elements, chunks=tuple(tuple(chunk) for chunk in chunks), used_elements=sum(sizes)
    )


def search_layout(sizes: Sequence[int], *, most_elements: int | None = None) -> ChunkLayout:
    """The layout that wastes least, of all sizes up to a limit.

    For each number of chunks the least size that needs no more is found by bisection; sizes between two of those
    waste more with as many chunks. Of layouts that waste alike to a thousandth, the one with the smallest chunks.

    Args:
        sizes: numbers of each tensor, in order of use.
        most_elements: of a chunk; an eighth of all, or the largest tensor, if not given.

    Raises:
        UsageError: a tensor is larger than the limit, or there is none.

    References:
        Fang et al., "PatrickStar: Parallel Training of Pre-trained Models via Chunk-based Dynamic Memory Management",
        TPDS 2023, section 6.1 (a chunk size is searched for before training).

    Examples:
        >>> search_layout([5, 3, 4, 4, 2, 6], most_elements=8).chunk_elements
        8
    """
    if not sizes:
        raise UsageError("chunks: there are no tensors")
    total, largest = sum(sizes), max(sizes)
    most = max(largest, total // 8) if most_elements is None else most_elements
    best = layout_of(sizes, chunk_elements=most)
    for count in range(len(best.chunks), len(layout_of(sizes, chunk_elements=largest).chunks) + 1):
        low, high = max(largest, -(-total // count)), most
        while low < high:
            middle = (low + high) // 2
            if len(layout_of(sizes, chunk_elements=middle).chunks) <= count:
                high = middle
            else:
                low = middle + 1
        found = layout_of(sizes, chunk_elements=low)
        if round(found.waste, 3) < round(best.waste, 3) or (
            round(found.waste, 3) == round(best.waste, 3) and found.chunk_elements < best.chunk_elements
        ):
            best = found
    return best
