"""Names that people write: the spellings that are understood, and what to propose for those that are not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from mycel.errors import UsageError

__all__ = ["nearest", "spelled"]


def nearest(word: str, known: Iterable[str], lead: str = "did you mean") -> str:
    """The end of a message that proposes the known word most like ``word``; empty when none is alike.

    Examples:
        >>> nearest("bandwith", ["bandwidth", "latency"])
        " (did you mean 'bandwidth'?)"
        >>> nearest("colour", ["bandwidth", "latency"])
        ''
    """
    others = {item.lower(): item for item in known if item != word}
    found = difflib.get_close_matches(word.lower(), others, n=1)
    return f" ({lead} {others[found[0]]!r}?)" if found else ""


def spelled(word: object, known: Iterable[str], what: str) -> str:
    """The known name that ``word`` means: as it is, or but for capitals, hyphens, underscores and blanks.

    Args:
        word: as a person wrote it.
        known: names that there are.
        what: for the message, such as ``"collective"``.

    Raises:
        UsageError: there is no such name; the message proposes the nearest and says all.

    Examples:
        >>> [spelled(word, ["all_reduce", "all_to_all"], "collective") for word in ("AllReduce", "all-to-all")]
        ['all_reduce', 'all_to_all']
        >>> spelled("al_reduce", ["all_reduce"], "collective")
        Traceback (most recent call last):
        ...
        mycel.errors.UsageError: unknown collective 'al_reduce' (did you mean 'all_reduce'?); known: all_reduce
    """
    names = list(known)
    if not isinstance(word, str):
        raise UsageError(f"a {what} is named by a text, got {type(word).__name__}; known: {', '.join(names)}")
    if word in names:
        return word
    alike = [name for name in names if _bare(name) == _bare(word)]
    if len(alike) == 1:
        return alike[0]
    raise UsageError(f"unknown {what} {word!r}{nearest(word, names)}; known: {', '.join(names)}")


def _bare(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter not in "-_ ")
