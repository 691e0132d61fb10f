"""Reading files that say what is to be planned."""

from __future__ import annotations

import math
from pathlib import Path

from mycel.errors import UsageError

__all__ = ["checked_limit", "read_instance"]

#: Bytes of a file that is read.
_LONGEST_FILE = 1 << 26


def read_instance(file: Path, what: str) -> str:
    """The text of a file.

    Args:
        file: its name.
        what: it should hold, for messages.

    Raises:
        UsageError: it cannot be read; the message names the file.
    """
    try:
        if file.stat().st_size > _LONGEST_FILE:
            raise UsageError(f"{file}: more than {_LONGEST_FILE >> 20} MB, which no {what} takes")
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{file}: no {what}: not JSON in UTF-8") from None


def checked_limit(seconds: float) -> float:
    """Seconds of a search.

    Args:
        seconds: that were asked for.

    Raises:
        UsageError: they are below 0, or no number.
    """
    if not (math.isfinite(seconds) and seconds >= 0):
        raise UsageError(f"--limit {seconds}: seconds from 0, where 0 takes what is found at once")
    return seconds
