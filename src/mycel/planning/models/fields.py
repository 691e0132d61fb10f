"""Numbers out of files that people and programs wrote: the message says which key of which file is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mycel.errors import UsageError

__all__ = ["MOST", "MOST_LAYERS", "flag", "listing", "size"]

#: No size of a model is larger: what is, is a mistake, or meant to keep somebody busy. Layers and heads are counted
#: through one by one in places, so there are fewer.
MOST, MOST_LAYERS = 10**9, 10**5


def size(
    config: Mapping[str, Any], *keys: str, where: str, default: int | None = None, least: int = 0, most: int = MOST
) -> int:
    """The first of some keys that has a value, as a whole number.

    Args:
        config: what was read.
        keys: spellings, the usual one first.
        where: the file, for the message.
        default: where none has a value; without one that is an error.
        least: smallest that makes sense.
        most: largest.

    Raises:
        UsageError: there is none, or it is no whole number in range.

    Examples:
        >>> size({"n_embd": 768}, "hidden_size", "n_embd", where="config.json")
        768
    """
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or value % 1:
            raise UsageError(f"{where}: {key} is {value!r}; it must be a whole number")
        if not least <= value <= most:
            raise UsageError(f"{where}: {key} is {value}; it must be from {least} to {most}")
        return int(value)
    if default is None:
        raise UsageError(f"{where}: there is no {' or '.join(keys)}: add it, a whole number from {max(least, 1)}")
    return default


def flag(config: Mapping[str, Any], key: str, *, where: str, default: bool) -> bool:
    """A yes or no.

    Raises:
        UsageError: it is something else.
    """
    value = config.get(key, default)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise UsageError(f"{where}: {key} is {value!r}; it must be true or false")
    return value


def listing(config: Mapping[str, Any], key: str, *, where: str) -> list[Any]:
    """A list, empty where there is none.

    Raises:
        UsageError: it is something else.
    """
    value = config.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise UsageError(f"{where}: {key} is {value!r}; it must be a list")
    return value
