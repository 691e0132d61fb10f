"""The fields of a schedule in JSON, each read as what it should be.

What is of another kind is a ``TypeError`` in words, which the reader makes an error of the schedule's.
"""

from __future__ import annotations

from typing import Any

from mycel.errors import ScheduleError

__all__ = ["claim", "is_marked", "is_reduce", "places_of", "text_of", "whole"]


def is_reduce(kind: str) -> bool:
    """Whether a kind of transfer adds up."""
    if kind not in ("reduce", "copy"):
        raise ScheduleError(f"transfer kind {kind!r}; expected 'copy' or 'reduce'")
    return kind == "reduce"


def is_marked(rest: list[Any]) -> bool:
    """What stands behind kind, label and box of a vertex: nothing, or true for a switch that computes."""
    if rest and (len(rest) > 1 or not isinstance(rest[0], bool)):
        raise TypeError(f"{rest!r} where nothing, or true for a switch that computes, was expected")
    return bool(rest and rest[0])


def places_of(rest: list[Any]) -> tuple[int, int]:
    """What stands behind the other fields of a transfer: nothing, or the places that it reads and writes."""
    if not rest:
        return 0, 0
    if len(rest) > 1 or len(rest[0]) != 2:
        raise TypeError(f"{rest!r} where nothing, or two places, was expected")
    read, written = map(whole, rest[0])
    return read, written


def whole(value: Any) -> int:
    """A whole number, which ``True`` is not."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} where a whole number was expected")
    return value


def claim(value: Any) -> bool:
    """True or false, and nothing that could pass for it."""
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} where true or false was expected")
    return value


def text_of(value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} where a string was expected")
    return value
