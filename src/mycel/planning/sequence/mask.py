"""Which keys a query sees inside its document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mycel.errors import UsageError
from mycel.planning.sequence.layout import Segment

__all__ = ["CAUSAL", "FULL", "Mask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """A rule for all documents; other documents are never seen.

    Attributes:
        kind: ``full`` sees all keys; ``causal`` those up to its own; ``window`` of those the last ``width``;
        ``chunked``
            of those the ones since the last multiple of ``width``.
        width: in tokens.

    Examples:
        >>> Mask(kind="window", width=2).first_key(np.array([0, 1, 5])).tolist()
        [0, 0, 4]
    """

    kind: Literal["full", "causal", "window", "chunked"]
    width: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("full", "causal", "window", "chunked"):
            raise UsageError(f"mask {self.kind!r}: one of full, causal, window, chunked")
        if (self.width is None) != (self.kind in ("full", "causal")):
            raise UsageError(f"mask {self.kind}: a width is for window and chunked, which need one")
        if self.width is not None and self.width < 1:
            raise UsageError(f"mask {self.kind}: a width of {self.width} tokens; at least 1")

    def first_key(self, queries: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first key that each query sees.

        Args:
            queries: positions, int64.
        """
        if self.kind == "window" and self.width is not None:
            return np.maximum(0, queries - self.width + 1)
        if self.kind == "chunked" and self.width is not None:
            return queries // self.width * self.width
        return np.zeros_like(queries)

    def rows(self, length: int, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
        """Keys that each of some queries of a document sees, int64 of shape (stop - start,).

        Args:
            length: tokens of the document.
            start, stop: which queries; all if not given.
        """
        queries = np.arange(start, length if stop is None else stop, dtype=np.int64)
        last = np.full_like(queries, length) if self.kind == "full" else queries + 1
        return last - self.first_key(queries)

    def pairs(self, queries: Segment, keys: Segment) -> int:
        """Queries and keys of two segments that see each other.

        Args:
            queries: a segment.
            keys: another, or the same.
        """
        if queries.document != keys.document:
            return 0
        if self.kind == "full":
            return len(queries) * len(keys)
        at = np.arange(queries.start, queries.stop, dtype=np.int64)
        seen = np.minimum(at + 1, keys.stop) - np.maximum(self.first_key(at), keys.start)
        return int(np.maximum(0, seen).sum())


CAUSAL = Mask(kind="causal")
FULL = Mask(kind="full")
