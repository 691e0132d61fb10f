"""Reading what somebody else has written: every field of a record is looked at before it is believed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, TypeGuard

__all__ = ["Fields"]

_INT64 = 1 << 63
#: Characters of a text; those of a call or a cause have some hundreds.
_LONGEST_TEXT = 4_000


class Fields:
    """The fields of a record, by name and type; each getter raises ``ValueError`` where something else is there.

    Args:
        record: as JSON gave it.

    Examples:
        >>> Fields({"by": 2}).integer("by", 0, 3)
        2
        >>> Fields({"by": True}).integer("by", 0, 3)
        Traceback (most recent call last):
        ValueError: 'by' is True; expected an integer from 0 to 3
    """

    def __init__(self, record: Mapping[str, Any]) -> None:
        self._record = record

    def integer(self, name: str, least: int = -_INT64, most: int = _INT64 - 1) -> int:
        """An integer from ``least`` to ``most``; those of 64 bits if not said."""
        value: Any = self._record.get(name)
        if not _is_integer(value, least, most):
            self._refuse(name, f"an integer from {least} to {most}")
        return int(value)

    def text(self, name: str) -> str:
        """A text of reasonable length."""
        value = self._record.get(name)
        if not isinstance(value, str) or len(value) > _LONGEST_TEXT:
            self._refuse(name, f"a text of at most {_LONGEST_TEXT} characters")
        return value

    def flag(self, name: str) -> bool:
        """True or false."""
        value = self._record.get(name)
        if not isinstance(value, bool):
            self._refuse(name, "true or false")
        return value

    def seconds(self, name: str) -> float:
        """A number that is not negative."""
        value = self._record.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            self._refuse(name, "seconds")
        return float(value)

    def record(self, name: str) -> Mapping[str, Any]:
        """A record in the record, whose own fields have not been looked at."""
        value = self._record.get(name)
        if not isinstance(value, dict):
            self._refuse(name, "a record")
        return value

    def integers(self, name: str, least: int = -_INT64, most: int = _INT64 - 1) -> tuple[int, ...]:
        """Integers from ``least`` to ``most``, any number of them."""
        value = self._record.get(name)
        if not isinstance(value, list) or not all(_is_integer(each, least, most) for each in value):
            self._refuse(name, f"integers from {least} to {most}")
        return tuple(value)

    def header(self, name: str) -> tuple[int, int, int]:
        """Three integers."""
        value = self._record.get(name)
        if not _is_header(value):
            self._refuse(name, "a header of three integers")
        sequence, kind, num_bytes = value
        return sequence, kind, num_bytes

    def headers(self, name: str) -> tuple[tuple[int, int, int], ...]:
        """Any number of such."""
        value = self._record.get(name)
        if not isinstance(value, list) or not all(map(_is_header, value)):
            self._refuse(name, "headers of three integers")
        return tuple((sequence, kind, num_bytes) for sequence, kind, num_bytes in value)

    def paths(self, name: str, num_vertices: int) -> tuple[tuple[int, ...], ...]:
        """Paths of two vertices and more."""
        value = self._record.get(name)
        if not isinstance(value, list) or not all(_is_path(row, num_vertices) for row in value):
            self._refuse(name, f"paths over {num_vertices} vertices")
        return tuple(map(tuple, value))

    def counted(self, name: str, size: int, num_vertices: int) -> tuple[tuple[int, tuple[int, ...], int], ...]:
        """Channels: a rank, a path, and a count."""
        value = self._record.get(name)
        if not isinstance(value, list) or not all(
            isinstance(row, list)
            and len(row) == 3
            and _is_integer(row[0], 0, size - 1)
            and _is_path(row[1], num_vertices)
            and _is_integer(row[2])
            for row in value
        ):
            self._refuse(name, f"channels of {size} ranks with their counts")
        return tuple((rank, tuple(path), count) for rank, path, count in value)

    def _refuse(self, name: str, expected: str) -> NoReturn:
        got = repr(self._record[name])[:60] if name in self._record else "missing"
        raise ValueError(f"{name!r} is {got}; expected {expected}")


def _is_integer(value: object, least: int = -_INT64, most: int = _INT64 - 1) -> bool:
    return type(value) is int and least <= value <= most


def _is_path(value: object, num_vertices: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) >= 2
        and all(_is_integer(vertex, 0, num_vertices - 1) for vertex in value)
    )


def _is_header(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) == 3 and all(map(_is_integer, value))
