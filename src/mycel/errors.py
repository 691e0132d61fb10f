"""Every exception mycel raises on purpose, in one tree.

::

    MycelError
    |-- TopologyError (ValueError)       a fabric description is malformed or cannot work
    |-- ScheduleError (ValueError)       a schedule or program is malformed
    |   `-- VerificationError            ... or well-formed and wrong: it would compute a wrong result
    |-- SynthesisError (ValueError)      no schedule of the requested kind exists for this fabric
    |-- UsageError (ValueError)          a call or command line asks for something that makes no sense
    |   `-- MissingExtraError (SystemExit)  ... or for what an extra brings that is not installed
    |-- CommunicationError (RuntimeError)  a collective failed while it ran
    |   |-- PeerLostError                a rank closed its connections or vanished
    |   |-- CollectiveTimeoutError       the deadline passed; names the rank that everybody waits for
    |   `-- MismatchError                ranks called different collectives, sizes or types
    `-- EmulationError (RuntimeError)    this machine cannot emulate the cluster, and why

Messages say what is wrong, where, what was got and expected, and the nearest way out. Those about what users wrote
quote it, so they are bounded: a file of one line of a megabyte gives a line that can be read.
"""

from __future__ import annotations

import re

__all__ = [
    "CollectiveTimeoutError",
    "CommunicationError",
    "EmulationError",
    "MismatchError",
    "MissingExtraError",
    "MycelError",
    "PeerLostError",
    "ScheduleError",
    "SynthesisError",
    "TopologyError",
    "UsageError",
    "VerificationError",
]


#: Characters of a word, and of a message, beyond which the middle is left out.
_LONGEST_WORD, _LONGEST = 200, 2000


def _bounded(message: str) -> str:
    long_word = rf"\S{{{_LONGEST_WORD + 1},}}"
    message = re.sub(long_word, lambda found: f"{found[0][:120]}...{found[0][-60:]}", message)
    return message if len(message) <= _LONGEST else f"{message[:1400]} ... {message[-500:]}"


class MycelError(Exception):
    """Root of everything mycel raises on purpose."""

    _quotes_users = False  # messages quote what users wrote, of any length

    def __init__(self, *arguments: object) -> None:
        if self._quotes_users:
            arguments = tuple(_bounded(a) if isinstance(a, str) else a for a in arguments)
        super().__init__(*arguments)


class TopologyError(MycelError, ValueError):
    """A fabric description is malformed, or describes a fabric on which nothing can work."""

    _quotes_users = True


class ScheduleError(MycelError, ValueError):
    """A schedule or program is malformed: unknown rank, chunk out of range, wrong version."""

    _quotes_users = True


class VerificationError(ScheduleError):
    """A schedule or program is well-formed and wrong; the message names the place.

    Attributes:
        grid: a drawing for people of what happens around that place, several lines; empty where there is none.
    """

    def __init__(self, message: str, *, grid: str = "") -> None:
        super().__init__(message)
        self.grid = grid


class SynthesisError(MycelError, ValueError):
    """No schedule of the requested kind exists for this fabric."""


class UsageError(MycelError, ValueError):
    """A call or command line asks for something that makes no sense."""

    _quotes_users = True


class MissingExtraError(UsageError, SystemExit):
    """What was imported or called needs a package that is not installed; the message names the extra that brings it.

    No line of the program is wrong, so where nobody catches it Python prints the one line, without a traceback, and
    ends with code 1, as for every ``SystemExit``. Who catches ``UsageError`` or ``Exception`` catches this too.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = f"mycel: {self}"


class CommunicationError(MycelError, RuntimeError):
    """A collective failed while it ran."""


class PeerLostError(CommunicationError):
    """A rank closed its connections or vanished in the middle of a collective."""


class CollectiveTimeoutError(CommunicationError):
    """A deadline passed; the message names the rank that everybody waits for."""


class MismatchError(CommunicationError):
    """Ranks called different collectives, sizes or types at the same point."""


class EmulationError(MycelError, RuntimeError):
    """This machine cannot emulate the cluster; the message says what is missing."""
