"""JSON objects with the place where they stand, for messages; see ``plan_form``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mycel.errors import ScheduleError

__all__ = ["KINDS", "Entry"]

#: Kinds of channels.
KINDS = ("memory", "port", "switch")


class Entry:
    """A JSON object and where it stands."""

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, Mapping):
            raise ScheduleError(f"{where}: expected an object, got {type(data).__name__}")
        self.data: Mapping[str, Any] = data
        self.where = where

    def get(self, key: str) -> Any:
        """The value of a key that has to be there."""
        if key not in self.data:
            raise ScheduleError(f"{self.where}: lacks the key {key!r}")
        return self.data[key]

    def whole(self, key: str, *, below: int = 1 << 31) -> int:
        """A whole number from 0."""
        return _whole(self.get(key), f"{self.where}: {key}", below)

    def expect(self, key: str, value: int) -> None:
        """Check a number that has to be one certain."""
        if (got := self.whole(key)) != value:
            raise ScheduleError(f"{self.where}: {key} is {got}; the runtime looks for it at position {got}")

    def text(self, key: str) -> str:
        """A text."""
        if not isinstance(value := self.get(key), str):
            raise ScheduleError(f"{self.where}: {key} is {value!r}; expected text")
        return value

    def flag(self, key: str) -> bool:
        """True or false."""
        if not isinstance(value := self.get(key), bool):
            raise ScheduleError(f"{self.where}: {key} is {value!r}; expected true or false")
        return value

    def kind(self, key: str, known: Sequence[str] = KINDS) -> str:
        """A kind of channel."""
        if (value := self.text(key)) not in known:
            raise ScheduleError(f"{self.where}: {key} {value!r} is not understood; known: {', '.join(known)}")
        return value

    def items(self, key: str, *, least: int = 1, most: int = 1 << 20) -> Sequence[Any]:
        """A list."""
        value = self.get(key)
        if not isinstance(value, list) or len(value) < least:
            raise ScheduleError(f"{self.where}: {key} is no list of at least {least}")
        if len(value) > most:
            raise ScheduleError(f"{self.where}: {len(value)} {key}; at most {most} are allowed")
        return value

    def numbers(self, key: str, *, below: int, most: int) -> list[int]:
        """A list of whole numbers."""
        return [_whole(value, f"{self.where}: {key}", below) for value in self.items(key, most=most)]


def _whole(value: Any, what: str, below: int) -> int:
    if not below:
        raise ScheduleError(f"{what} is {value!r}; there is none to name")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < below:
        raise ScheduleError(f"{what} is {value!r}; expected a whole number from 0 to {below - 1}")
    return value
