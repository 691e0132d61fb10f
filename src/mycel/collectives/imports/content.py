"""What a file says, read once for all readers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Content"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A file.

    Attributes:
        text: all of it.
        data: the JSON value, where the text begins with a brace; otherwise ``None``.
    """

    text: str
    data: Any
