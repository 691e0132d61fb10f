"""Buffers of ranks and parts of them, in chunks."""

from __future__ import annotations

from dataclasses import dataclass

from mycel.errors import UsageError

__all__ = ["BUFFERS", "Buffer", "Part"]

#: Buffers by the letters that plans have for them.
BUFFERS = {"i": "input", "o": "output", "s": "scratch"}


@dataclass(frozen=True, slots=True)
class Part:
    """Chunks ``index .. index+size-1`` of a rank's buffer."""

    rank: int
    letter: str
    index: int
    size: int

    def __str__(self) -> str:
        return f"{BUFFERS[self.letter]}[{self.index}:{self.index + self.size}] of rank {self.rank}"

    def overlaps(self, other: Part) -> bool:
        """Whether both share a chunk."""
        same = (self.rank, self.letter) == (other.rank, other.letter)
        return same and self.index < other.index + other.size and other.index < self.index + self.size


@dataclass(slots=True, eq=False)
class Buffer:
    """A rank's input, output or scratch: ``buffer[2]`` is a chunk of it, ``buffer[2:4]`` are two.

    Attributes:
        num_chunks: its length; ``None`` of scratch, which is as long as its use asks for.

    Examples:
        >>> print(Buffer(0, "o", 4)[1:3])
        output[1:3] of rank 0
    """

    rank: int
    letter: str
    num_chunks: int | None
    used: int = 0

    def __getitem__(self, which: int | slice) -> Part:
        if isinstance(which, slice):
            if which.start is None and which.stop is None and self.num_chunks is not None:
                which = slice(0, self.num_chunks)
            first, stop = which.start or 0, which.stop
            is_whole = which.step in (None, 1)
        else:
            first, stop, is_whole = which, which + 1, True
        name = f"{BUFFERS[self.letter]} of rank {self.rank}"
        if not is_whole or not isinstance(stop, int) or not 0 <= first < stop:
            raise UsageError(f"{name}: [{which}] is no run of chunks; expected a number, or first:end")
        if self.num_chunks is not None and stop > self.num_chunks:
            raise UsageError(f"{name}: chunks {first}..{stop - 1}, but it has {self.num_chunks}")
        self.used = max(self.used, stop)
        return Part(self.rank, self.letter, first, stop - first)
