"""What is left behind, counted when it no longer changes: threads that were joined still have to leave the kernel."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: For so long it has to stay as it is; and after so long it counts as it is.
_STILL_S, _LIMIT_S = 0.3, 20.0


def settled(count: Callable[[], T]) -> T:
    """What ``count`` gives when it has given the same for a while."""
    begun = since = time.monotonic()
    found = count()
    while time.monotonic() - since < _STILL_S and time.monotonic() - begun < _LIMIT_S:
        time.sleep(0.02)
        if (now := count()) != found:
            found, since = now, time.monotonic()
    return found
