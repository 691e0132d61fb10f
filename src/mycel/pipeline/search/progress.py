"""What a search says while it goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from mycel.brief import brief

__all__ = ["Progress", "Told"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a search is.

    Attributes:
        doing: what it looks for now.
        best: period or makespan of the best so far; ``None`` if nothing was found.
        bound: that none is below.

    Examples:
        >>> print(Progress(doing="repetends of one micro-batch, length 6", best=None, bound=Fraction(6)))
        repetends of one micro-batch, length 6: best none yet, bound 6
    """

    doing: str
    best: Fraction | None
    bound: Fraction

    __repr__ = brief

    def __str__(self) -> str:
        best = "none yet" if self.best is None else str(self.best)
        return f"{self.doing}: best {best}, bound {self.bound}"


#: Is called with progress.
Told = Callable[[Progress], None]
