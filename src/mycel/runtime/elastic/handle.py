"""Handles: texts by which a process that may become a rank is found, and proves that it was invited."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields

from mycel.errors import CommunicationError, UsageError

__all__ = ["KEY_BYTES", "Handle", "in_rank_order"]

#: Of the key that a handle carries.
KEY_BYTES = 16
#: Characters of the longest text that is looked at.
_LONGEST = 4096
_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """Where a process waits to become a rank. Its text form goes from process to process by any way there is.

    Attributes:
        ip, port: it listens there for other members, for as long as its group object lives.
        host: its machine.
        pid: its process, for messages.
        key: 32 hexadecimal digits that nobody else has: who shows them has been given the handle.
        place: which rank of the described fabric (``MYCEL_TOPOLOGY``) it is; ``None`` where that is not known.

    Examples:
        >>> handle = Handle(ip="10.0.0.7", port=4711, host="left", pid=12, key="00" * KEY_BYTES, place=3)
        >>> Handle.from_text(handle.to_text()) == handle
        True
        >>> print(handle.described)
        pid 12 at 10.0.0.7:4711, place 3
    """

    ip: str
    port: int
    host: str
    pid: int
    key: str
    place: int | None = None

    def to_text(self) -> str:
        """One line, the same for the same handle."""
        return json.dumps({"mycel_handle": _VERSION, **asdict(self)}, separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> Handle:
        """Read ``to_text``.

        Raises:
            UsageError: it is no handle of this version.
        """
        try:
            if len(text) > _LONGEST:
                raise ValueError
            data = json.loads(text)
            if data.pop("mycel_handle") != _VERSION:
                raise ValueError
            made = cls(**data)
            right = all(_fits(getattr(made, field.name), str(field.type)) for field in fields(made))
            if not right or len(bytes.fromhex(made.key)) != KEY_BYTES or not 0 < made.port < 1 << 16:
                raise ValueError
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            shown = f"{text[:60]!r}{'...' if len(text) > 60 else ''}"
            raise UsageError(f"{shown} is no handle of a mycel group (of version {_VERSION})") from None
        return made

    @staticmethod
    def new_key() -> str:
        """A fresh key."""
        return secrets.token_hex(KEY_BYTES)

    @property
    def described(self) -> str:
        """Who it is, for messages."""
        place = "" if self.place is None else f", place {self.place}"
        return f"pid {self.pid} at {self.ip}:{self.port}{place}"


def _fits(value: object, kind: str) -> bool:
    if kind == "str":
        return isinstance(value, str)
    return (value is None and "None" in kind) or (isinstance(value, int) and not isinstance(value, bool))


def in_rank_order(handles: Sequence[str] | Collection[str], own: Handle) -> tuple[Handle, ...]:
    """The members of a group by rank: a sequence's order, or, of a set, that of places, then of machines.

    Args:
        handles: of all members, this process's included.
        own: this process's.

    Raises:
        UsageError: one is no handle.
        CommunicationError: one is there twice, or the own one is not there.
    """
    members = [Handle.from_text(text) for text in handles]
    if isinstance(handles, (set, frozenset)):
        members.sort(key=lambda m: (m.place is None, m.place or 0, m.host, m.ip, m.port))
    twice = [member for number, member in enumerate(members) if member in members[:number]]
    if twice:
        raise CommunicationError(f"a member is named twice among {len(members)} handles: {twice[0].described}")
    if own not in members:
        raise CommunicationError(
            f"this process ({own.described}) is not among the {len(members)} handles; a handle is valid for as long "
            "as its group object lives"
        )
    return tuple(members)
