"""Time-outs that people set, as every wait can take them."""

from __future__ import annotations

from datetime import timedelta

__all__ = ["LONGEST_S", "bounded", "bounded_s", "given_s"]

#: Seconds that anything waits at most, 24 days. ``poll``, ``settimeout`` and TCP_USER_TIMEOUT count milliseconds in
#: 31 bits, torch's stores nanoseconds in 63; who sets a longer time-out, or none, wants to wait as long as it takes.
LONGEST_S = 24 * 86400.0


def bounded_s(timeout: timedelta | float) -> float:
    """A time-out in seconds, cut to ``LONGEST_S``; whatever is longer, infinite too, is that.

    So is what lies ages below zero: ``timedelta.max`` comes back like that from torch's C++ side, which counts
    microseconds in 63 bits.

    Examples:
        >>> bounded_s(timedelta(minutes=1)), bounded_s(float("inf")) == bounded_s(timedelta.max) == LONGEST_S
        (60.0, True)
        >>> bounded_s(timedelta(microseconds=86399999999999999999 - (1 << 64))) == LONGEST_S
        True
    """
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    return LONGEST_S if seconds < -LONGEST_S else min(seconds, LONGEST_S)


def bounded(timeout: timedelta | float) -> timedelta:
    """The same for those who want a ``timedelta``."""
    return timedelta(seconds=bounded_s(timeout))


def given_s(timeout: timedelta | None) -> float | None:
    """What torch passes for one call, in seconds; ``None`` where it stands for the group's own time-out.

    Examples:
        >>> given_s(timedelta(seconds=2)), given_s(timedelta(0)), given_s(None)
        (2.0, None, None)
    """
    return bounded_s(timeout) if timeout is not None and timeout > timedelta(0) else None
