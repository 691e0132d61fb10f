"""What this process is planning just now, for ranks that ask: one that plans is at no call, and is not stuck either.

A first call of its kind waits for schedules to be made, verified and proved, which on a cold machine with other work
takes long. It is not the group's matter alone: a rank that plans for one group is missed in all of them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["planned", "planning"]

#: By numbers of their own: the process, since a child that is forked has begun none of it, and what it is, in words.
_under_way: dict[int, tuple[int, str]] = {}
_numbers = itertools.count()


@contextmanager
def planning(what: str) -> Iterator[None]:
    """Others are told, where they ask, that this process is planning ``what``.

    Examples:
        >>> with planning("all_gather over star4"):
        ...     planned()
        'all_gather over star4'
        >>> planned()
        ''
    """
    number = next(_numbers)
    _under_way[number] = (os.getpid(), what)
    try:
        yield
    finally:
        del _under_way[number]


def planned() -> str:
    """What has been planned for longest and is not ready; empty where nothing is."""
    own = os.getpid()
    return next((what for pid, what in tuple(_under_way.values()) if pid == own), "")
