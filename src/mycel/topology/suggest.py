"""Did-you-mean: the nearest known word to one that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["nearest"]


def nearest(word: str, known: Iterable[str], lead: str = "did you mean") -> str:
    """The end of a message that proposes the known word most like ``word``; empty when none is alike.

    Examples:
        >>> nearest("bandwith", ["bandwidth", "latency"])
        " (did you mean 'bandwidth'?)"
        >>> nearest("colour", ["bandwidth", "latency"])
        ''
    """
    found = difflib.get_close_matches(word, [item for item in known if item != word], n=1)
    return f" ({lead} {found[0]!r}?)" if found else ""
