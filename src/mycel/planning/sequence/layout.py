"""Who holds which piece of which document: an ordered list of segments for each rank."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mycel.brief import brief
from mycel.errors import MismatchError, UsageError

__all__ = ["Layout", "Segment", "agree"]

Ints = NDArray[np.int64]
_MOST_TOKENS = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Segment:
    """Some tokens of a document that follow each other; there may be none.

    Attributes:
        document: its index.
        start: its first token.
        stop: one after its last.
    """

    document: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        if self.document < 0 or not 0 <= self.start <= self.stop:
            raise UsageError(f"{self}: it begins at 0 or later and ends no earlier")

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"tokens {self.start} to {self.stop} of document {self.document}"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Documents over ranks.

    Attributes:
        documents: tokens of each.
        ranks: segments of each rank, in the order in which it holds them.

    Raises:
        UsageError: segments overlap, leave a gap or reach over the end of their document; the message says which
        tokens.

    Examples:
        >>> first, second = Segment(document=0, start=0, stop=2), Segment(document=0, start=2, stop=5)
        >>> halves = Layout(documents=(5,), ranks=((first,), (second,)))
        >>> halves.positions(1).tolist(), halves.labels(1).tolist()
        ([2, 3, 4], [3, 4, -1])
    """

    documents: tuple[int, ...]
    ranks: tuple[tuple[Segment, ...], ...]

    __repr__ = brief

    def __post_init__(self) -> None:
        if not self.ranks:
            raise UsageError("a layout needs at least one rank")
        for index, length in enumerate(self.documents):
            if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= _MOST_TOKENS:
                raise UsageError(f"document {index} has {length!r} tokens: a whole number from 0 to {_MOST_TOKENS}")
        held = sorted((s, rank) for rank, mine in enumerate(self.ranks) for s in mine if len(s))
        reached = [0] * len(self.documents)
        owner: dict[int, int] = {}
        for segment, rank in held:
            if segment.document >= len(self.documents):
                raise UsageError(f"rank {rank} has {segment}: there are {len(self.documents)} documents")
            if segment.stop > self.documents[segment.document]:
                raise UsageError(f"rank {rank} has {segment}, which has {self.documents[segment.document]}")
            at = reached[segment.document]
            if segment.start < at:
                until = min(at, segment.stop)
                raise UsageError(
                    f"segments overlap: ranks {owner[segment.document]} and {rank} both have tokens "
                    f"{segment.start} to {until} of document {segment.document}"
                )
            if segment.start > at:
                raise UsageError(f"tokens {at} to {segment.start} of document {segment.document} are on no rank")
            reached[segment.document] = segment.stop
            owner[segment.document] = rank
        for index, (at, length) in enumerate(zip(reached, self.documents, strict=True)):
            if at < length:
                raise UsageError(f"tokens {at} to {length} of document {index} are on no rank")

    @property
    def num_ranks(self) -> int:
        """How many share the documents."""
        return len(self.ranks)

    @property
    def num_tokens(self) -> int:
        """Of all documents."""
        return sum(self.documents)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Of each rank."""
        return tuple(sum(map(len, mine)) for mine in self.ranks)

    @cached_property
    def digest(self) -> str:
        """The same for equal layouts, and for no others."""
        parts = [",".join(map(str, self.documents))]
        parts += [";".join(f"{s.document} {s.start} {s.stop}" for s in mine) for mine in self.ranks]
        return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]

    @cached_property
    def offsets(self) -> Ints:
        """Where each document begins among all tokens, int64 of shape (documents + 1,)."""
        return np.concatenate([[0], np.cumsum(np.array(self.documents, dtype=np.int64))]).astype(np.int64)

    def positions(self, rank: int) -> Ints:
        """Of each token of a rank the place in its document, int64 of shape (tokens,)."""
        return _joined([np.arange(s.start, s.stop) for s in self.ranks[rank]])

    def documents_of(self, rank: int) -> Ints:
        """Of each token of a rank its document, int64 of shape (tokens,)."""
        return _joined([np.full(len(s), s.document) for s in self.ranks[rank]])

    def indices(self, rank: int) -> Ints:
        """Of each token of a rank its place among all tokens, documents in order: what to take of a whole batch."""
        return _joined([np.arange(s.start, s.stop) + self.offsets[s.document] for s in self.ranks[rank]])

    def labels(self, rank: int) -> Ints:
        """Of each token of a rank the place of the next one of its document among all tokens; -1 after the last."""
        found = []
        for s in self.ranks[rank]:
            following = np.arange(s.start, s.stop) + self.offsets[s.document] + 1
            if len(s) and s.stop == self.documents[s.document]:
                following[-1] = -1
            found.append(following)
        return _joined(found)

    def borders(self, rank: int) -> Ints:
        """Where segments of a rank begin and end among its own tokens, int64 of shape (segments + 1,)."""
        lengths = [len(s) for s in self.ranks[rank]]
        return np.concatenate([[0], np.cumsum(np.array(lengths, dtype=np.int64))]).astype(np.int64)

    @cached_property
    def order(self) -> Ints:
        """The place among all tokens of each token, ranks one after the other: the inverse puts a batch together."""
        return _joined([self.indices(rank) for rank in range(self.num_ranks)])


def agree(digests: Sequence[str]) -> str:
    """The digest that all ranks have.

    Args:
        digests: of each rank's layout.

    Raises:
        MismatchError: some have another; the message says which ranks.

    Examples:
        >>> agree(["ab", "ab"])
        'ab'
    """
    counted = Counter(digests)
    usual = counted.most_common(1)[0][0]
    others = [rank for rank, digest in enumerate(digests) if digest != usual]
    if others:
        shown = ", ".join(f"rank {rank} has layout {digests[rank]}" for rank in others[:4])
        more = f" ({len(others)} ranks in all)" if len(others) > 4 else ""
        raise MismatchError(f"{shown}{more}, and most have {usual}: make layouts of the same lengths on all ranks")
    return usual


def _joined(parts: Sequence[NDArray[np.int64]]) -> Ints:
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, dtype=np.int64)
